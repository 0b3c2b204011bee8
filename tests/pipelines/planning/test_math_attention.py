"""Plans for a card that has no fused attention: its matrices of scores are counted, in the plan as in the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import accelerator as devices
from ballast.memory import manager
from ballast.memory.accelerator import Accelerator


@pytest.mark.long
def test_scores_are_part_of_the_predicted_peak(tiny_folders: Callable[[str], Path], sim: ModuleType) -> None:
    """Of each stage: never below what is measured, at most 5 % above. A fused forecast in the cache is not taken."""
    family = tiny.FAMILIES["sd3"]
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim")
    width, height = (3 * side for side in family.size)
    run: dict[str, Any] = {
        "width": width, "height": height, "steps": 2, "guidance": family.guidance, **family.call_kwargs,
    }  # fmt: skip
    prompt = "a red boat " * 8
    fused = pipe.plan(**run, prompt=prompt, vram="1GB")
    sim.enable(total="4GB", fused_attention=False)
    planned = pipe.plan(**run, prompt=prompt, vram="1GB")
    assert planned.sampling.peak_vram_bytes > 1.5 * fused.sampling.peak_vram_bytes
    pipe.runner = pipe.runner.set(vram_bytes=2**30)
    cond = pipe.encode(prompt)
    latents = pipe.sample(cond, **run)
    pipe.decode(latents)
    measured = {record.name: record.peak_bytes for record in manager("sim").timeline.stages}
    for stage in planned.stages:
        peak = measured[stage.name]
        assert peak <= stage.peak_vram_bytes <= 1.05 * peak, stage.name


def test_torch_is_asked_with_the_shapes_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel that takes them is enough, and none means the matrices of scores. Nothing large is made to ask."""
    asked: list[Any] = []
    answers = dict.fromkeys(("flash", "efficient", "cudnn"), False)
    backends = torch.backends.cuda
    monkeypatch.setattr(backends, "SDPAParams", lambda *params: asked.append(params))
    for kernel in answers:
        monkeypatch.setattr(backends, f"can_use_{kernel}_attention", lambda _, kernel=kernel: answers[kernel])
    stand_in = devices._stand_in
    monkeypatch.setattr(devices, "_stand_in", lambda tensor, device: stand_in(tensor, torch.device("cpu")))
    fuses = functools.partial(devices._has_kernel, torch.device("cuda", 0))
    query = torch.empty(2, 8, 2**20, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, 2**20, 2**20, dtype=torch.bool, device="meta")
    assert not fuses(query, query, query, mask, 0.0, False, enable_gqa=True, scale=1.0)
    q, k, v, given, *options = asked[0]
    assert q.shape == k.shape == v.shape == query.shape and q.dtype == query.dtype and q.stride(-1) == 1
    assert (given.shape, given.dtype, options) == (mask.shape, torch.bool, [0.0, False, True])
    assert q.untyped_storage().nbytes() == 128
    for kernel in answers:
        answers.update(dict.fromkeys(answers, False) | {kernel: True})
        assert fuses(query, query, query)


def test_devices_that_differ_in_attention_share_no_forecast(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Accelerator(torch.device("sim", 0))
    assert (card.fuses, card.attention) == (None, "")
    sim.enable(total="4GB", fused_attention=False)
    assert card.fuses is not None and not card.fuses() and torch.__version__ in card.attention
    on_cpu = Accelerator(torch.device("cpu"))
    assert (on_cpu.fuses, on_cpu.attention) == (None, "")
    mac = Accelerator.__new__(Accelerator)
    mac.device, mac.is_cpu, mac._module = torch.device("mps", 0), False, None
    assert mac.fuses is not None and not mac.fuses() and mac.attention.startswith("MPS")
