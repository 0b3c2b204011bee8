"""Runs within a run: `on_step` samples, decodes, encodes and frees, and the outer run ends as it would without."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import stage_lock
from safetensors.torch import save_file
from selection import few

Folders = Callable[[str], Path]
RUN = {"width": 48, "height": 32, "steps": 3, "guidance": 4.0, "seed": 5}


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, tensors = torch.Generator().manual_seed(1), {}
    for block in range(3):
        for name in ("to_q", "to_v"):
            key = f"transformer.transformer_blocks.{block}.attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(4, 32, generator=random)
            tensors[f"{key}.lora_B.weight"] = torch.randn(32, 4, generator=random)
    path = tmp_path_factory.mktemp("lora") / "lora.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("nested")


def at_first(do: Callable[[], Any]) -> Callable[..., None]:
    def report(step: int, steps: int, latents: torch.Tensor) -> None:
        if step == 1:
            do()

    return report


@pytest.mark.parametrize("device", few(["cpu", "sim"], "sim"))
def test_a_run_within_a_run_has_its_own_loras(device: str, lora: Path, tiny_folders: Folders, sim: ModuleType) -> None:
    run = RUN | {"steps": 2}
    plain = ballast.open_pipeline(tiny_folders("sd3"), device=device)
    worn, weak = (ballast.open_pipeline(tiny_folders("sd3"), device=device, loras=[(lora, s)]) for s in (1.0, 0.3))
    cond = plain.encode("a red boat", "blurry", max_sequence_length=48)
    alone = {pipe: pipe.sample(cond, **run) for pipe in (plain, worn, weak)}
    for outer in alone:
        for inner in set(alone) - {outer}:
            made: list[torch.Tensor] = []
            found = outer.sample(cond, on_step=at_first(lambda p=inner, m=made: m.append(p.sample(cond, **run))), **run)
            torch.testing.assert_close(found, alone[outer], atol=0, rtol=0)
            torch.testing.assert_close(made[0], alone[inner], atol=0, rtol=0)


SHORT = RUN | {"steps": 2}
INNER: dict[str, Callable[[Any, Any], Any]] = {
    "cpu": lambda pipe, cond: pipe.sample(cond, strategy="cpu", **SHORT),
    "streamed": lambda pipe, cond: pipe.sample(cond, strategy="streamed", **SHORT),
    "leafwise": lambda pipe, cond: pipe.sample(cond, strategy="leafwise", **SHORT),
    "budget": lambda pipe, cond: pipe.within(vram="2MB").sample(cond, **SHORT),
    "kept": lambda pipe, cond: pipe.within(keep=True).sample(cond, **SHORT),
    "other size": lambda pipe, cond: pipe.sample(cond, **SHORT | {"width": 64, "height": 64}),
    "decode": lambda pipe, cond: pipe.decode(torch.zeros(1, 4, 4, 6)),
    "encode": lambda pipe, cond: pipe.encode("another", "one", max_sequence_length=48),
    "free": lambda pipe, cond: pipe.manager.free(),
    "set_loras": lambda pipe, cond: pipe.set_loras([]),
    "plan": lambda pipe, cond: pipe.plan(width=64, height=32),
}


@pytest.mark.parametrize("strategy", few(["resident", "streamed", "cpu"], "streamed"))
@pytest.mark.parametrize("inner", few(INNER, *(name for name in INNER if name not in ("streamed", "other size"))))
def test_what_on_step_does_leaves_the_run_as_it_was(
    inner: str, strategy: str, tiny_folders: Folders, lora: Path, cache: Path, sim: ModuleType
) -> None:
    kept = None if inner == "encode" else cache
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim", loras=[(lora, 1.0)], cache_dir=kept)
    cond = pipe.encode("a red boat", "blurry", max_sequence_length=48)
    expected = pipe.sample(cond, strategy=strategy, **SHORT)
    found = pipe.sample(cond, strategy=strategy, on_step=at_first(lambda: INNER[inner](pipe, cond)), **SHORT)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert [stage.name for stage in pipe.manager.timeline.stages].count("sample") >= 2
    assert sim.stats().allocated_bytes == 0 and not any(unit.stages or unit.leases for unit in pipe.denoisers)
    torch.testing.assert_close(pipe.decode(found), pipe.decode(expected), atol=0, rtol=0)


def test_an_inner_run_that_fails_leaves_the_outer_one_as_it_was(
    lora: Path, tiny_folders: Folders, sim: ModuleType
) -> None:
    plain = ballast.open_pipeline(tiny_folders("sd3"), device="sim")
    worn = ballast.open_pipeline(tiny_folders("sd3"), device="sim", loras=[(lora, 1.0)])
    cond = plain.encode("a red boat", "blurry", max_sequence_length=48)
    expected = plain.sample(cond, **RUN)

    def fail() -> None:
        with pytest.raises(ArithmeticError):
            worn.sample(cond, on_step=at_first(lambda: 1 // 0), strategy="cpu", **RUN)

    torch.testing.assert_close(plain.sample(cond, on_step=at_first(fail), **RUN), expected, atol=0, rtol=0)
    with pytest.raises(ArithmeticError):
        plain.sample(cond, on_step=at_first(lambda: worn.sample(cond, on_step=at_first(lambda: 1 // 0), **RUN)), **RUN)
    assert sim.stats().allocated_bytes == 0
    torch.testing.assert_close(plain.sample(cond, **RUN), expected, atol=0, rtol=0)


def test_a_run_in_the_middle_of_a_step_and_other_kernels_are_refused(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    cond = pipe.encode("a red boat", "blurry", max_sequence_length=48)
    module = pipe.denoisers[0].module
    hook = module.transformer_blocks[0].register_forward_hook(lambda *_: (pipe.sample(cond, **RUN), None)[1])
    with pytest.raises(RuntimeError, match="is in the middle of a step. Run it again from on_step, or after"):
        pipe.sample(cond, **RUN)
    hook.remove()
    inside = at_first(lambda: pipe.sample(cond, **RUN))
    with pytest.raises(RuntimeError, match="cannot change compile and attention. Give it those of the outer one"):
        pipe.sample(cond, attention="_native_math", on_step=inside, **RUN)
    same = at_first(lambda: pipe.sample(cond, attention="_native_math", **RUN))
    expected = pipe.sample(cond, attention="_native_math", **RUN)
    assert torch.equal(pipe.sample(cond, attention="_native_math", on_step=same, **RUN), expected)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_thread_that_on_step_waits_for_is_refused(
    device: str, tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, after a while, and the outer run goes on; the device is free afterwards, for threads too."""
    monkeypatch.setattr(stage_lock, "PATIENCE_SECONDS", 0.5)
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device=device)
    cond = pipe.encode("a red boat", max_sequence_length=48)
    alone = pipe.sample(cond, **RUN)
    with ThreadPoolExecutor(1) as threads:
        refused: list[BaseException | None] = []

        def wait() -> None:
            refused.append(threads.submit(pipe.sample, cond, **RUN).exception(timeout=60))

        assert torch.equal(pipe.sample(cond, on_step=at_first(wait), **RUN), alone)
        assert re.match(r"another run on this device has been in its on_step for 0.5 s, [^\n]+$", str(refused[0]))
        assert torch.equal(threads.submit(pipe.sample, cond, **RUN).result(timeout=60), alone)


@pytest.mark.long
def test_a_stage_that_takes_long_is_waited_for(
    tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its `on_step` takes shorter each time, and where it runs something within."""
    monkeypatch.setattr(stage_lock, "PATIENCE_SECONDS", 1.5)
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    cond = pipe.encode("a red boat", max_sequence_length=48)
    alone = pipe.sample(cond, **RUN)
    with ThreadPoolExecutor(1) as threads:
        waiting: list[Any] = []

        def slow(step: int, *_: Any) -> None:
            if step == 1:
                waiting.append(threads.submit(pipe.sample, cond, **RUN))
                pipe.sample(cond, on_step=lambda *_: time.sleep(0.7), **RUN)
            time.sleep(0.7)

        assert torch.equal(pipe.sample(cond, on_step=slow, **RUN), alone)
        assert torch.equal(waiting[0].result(timeout=60), alone)
