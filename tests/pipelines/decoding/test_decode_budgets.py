"""Any budget for a VAE: the plan says which way it goes and what that takes, and the run keeps to both."""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import simulated
from ballast.memory.memory_manager import manager
from ballast.pipelines.planning.plans import Machine, plan_vae
from ballast.pipelines.stages.vae_stages import vae_run

Folders = Callable[[str], Path]

# Those whose budgets did not hold once, and all with BALLAST_SOAK=1.
NAMES = list(tiny.FAMILIES) if os.environ.get("BALLAST_SOAK") else ["flux", "hunyuan_video"]
SIZES = [(12, 20), (7, 9), (9, 5), (13, 6), (24, 40)]  # of latents; the last for those that take no time
PIXELS = 2e-4  # the most that a pixel in 0..1 may differ
GB = 2**30


def latents_for(pipe: Any, size: tuple[int, int]) -> torch.Tensor:
    channels = pipe.decoder_config.get("latent_channels") or pipe.decoder_config.get("z_dim")
    frames = [3 if pipe.is_video else 1] if pipe.latent_dimensions == 5 else []
    return torch.randn(1, channels, *frames, *size, generator=torch.Generator().manual_seed(0))


def work_of(name: str, pipe: Any, size: tuple[int, int], method: str) -> tuple[Callable[[], Any], Any, dict]:
    """A call of a VAE's method, the tensor that it is given, and its further arguments."""
    z = latents_for(pipe, size)
    timestep = tiny.FAMILIES[name].call_kwargs.get("decode_timestep") if name == "ltx_timestep" else None
    more = {} if timestep is None else {"temb": torch.tensor([timestep])}
    if method == "decode":
        return lambda: pipe.decode(z, **more), z, more
    frames = pipe.decode(z, **more)
    picture = (frames if frames.ndim == 4 else frames[:, 0])[:1]  # each VAE has its own ratio
    pixels = picture.permute(0, 3, 1, 2) * 2 - 1
    return lambda: pipe.encode_image(picture), pixels.unsqueeze(2) if pipe.latent_dimensions == 5 else pixels, {}


def check_budget(pipe: Any, budget: int, method: str, call: Callable[[], Any], given: Any, more: dict) -> tuple:
    """Plan and run within a budget, and hold one against the other. Returns the way, and the result."""
    pipe.runner = pipe.runner.set(vram_bytes=budget)
    planned = plan_vae(
        method,
        vae_run(pipe.model, pipe.runner, method, more, budget, planned=True),
        given,
        Machine(budget, 2**40),
    )
    manager("sim").timeline.clear()
    gc.collect()
    simulated.reset_stats()
    gc.disable()
    try:
        result, peak = call(), simulated.stats().peak_bytes
        assert not simulated.stats().allocated_bytes  # nor does a cycle hold any
    finally:
        gc.enable()
    (record,) = manager("sim").timeline.stages  # nothing was tried in vain
    assert all(plan.fits for plan in planned.units), planned
    assert planned.note.startswith(record.note) and bool(planned.note) == bool(record.note)
    assert peak <= budget, (record.note, peak, budget)
    assert peak <= planned.peak_vram_bytes <= 1.05 * peak, (record.note, peak, planned)
    assert all(math.isfinite(plan.step_seconds) for plan in planned.units), planned
    return record.note, result


@pytest.mark.soak
@pytest.mark.parametrize("method", ["decode", "encode"])
@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_kept_as_planned(name: str, method: str, tiny_folders: Folders, sim: ModuleType) -> None:
    pipe: Any = ballast.open_pipeline(tiny_folders(name), device="sim")
    chosen = random.Random(f"{name} {method}")
    call, given, more = work_of(name, pipe, chosen.choice(SIZES[: 4 if pipe.is_video else 5]), method)
    expected = call()
    forecasts = vae_run(pipe.model, pipe.runner, method, more, GB, planned=True).forecasts
    weights, whole = pipe.decoder.size_bytes, forecasts.whole(given).units[pipe.decoder.name].peak_bytes
    budgets = [weights + whole, weights + whole - 1, weights, weights + 2]
    budgets += [weights + int(whole * chosen.random() ** 2) for _ in range(2)]
    notes = []
    for budget in budgets:
        note, result = check_budget(pipe, budget, method, call, given, more)
        notes.append(note)
        if "tiles" not in note:
            torch.testing.assert_close(result, expected, atol=PIXELS, rtol=0)
    assert notes[0] == "" and notes[1] and notes[2:4] == ["on the CPU"] * 2


def test_picture_without_further_frames_goes_in_stripes(tiny_folders: Folders, sim: ModuleType) -> None:
    """HunyuanVideo 1.5 takes the frames behind the first apart, also where there are none."""
    pipe: Any = ballast.open_pipeline(tiny_folders("hunyuan_video15"), device="sim")
    forecasts = vae_run(pipe.model, pipe.runner, "encode", {}, GB, planned=True).forecasts
    assert forecasts.stripes(torch.rand(1, 3, 1, 160, 192), 2_000_000).peak_bytes <= 2_000_000
