"""A strategy that the user asks for keeps the stated budget, or is refused in one line with the least that would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pyramid_folders
import pytest
import tiny
import torch
from ballast.memory import DoesNotFitError
from ballast.memory.sizes import parse_bytes

Folders = Callable[[str], Path]
FORCED = ("resident", "streamed", "leafwise")
SOON = (("flux", "resident"), ("flux", "streamed"), ("lumina2", "leafwise"))
LATER = (("wan", "leafwise"), ("mmdit", "streamed"))


def run_of(name: str, folders: Folders, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """A pipeline on the simulated card, and the arguments of a short run."""
    if name == "mmdit":
        folder = pyramid_folders.save("mmdit", tmp_path / name)
        size: dict[str, Any] = {"width": 64, "height": 64, "frames": 9, "guidance": 2.0}
    else:
        family = tiny.FAMILIES[name]
        folder = folders(name)
        size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, **family.call_kwargs}
        size["guidance"] = family.guidance
    return ballast.open_pipeline(folder, device="sim"), {"steps": 2, **size}


def marked(case: tuple[str, str]) -> Any:
    mark = pytest.mark.long if case in LATER else pytest.mark.soak
    return case if case in SOON else pytest.param(*case, marks=mark)


@pytest.mark.parametrize(("name", "strategy"), map(marked, product(("flux", "lumina2", "wan", "mmdit"), FORCED)))
def test_forced_strategy_keeps_the_budget_or_is_refused(
    name: str, strategy: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    pipe, size = run_of(name, tiny_folders, tmp_path)
    family = tiny.FAMILIES.get(name)
    cond = pipe.encode("a red boat", **(family.encode_kwargs if family else {}))
    expected = pipe.sample(cond, **size)
    pipe.runner = pipe.runner.set(vram_bytes=20_000)  # less than any of them takes
    with pytest.raises(DoesNotFitError) as refused:
        pipe.sample(cond, **size, strategy=strategy)
    told = str(refused.value)
    assert "\n" not in told and f"{strategy.capitalize()}, as asked for, does not fit" in told
    assert sim.stats().allocated_bytes == 0
    (least,) = re.findall(r"Raise the vram budget to ([\d.]+ \w+)", told)
    for budget in (int(1.01 * parse_bytes(least)), int(1.5 * parse_bytes(least))):
        pipe.runner = pipe.runner.set(vram_bytes=budget)
        sim.reset_stats()
        torch.testing.assert_close(pipe.sample(cond, **size, strategy=strategy), expected, atol=1e-4, rtol=1e-4)
        assert sim.stats().peak_bytes <= budget
        plan = pipe.plan(**size, cond=cond, strategy=strategy)
        assert plan.sampling.fits and plan.sampling.peak_vram_bytes <= budget


@pytest.mark.parametrize("name", ["lumina2", "mmdit"])
def test_plan_of_a_forced_strategy_that_exceeds_the_budget_says_so(
    name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    pipe, size = run_of(name, tiny_folders, tmp_path)
    family = tiny.FAMILIES.get(name)
    cond = pipe.encode("a red boat", **(family.encode_kwargs if family else {}))
    plan = pipe.plan(**size, cond=cond, strategy="streamed", vram=20_000)
    assert not plan.fits and "Streamed, as asked for, does not fit" in plan.reason
