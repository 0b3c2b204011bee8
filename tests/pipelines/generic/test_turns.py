"""Units that take turns in each step: they stay beside each other where there is room, else the plan has the cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import manager
from ballast.memory.planning.turns import Turns, beside_each_other
from pictured import pipelines as tiny_pictured
from pictured.pictures import picture

Folders = Callable[[str], Path]
RUN: dict[str, Any] = {"width": 48, "height": 32, "control": picture(48, 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    return tiny_pictured.folders_in(tmp_path_factory.mktemp("turns"), tiny_folders)


@pytest.fixture
def folder(folders: Folders) -> Path:
    return folders("flux_controlnet")


def run(pipe: Any, cond: Any, steps: int, **more: Any) -> tuple[torch.Tensor, Any, int]:
    """The latents, the record of sampling, and the bytes of its units that came to the device."""
    latents = pipe.sample(cond, steps=steps, **RUN, **more)
    record = manager("sim").timeline.stages[-1]
    return latents, record, sum(unit.bytes_in for unit in record.units.values())


def came_in_steps(record: Any, unit: str) -> list[int]:
    """Return the bytes of a unit's weights that came for each of its calls."""
    came, steps = 0, []
    for event in record.events:
        if event.unit == unit and event.kind in ("place", "ran"):
            came += event.bytes
            if event.kind == "ran":
                steps.append(came)
                came = 0
    return steps


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3_controlnet", pytest.param("flux_controlnet", marks=pytest.mark.soak)])
def test_both_come_once_where_both_fit(name: str, folders: Folders, sim: ModuleType) -> None:
    for more in ({}, {"weights": "int8"}):
        pipe = ballast.open_pipeline(folders(name), device="sim", **more)
        cond = pipe.encode("a boat")
        came = {run(pipe, cond, steps)[2] for steps in (2, 7)}
        assert len(came) == 1 and came == {sum(unit.size_bytes for unit in pipe.denoisers)}
        assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("name", "vram", "strategy", "turns"),
    [
        ("flux_controlnet", 1_220_000, "auto", True),
        pytest.param("flux_controlnet", 1_330_000, "auto", False, marks=pytest.mark.soak),
        pytest.param("flux_controlnet", 1_700_000, "auto", False, marks=pytest.mark.soak),
        pytest.param("flux_controlnet", 1_700_000, "streamed", False, marks=pytest.mark.soak),
        pytest.param("flux_controlnet", 2_500_000, "leafwise", True, marks=pytest.mark.soak),
        pytest.param("flux_controlnet", 2_500_000, "resident", False, marks=pytest.mark.soak),
        pytest.param("flux_controlnet", 1_350_000, "streamed", False, marks=pytest.mark.soak),
        pytest.param("sd3_controlnet", 1_470_000, "auto", True, marks=pytest.mark.soak),
        pytest.param("sd3_controlnet", 1_500_000, "auto", True, marks=pytest.mark.soak),
        ("sd3_controlnet", 1_500_000, "streamed", True),  # one piece lies in the ring until this leaves
        pytest.param("sd3_controlnet", 1_550_000, "auto", False, marks=pytest.mark.soak),
        pytest.param("sd3_controlnet", 2_000_000, "auto", False, marks=pytest.mark.soak),
        pytest.param("sd3_controlnet", 2_000_000, "streamed", False, marks=pytest.mark.soak),
    ],
)
def test_the_plan_is_the_run(
    name: str, vram: int, strategy: str, turns: bool, folders: Folders, sim: ModuleType
) -> None:
    """Its bytes of each step and its peak, whether they stay, stream beside each other, or take turns."""
    whole = ballast.open_pipeline(folders(name), device="sim")
    cond, pipe = whole.encode("a boat"), whole.within(vram=vram)
    given = {"steps": 4, "strategy": strategy, **RUN}
    planned = next(s for s in pipe.plan(cond=cond, vram=vram, **given).stages if s.name == "sample")
    latents, record, _ = run(pipe, cond, 4, strategy=strategy)
    assert {unit.unit: [unit.step_bytes] * 3 for unit in planned.units} == {
        unit.unit: came_in_steps(record, unit.unit)[1:] for unit in planned.units
    }
    assert record.peak_bytes <= planned.peak_vram_bytes <= min(vram, 1.05 * record.peak_bytes)
    assert all(bool(unit.turn_bytes) == (turns and unit.stay_bytes > 0) for unit in planned.units)
    assert all(("come back in each step" in unit.reason) == bool(unit.turn_bytes) for unit in planned.units)
    assert torch.equal(latents, whole.sample(cond, steps=4, **RUN))
    assert sim.stats().allocated_bytes == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", ["flux_controlnet", "sd3_controlnet"])
