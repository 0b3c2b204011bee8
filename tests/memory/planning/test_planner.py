"""The planner alone: its seconds, its choices and its words. No device but the virtual clock's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import ballast
import pytest
import tiny
from ballast.memory.planning.forecast import Forecast, UnitForecast
from ballast.memory.planning.planner import Plan, UnitSizes, make_plan, step_seconds
from ballast.memory.planning.residency import BlockSize, streamed_blocks
from ballast.memory.rates import Rates
from ballast.memory.sizes import parse_bytes
from hypothesis import given
from hypothesis import strategies as st

GB = 2**30
RATES = Rates(25e9, 10e9, 3e9, 100e12, "measured")
BLOCK = BlockSize(GB // 4, GB // 4)
SIZES = UnitSizes(11 * GB, GB, (BLOCK,) * 40, stay_bytes=0, leaf_bytes=GB // 8)
CALL = 40 * 0.25e12
WORK = UnitForecast(GB // 16, GB // 2, GB // 2, GB // 2 + GB // 8, 56, 56 * CALL, (56 * CALL / 40,) * 40)


def planned(budget: str, work: UnitForecast = WORK, ram: str = "64GB", **more: object) -> Plan:
    return make_plan("dit", SIZES, work, RATES, parse_bytes(budget), parse_bytes(ram), steps=28, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [0.3, 1, 1.5, 3])
@pytest.mark.parametrize("share", [0, 0.2, 0.35, 0.5, 0.75])
def test_uniform_blocks_run_at_the_bound(ratio: float, share: float) -> None:
    streamed = streamed_blocks([100] * 40, int(share * 4000))
    seconds = step_seconds([1.0] * 40, [ratio] * 40, streamed, before=0.5)
    bound = max(40.5, ratio * len(streamed))
    assert bound <= seconds * 1.0001
    assert seconds <= 1.02 * bound


@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 4)), min_size=3, max_size=30),
    st.floats(0, 1),
    st.floats(0, 5),
)
def test_no_step_is_faster_than_its_bound(blocks: list[tuple[float, float]], share: float, before: float) -> None:
    compute, transfer = zip(*blocks, strict=True)
    sizes = [int(1e6 * seconds) for seconds in transfer]
    streamed = streamed_blocks(sizes, int(share * sum(sizes)))
    seconds = step_seconds(compute, transfer, streamed, before)
    copied = sum(transfer[i] for i in streamed) if len(streamed) > 2 else 0.0
    assert seconds >= 0.999 * max(before + sum(compute), copied)
    assert seconds <= 1.001 * (before + sum(compute) + copied + max(transfer))


def test_choice_follows_the_budget() -> None:
    plans = {
        budget: planned(budget) for budget in ("24GB", "11.6GB", "11.5GB", "8GB", "2.1GB", "2GB", "0.7GB", "0.6GB")
    }
    assert [plan.placement for plan in plans.values()] == ["resident"] * 2 + ["streamed"] * 3 + ["leafwise"] * 3
    assert [plan.fits for plan in plans.values()] == [True] * 7 + [False]
    for budget, plan in plans.items():
        assert plan.peak_vram_bytes <= parse_bytes(budget) or not plan.fits
        assert plan.step_seconds >= 0.999 * plan.bound_seconds
        assert plan.first_step_seconds > plan.step_seconds
        assert len(plan.resident_blocks) + len(plan.streamed) == 40
    assert len(plans["8GB"].resident_blocks) == 23  # (8 - 1 fixed - 9/16 work - 2/4 ring) / 0.25, whole blocks
    assert plans["8GB"].weights_bytes == GB + 23 * GB // 4 + GB // 2
    assert plans["8GB"].ram_bytes == 11 * GB


def test_reasons_and_what_was_rejected() -> None:
    plan = planned("8GB")
    assert plan.reason == (
        "11.0 GB of weights do not fit 8.00 GB: 23 of 40 blocks stay, 17 pass through two slots, and the copies set "
        "the pace."
    )
    assert [(other.label, other.why_not) for other in plan.rejected] == [
        ("resident", "11.6 GB do not fit 8.00 GB"),
        ("streamed, 0 of 40 blocks stay", "2.4 times as slow"),
        ("leafwise", "7.0 times as slow"),
    ]
    assert planned("24GB").reason == "All 11.0 GB of weights fit 24.0 GB with their activations."
    assert planned("0.5GB").reason.startswith("Nothing fits 512 MB: leafwise wants least, ")
    assert planned("8GB", strategy="resident").fits is False
    assert "not what was asked for" in {other.why_not for other in planned("24GB", strategy="leafwise").rejected}


def test_short_ram_means_disk_with_its_seconds() -> None:
    plan = planned("8GB", ram="4GB", from_disk=True)
    assert plan.from_disk and plan.label == "streamed from disk, 23 of 40 blocks stay"
    assert plan.ram_bytes == 3 * GB // 4
    assert plan.step_seconds == pytest.approx(2 * 17 * GB / 4 / 3e9, rel=0.02)
    assert "so they are read from disk, 3.0 s of each step" in plan.reason
    assert planned("24GB", ram="4GB", from_disk=True).placement == "resident"
    assert planned("1GB", ram="4GB", from_disk=True).placement == "leafwise", "held in RAM all the same"
    assert planned("8GB", ram="4GB").ram_bytes == 11 * GB, "what cannot run from disk is held all the same"


def test_forecasts_survive_a_file_and_damaged_ones_are_errors() -> None:
    forecast = Forecast(5, {"dit": WORK})
    assert Forecast.from_dict(forecast.to_dict()) == forecast
    for damaged in ({}, {"idle_bytes": 1, "units": {"a": {}}}, {"idle_bytes": 1, "units": {"a": {"calls": "x"}}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Forecast.from_dict(damaged)


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox"])
def test_predicted_seconds_are_those_of_the_virtual_clock(
    name: str, tiny_folders: Callable[[str], Path], sim: ModuleType
) -> None:
    """Streamed with nothing and with half of the blocks resident, copies slower and faster than the computing."""
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(tiny_folders(name), device="sim")
    cond = pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs)
    size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "guidance": family.guidance}
    run = {**size, "steps": 5, **family.call_kwargs}
    for h2d_gbps in (0.05, 5.0):
        sim.enable(total="1GB", h2d_gbps=h2d_gbps, tflops=0.01)
        least, most = (
            pipe.plan(**run, cond=cond, vram=vram, strategy=strategy).sampling.peak_vram_bytes
            for vram, strategy in ((1, "streamed"), ("1GB", "resident"))
        )
        for vram in (least, (least + most) // 2):
            plan = pipe.plan(**run, cond=cond, vram=vram).sampling
            pipe.vram_bytes = vram
            ends: list[float] = []
            pipe.sample(cond, **run, on_step=lambda *_, ends=ends: ends.append(sim.stats().clock_seconds))
            measured = (ends[-1] - ends[1]) / 3
            assert plan.placement == "streamed"
            assert plan.step_seconds == pytest.approx(measured, rel=0.1), (h2d_gbps, vram)
