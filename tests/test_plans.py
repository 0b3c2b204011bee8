"""Plans: what they predict is what is measured, at any size and budget; full size takes seconds and no weights."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager

Folders = Callable[[str], Path]
SCALES = ((1, 1), (2, 1), (2, 2))  # of a family's own width and height
STEPS = 2


@functools.cache
def conditioning(name: str, folder: Path) -> Any:
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(folder, device="cpu")
    return pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_predicted_peak_is_what_is_measured(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """3 shapes, 4 budgets: never below, at most 5 % above; within the budget; bitwise the resident result."""
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(tiny_folders(name), device="sim")
    cond = conditioning(name, tiny_folders(name))
    for across, down in SCALES:
        size = {"width": family.size[0] * across, "height": family.size[1] * down, "frames": family.frames}
        run: dict[str, Any] = {**size, "steps": STEPS, "guidance": family.guidance, **family.call_kwargs}
        plan = functools.partial(pipe.plan, **run, cond=cond)
        peaks = {
            strategy: plan(vram="1GB" if strategy != "streamed" else 1, strategy=strategy).sampling.peak_vram_bytes
            for strategy in ("resident", "streamed", "leafwise")
        }
        budgets = [
            peaks["resident"],
            (peaks["resident"] + peaks["streamed"]) // 2,
            peaks["streamed"],
            peaks["leafwise"],
        ]
        expected = None
        seen = []
        for budget in budgets:
            predicted = plan(vram=budget).stages[0]
            pipe.vram_bytes = budget
            latents = pipe.sample(cond, **run, on_step=lambda step, steps, latents: None)
            record = manager("sim").timeline.stages[-1]
            expected = latents if expected is None else expected
            torch.testing.assert_close(latents, expected, atol=0, rtol=0)
            assert record.peak_bytes <= predicted.peak_vram_bytes <= 1.05 * record.peak_bytes, (size, budget)
            assert record.peak_bytes <= budget
            placements = {plan.unit: plan.placement for plan in predicted.units}
            assert placements == {unit.name: unit.placement for unit in record.units.values()}, (size, budget)
            seen.append(predicted.main.placement)
        assert seen[0] == "resident"
        assert seen[-1] == "leafwise" or len(set(budgets)) < 4