@pytest.mark.parametrize("strategy", ["auto", "streamed"])
def test_planned_bytes_come_with_any_budget(name: str, strategy: str, folders: Folders, sim: ModuleType) -> None:
    whole = ballast.open_pipeline(folders(name), device="sim")
    cond, ran = whole.encode("a boat"), 0
    for vram in range(1_160_000, 2_200_000, 40_000):
        pipe = whole.within(vram=vram)
        planned = next(
            s for s in pipe.plan(cond=cond, vram=vram, steps=3, strategy=strategy, **RUN).stages if s.name == "sample"
        )
        if not all(unit.fits for unit in planned.units):
            continue
        record, ran = run(pipe, cond, 3, strategy=strategy)[1], ran + 1
        for unit in planned.units:
            assert came_in_steps(record, unit.unit)[1:] == [unit.step_bytes] * 2, f"{unit.unit} in {vram}"
    assert ran > 15


def test_turns_cost_seconds_in_the_plan(folder: Path, sim: ModuleType) -> None:
    from ballast.memory.rates import Rates

    pipe = ballast.open_pipeline(folder, device="sim")
    cond, rates = pipe.encode("a boat"), Rates(1e7, 1e7, 1e9, 1e12)
    wide, narrow = (pipe.plan(cond=cond, steps=8, vram=vram, rates=rates, **RUN) for vram in ("64MB", 1_230_000))
    for unit in next(stage for stage in narrow.stages if stage.name == "sample").units:
        assert unit.turn_seconds >= 0.95 * unit.turn_bytes / rates.pinned_bytes_per_second > 0
    assert wide.step_seconds < narrow.step_seconds


def test_encoders_of_two_prompts_stay_beside_each_other(tiny_folders: Folders, sim: ModuleType) -> None:
    """They are called in turns, for the prompt and for the negative one."""
    pipe: Any = ballast.open_pipeline(tiny_folders("sd3"), device="sim", cache_dir=None)
    pipe.encode("a boat", "blurry")
    record = manager("sim").timeline.stages[-1]
    held = [sum(resident.bytes for resident in event.residents) for event in record.events]
    planned = {unit.unit: unit for unit in record.planned.units}
    assert max(held) == sum(unit.weights_bytes for unit in planned.values())
    assert record.peak_bytes <= record.planned.peak_vram_bytes <= 1.05 * record.peak_bytes
    assert not any(unit.turn_bytes for unit in planned.values())


def test_which_stay_beside_each_other() -> None:
    def of(resident: int, least: int, calls: int = 4, room: int = 100, turns: int = 4) -> Turns:
        return Turns({"resident": resident, "streamed": least}, room, calls, turns)

    assert beside_each_other({"a": of(60, 5), "b": of(40, 5)}) == {"a": 60, "b": 40}
    assert beside_each_other({"a": of(70, 5), "b": of(40, 5)}) == {"a": 5, "b": 40}
    assert beside_each_other({"a": of(70, 60), "b": of(80, 60)}) == {}
    assert beside_each_other({"a": of(70, 5, calls=400), "b": of(40, 5)}) == {}  # it would stream in each of 100 calls
    assert beside_each_other({"a": of(60, 5, room=90), "b": of(40, 5)}) == {"a": 5, "b": 40}
    assert beside_each_other({"a": of(60, 5)}) == {}
