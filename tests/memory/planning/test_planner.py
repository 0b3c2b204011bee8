"""The planner alone: its seconds, its choices and its words. No device but the virtual clock's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import ballast
import pytest
import tiny
import torch
from ballast.memory import ManagedModel
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.planning.batches import best_batch, scaled
from ballast.memory.planning.fit import Demand, fitting_placements, sizes_of
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.planning.kept_dequantized import moment_bytes
from ballast.memory.planning.planner import GroupSize, Plan, UnitSizes, least_call_seconds, make_plan
from ballast.memory.planning.room import HeldWeights, PlanRequest, Room
from ballast.memory.planning.runplan import RunPlan, StagePlan, compare
from ballast.memory.rates import Rates
from ballast.memory.sizes import parse_bytes
from torch import nn

GB = 2**30
RATES = Rates(25e9, 10e9, 3e9, 100e12, "measured")
PIECE = GB // 16
Q4_K = next(kind for kind in TYPES.values() if kind.name == "Q4_K")
SIZES = UnitSizes(11 * GB, GB, tuple(GroupSize(PIECE, PIECE, (f"m{i}",)) for i in range(160)))
CALL = 40 * 0.25e12
EACH = tuple((f"m{i}", Operations(56 * CALL / 160)) for i in range(160))
WORK = UnitForecast(GB // 16, GB // 2, GB // 2, 56, Operations(56 * CALL), EACH)


def planned(
    budget: str, work: UnitForecast = WORK, ram: str = "64GB", strategy: str = "auto", from_disk: bool = False
) -> Plan:
    room, held = Room(parse_bytes(budget), parse_bytes(ram)), HeldWeights(from_disk=from_disk)
    return make_plan("dit", SIZES, work, room, RATES, PlanRequest(strategy, steps=28), held)


def test_choice_follows_the_budget() -> None:
    budgets = ("24GB", "11.6GB", "11.5GB", "8GB", "2.1GB", "1.7GB", "1.69GB", "1.6GB")
    plans = {budget: planned(budget) for budget in budgets}
    assert [plan.placement for plan in plans.values()] == ["resident"] * 2 + ["streamed"] * 6
    assert [plan.fits for plan in plans.values()] == [True] * 7 + [False]
    for budget, plan in plans.items():
        assert plan.peak_vram_bytes <= parse_bytes(budget) or not plan.fits
        assert plan.step_seconds >= 0.999 * plan.bound_seconds
        assert plan.first_step_seconds > plan.step_seconds
        assert len(plan.resident_groups) + len(plan.streamed) == 160
    eight = plans["8GB"]
    assert eight.peak_vram_bytes > 7.8 * GB
    assert eight.weights_bytes == GB + len(eight.resident_groups) * PIECE + eight.ring_bytes
    assert eight.ram_bytes == 11 * GB
    assert plans["1.69GB"].ring_bytes == 2 * PIECE
    seconds = [plan.step_seconds for plan in plans.values()]
    assert all(more >= 0.999999 * less for less, more in itertools.pairwise(seconds))


def test_more_vram_is_never_slower_for_encoded_weights() -> None:
    """Where all fits as it is stored, more may still stream so that the rest stays decoded."""
    codec = codec_of(Q4_K, (1024, 8192), torch.bfloat16)
    group = GroupSize(codec.encoded_bytes, codec.encoded_bytes, (), (codec,), codec.decoded_bytes)
    groups = tuple(replace(group, paths=(f"m{i}",)) for i in range(160))
    sizes = UnitSizes(160 * codec.encoded_bytes + GB // 16, GB // 16, groups)
    rates = replace(RATES, memory_bytes_per_second=300e9)
    whole, plans = sizes.most_bytes + WORK.peak_bytes, []
    for share in range(30, 105, 3):
        plan = make_plan("dit", sizes, WORK, Room(whole * share // 100, 64 * GB), rates, PlanRequest(steps=28))
        assert plan.fits and plan.peak_vram_bytes <= whole * share // 100
        assert plan.step_seconds <= 1.05 * plan.bound_seconds
        plans.append(plan)
    seconds = [plan.step_seconds for plan in plans]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(seconds))
    fits = [plan for plan in plans if plan.budget_bytes >= sizes.resident_bytes + WORK.peak_bytes]
    assert {plan.placement for plan in fits} == {"streamed", "resident"}
    (stored,) = (other for other in fits[0].rejected if other.placement == "resident")
    assert fits[0].step_seconds < 0.9 * stored.step_seconds and "as slow" in stored.why_not
    assert "kept dequantized" in fits[0].reason and "only as they are stored" in fits[0].reason
    # The run chooses what was planned.
    demand = Demand("dit", sizes, sizes.loads(WORK, rates), WORK.peak_bytes, has_forecast=True)
    for plan in plans:
        (kind, *_) = fitting_placements(demand, plan.budget_bytes, plan.budget_bytes, stated=True)
        assert kind == plan.placement
        seconds_of_call = demand.call_seconds(kind, demand.weights_to_hold(kind, plan.budget_bytes))
        assert seconds_of_call * WORK.calls / 28 == pytest.approx(plan.step_seconds)
    # With room for all it computes as if nothing were encoded.
    assert plans[-1].placement == "resident"
    assert plans[-1].step_seconds == pytest.approx(CALL / RATES.operations_per_second * WORK.calls / 28)


def test_what_is_decoded_for_good_takes_nothing_at_calls() -> None:
    """In the plan, and in what a run of it is to hold."""
    codec, mega = codec_of(Q4_K, (1024, 8192), torch.bfloat16), 2**20
    group = GroupSize(codec.encoded_bytes, codec.encoded_bytes, (), (codec,), codec.decoded_bytes)
    decoding = tuple((f"m{i}", WORK.working_bytes + 10 * mega) for i in range(4))
    groups = tuple(replace(group, paths=(path,)) for path, _ in decoding)
    sizes = UnitSizes(4 * group.held_bytes + GB // 16, GB // 16, groups, decoding=decoding)
    work = replace(WORK, held=tuple((path, 0) for path, _ in decoding))
    loads, calls = sizes.loads(work, RATES), work.peak_bytes + 10 * mega
    assert loads.spared_bytes == 10 * mega
    demand = Demand("dit", sizes, loads, calls, has_forecast=True)

    def beside(budget: int) -> tuple[int, int]:
        plan = make_plan("dit", sizes, work, Room(budget, 64 * GB), RATES, PlanRequest("resident", steps=28))
        assert plan.peak_vram_bytes <= budget
        assert plan.layout == demand.layout("resident", demand.weights_to_hold("resident", budget))
        count, rest = divmod(plan.weights_bytes - sizes.resident_bytes, codec.decoded_bytes - codec.encoded_bytes)
        assert not rest
        return count, plan.peak_vram_bytes - plan.weights_bytes

    most = sizes.resident_bytes + 4 * (codec.decoded_bytes - codec.encoded_bytes) + work.peak_bytes
    assert beside(64 * GB) == beside(most) == (4, work.peak_bytes)
    assert beside(most - 1) == (3, calls)
    assert beside(sizes.resident_bytes + calls) == (0, calls)


@pytest.mark.parametrize("free_bytes", [0, 2**20, GB // 4])
def test_decoding_for_good_has_room_beside_what_is_there_between_calls(free_bytes: int) -> None:
    codec = codec_of(Q4_K, (1024, 8192), torch.bfloat16)
    group = GroupSize(codec.encoded_bytes, codec.encoded_bytes, (), (codec,), codec.decoded_bytes)
    groups = tuple(replace(group, paths=(f"m{i}",)) for i in range(4))
    sizes = UnitSizes(4 * group.held_bytes + GB // 16, GB // 16, groups)
    work = replace(WORK, held=(("", WORK.working_bytes - free_bytes),))
    more, moment = codec.decoded_bytes - codec.encoded_bytes, max(0, moment_bytes(group.codecs) - free_bytes)
    assert (moment > 0) == (free_bytes < GB // 4)
    whole = sizes.resident_bytes + 4 * more + work.peak_bytes + moment
    for budget, count in ((64 * GB, 4), (whole, 4), (whole - 1, 3)):
        plan = make_plan("dit", sizes, work, Room(budget, 64 * GB), RATES, PlanRequest("resident", steps=28))
        assert plan.fits and plan.peak_vram_bytes <= budget
        assert plan.weights_bytes == sizes.resident_bytes + count * more + moment
        assert plan.peak_vram_bytes == plan.weights_bytes + work.peak_bytes


def test_what_stays_decoded_is_decoded_twice_in_the_first_step() -> None:
    codec = codec_of(Q4_K, (1024, 8192), torch.bfloat16)
    group = GroupSize(codec.encoded_bytes, codec.encoded_bytes, (), (codec,), codec.decoded_bytes)
    groups = tuple(replace(group, paths=(path,)) for path, _ in EACH[:4])
    sizes = UnitSizes(4 * group.held_bytes, 0, groups)
    work = replace(WORK, calls=28, operations=EACH[0][1] * 4, modules=EACH[:4])
    rates = replace(RATES, memory_bytes_per_second=300e9)
    decoding = 4 * group.decode_seconds(rates)
    assert decoding > 0
    whole, stored = (
        make_plan("dit", sizes, work, Room(budget, 64 * GB), rates, PlanRequest("resident", steps=28))
        for budget in (64 * GB, sizes.resident_bytes + work.peak_bytes)
    )
    assert stored.step_seconds - whole.step_seconds == pytest.approx(decoding)
    assert whole.first_step_seconds - stored.first_step_seconds == pytest.approx(decoding)


def test_the_first_call_decodes_as_it_goes() -> None:
    """Which may take more than to have all decoded for good later."""
    codec, mega = codec_of(Q4_K, (8, 256), torch.bfloat16), 2**20
    group = GroupSize(codec.encoded_bytes, codec.encoded_bytes, ("m0",), (codec,), codec.decoded_bytes)
    sizes = UnitSizes(group.held_bytes + mega, mega, (group,), decoding=(("m0", WORK.working_bytes + mega),))
    work = replace(WORK, held=(("m0", 0),), modules=EACH[:1])
    first = sizes.resident_bytes + work.peak_bytes + mega
    plan = make_plan("dit", sizes, work, Room(first, 64 * GB), RATES, PlanRequest("resident", steps=28))
    assert plan.fits and plan.weights_bytes > sizes.resident_bytes
    assert plan.peak_vram_bytes == first


def test_groups_compute_what_was_seen_from_their_modules_on() -> None:
    sizes = UnitSizes(40, 0, (GroupSize(10, 10, ("a", "b.c")), GroupSize(10, 10, ("b.d",)), GroupSize(20, 20, ("e",))))
    seen = (("", 1.0), ("a", 2.0), ("b", 4.0), ("b.c.inner", 8.0), ("b.d", 16.0), ("f", 32.0), ("e", 64.0))
    work = UnitForecast(0, 0, 0, 2, Operations(127.0), tuple((path, Operations(done)) for path, done in seen))
    loads = sizes.loads(work, Rates(10.0, 10.0, 5.0, 1.0))
    assert loads.before_seconds == 0.5
    assert [group.seconds for group in loads.groups] == [7.0, 24.0, 32.0]
    assert loads.bytes_per_second == 10.0
    assert loads.disk_bytes_per_second == 5.0
    even = sizes.loads(None, Rates(10.0, 10.0, 5.0, 1.0))
    assert [group.seconds for group in even.groups] == [1.0, 1.0, 2.0]


def test_reasons_and_what_was_rejected() -> None:
    plan = planned("8GB")
    stay, ring = 1 + len(plan.resident_groups) / 16, plan.ring_bytes // 2**20
    assert plan.reason == (
        f"11.0 GB of weights do not fit 8.00 GB: {stay:.2f} GB stay, {11 - stay:.2f} GB pass through a ring of "
        f"{ring} MB, and the copies set the pace."
    )
    assert plan.label == f"streamed, {stay / 11:.0%} of the weights stay"
    rejected = [(other.label, other.why_not) for other in plan.rejected]
    assert rejected[0] == ("resident", "11.6 GB do not fit 8.00 GB")
    assert rejected[1][0] == "streamed, 9% of the weights stay"
    assert rejected[1][1].endswith("times as slow")
    assert planned("24GB").reason == "All 11.0 GB of weights fit 24.0 GB with their activations."
    assert planned("0.5GB").reason.startswith("Nothing fits 512 MB: streamed wants least, ")
    assert planned("8GB", strategy="resident").fits is False
    least = planned("24GB", strategy="leafwise")
    assert (least.placement, least.ring_bytes, least.stay_bytes) == ("streamed", 2 * PIECE, GB)
    assert "not what was asked for" in {other.why_not for other in least.rejected}


def test_short_ram_means_disk_with_its_seconds() -> None:
    plan = planned("8GB", ram="2GB", from_disk=True)
    assert plan.from_disk and plan.read_bytes
    assert plan.label.endswith(f" of the weights stay, {plan.read_bytes / plan.whole_bytes:.0%} come from disk")
    assert 1.9 * GB < plan.ram_bytes <= 2 * GB
    passing = plan.whole_bytes - plan.stay_bytes - plan.ring_bytes
    assert plan.read_bytes == pytest.approx(passing - (2 * GB - 3 * PIECE), abs=2 * plan.ring_bytes)
    assert plan.step_seconds == pytest.approx(2 * plan.read_bytes / 3e9, rel=0.02)
    assert plan.step_read_bytes == 2 * plan.read_bytes, "a step has two calls"
    assert (
        f"{plan.step_read_bytes / GB:.2f} GB are read from disk in each step, {plan.read_seconds:.1f} s" in plan.reason
    )
    enough = planned("8GB", ram="4GB", from_disk=True)
    assert enough.from_disk and not enough.read_bytes, "what stays on the device needs no copy in RAM"
    assert enough.step_seconds == planned("8GB").step_seconds
    resident = planned("24GB", ram="4GB", from_disk=True)
    assert (resident.placement, resident.read_bytes) == ("resident", 0)
    assert resident.reason.endswith("; 11.0 GB do not fit 4.00 GB of RAM, which holds 3.81 GB.")
    assert planned("8GB", ram="4GB").ram_bytes == 11 * GB, "what cannot run from disk is held all the same"
    windows = planned("8GB", ram="0.1GB", from_disk=True)
    assert not windows.fits and windows.reason == "Nothing fits 102 MB of RAM: streamed from disk wants 192 MB."


def test_more_ram_is_never_slower() -> None:
    seconds = [planned("6GB", ram=f"{ram / 2}GB", from_disk=True).step_seconds for ram in range(1, 26)]
    assert all(more <= less for less, more in itertools.pairwise(seconds))
    assert seconds[-1] < seconds[0] / 2


def test_forecasts_survive_a_file_and_damaged_ones_are_errors() -> None:
    forecast = Forecast(5, {"dit": WORK})
    assert Forecast.from_dict(forecast.to_dict()) == forecast
    for damaged in ({}, {"idle_bytes": 1, "units": {"a": {}}}, {"idle_bytes": 1, "units": {"a": {"calls": "x"}}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Forecast.from_dict(damaged)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("flux", 0.01 / 3),
        pytest.param("wan", None, marks=pytest.mark.soak),
        pytest.param("cogvideox", 0.01 / 3, marks=pytest.mark.soak),
    ],
)
def test_predicted_seconds_are_those_of_the_virtual_clock(
    name: str, attention: float | None, tiny_folders: Callable[[str], Path], sim: ModuleType
) -> None:
    """Streamed with nothing and with half of the blocks resident, copies faster and slower than the computing.

    Attention may be slower than its operations would take as products.
    """
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(tiny_folders(name), device="sim")
    cond = pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs)
    size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "guidance": family.guidance}
    run = {**size, "steps": 5, **family.call_kwargs}
    for h2d_gbps in (5.0, 0.05):  # what is computed is planned by rates at first, and then as it was measured
        sim.enable(total="1GB", h2d_gbps=h2d_gbps, tflops=0.01, attention_tflops=attention)
        least, most = (
            pipe.plan(**run, cond=cond, vram=vram, strategy=strategy).sampling.peak_vram_bytes
            for vram, strategy in ((1, "streamed"), ("1GB", "resident"))
        )
        for vram in (least, (least + most) // 2):
            plan = pipe.plan(**run, cond=cond, vram=vram).sampling
            pipe.runner = pipe.runner.set(vram_bytes=vram)
            ends: list[float] = []
            pipe.sample(cond, **run, on_step=lambda *_, ends=ends: ends.append(sim.stats().clock_seconds))
            measured = (ends[-1] - ends[1]) / 3
            assert plan.placement == "streamed"
            assert plan.step_seconds == pytest.approx(measured, rel=0.05), (h2d_gbps, vram)


def test_what_computes_in_float32_is_planned_at_the_rate_of_that() -> None:
    rates = replace(RATES, float32=20e12, float16=50e12)
    steps = [
        make_plan(
            "dit", replace(SIZES, dtype=dtype), WORK, Room(24 * GB, 64 * GB), rates, PlanRequest(steps=28)
        ).step_seconds
        for dtype in ("BF16", "F16", "F32")
    ]
    assert steps == pytest.approx([2 * CALL / rate for rate in (100e12, 50e12, 20e12)])


@pytest.mark.parametrize(
    ("most", "rest", "expected"),
    [("float32", "bfloat16", "F32"), ("float16", "float32", "F16"), ("bfloat16", "float16", "BF16")],
)
def test_unit_computes_in_what_most_of_its_weights_are_in(most: str, rest: str, expected: str) -> None:
    large, small = nn.Linear(32, 32, dtype=getattr(torch, most)), nn.Linear(8, 8, dtype=getattr(torch, rest))
    unit = ManagedModel.from_module("dit", "transformer", nn.Sequential(small, large))
    assert sizes_of(unit).dtype == expected


def test_first_step_of_a_run_brings_all_that_samples() -> None:
    """Two experts, or a ControlNet."""
    one, other = planned("8GB"), planned("4GB")
    stage = StagePlan("sample", (one, other), steps=28, rates=RATES)
    run = RunPlan("wan", "cuda", "", 28, 8 * GB, RATES, (stage,))
    assert run.first_step_seconds == one.first_step_seconds + other.first_step_seconds
    assert run.total_seconds == pytest.approx(run.first_step_seconds + 27 * run.step_seconds)


@pytest.mark.parametrize(
    ("speed", "encoded", "plans"), [(0.05, False, 1), (0.2, False, 6), (1.0, False, 8), (0.2, True, 8)]
)
def test_best_batch_plans_no_more_than_decides_it(speed: float, encoded: bool, plans: int) -> None:
    """It is that of all batches: on a slow card computing decides, on a fast one copying, or dequantizing."""
    codecs = (codec_of(Q4_K, (4096, 16384), torch.bfloat16),) if encoded else ()
    sizes = replace(SIZES, groups=tuple(replace(p, codecs=codecs, plain_bytes=2 * PIECE) for p in SIZES.groups))
    rates = replace(RATES, operations_per_second=speed * RATES.operations_per_second)
    asked: list[int] = []

    def stage(pictures: int) -> StagePlan:
        asked.append(pictures)
        work = scaled(Forecast(0, {"dit": WORK}), pictures).units["dit"]
        plan = make_plan("dit", sizes, work, Room(8 * GB, 64 * GB), rates, PlanRequest(steps=28))
        return StagePlan("sample", (plan,), steps=28, rates=rates)

    least = WORK.calls * least_call_seconds(sizes, WORK, rates, None)
    expected = best_batch(stage)
    assert len(asked) == 8 and expected is not None
    asked.clear()
    assert best_batch(lambda pictures: replace(stage(pictures), computing_seconds=pictures * least)) == expected
    assert len(asked) == plans


def test_best_batch_is_none_where_one_picture_does_not_fit() -> None:
    def run(budget: str) -> RunPlan:
        def stage(pictures: int) -> StagePlan:
            work = scaled(Forecast(0, {"dit": WORK}), pictures).units["dit"]
            return StagePlan("sample", (planned(budget, work),), steps=28, rates=RATES)

        best = best_batch(stage)
        return RunPlan("flux", "cuda", "", 28, parse_bytes(budget), RATES, (stage(1),), best=best)

    fits, exceeds = run("1.69GB"), run("1.6GB")
    assert fits.best is not None and exceeds.best is None and not exceeds.samples
    rows = compare([fits, exceeds]).splitlines()
    assert [row.split()[-2:] for row in rows if row.split()[-1:] in (["yes"], ["NO"])] == [["1", "yes"], ["-", "NO"]]
