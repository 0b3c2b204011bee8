"""Seconds of groups, measured in one call of a run: what is placed and planned after it goes by them."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager, speeds
from ballast.memory.engine.engine import Engine
from ballast.memory.planning import learned
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.forecast import Operations, UnitForecast
from ballast.memory.planning.measured import Measured, differs, measured_loads
from ballast.memory.planning.planner import GroupSize, UnitSizes
from ballast.memory.planning.ring_offsets import offsets, overwritten, step_seconds
from ballast.memory.planning.solver import GroupLoad, Loads
from ballast.memory.simulated import card, clock
from ballast.pipelines import Pipeline
from hypothesis import given
from hypothesis import strategies as st
from streamed_models import Blocks, budget, nbytes, noise, put, run

LOADS = Loads((GroupLoad(10, 10, 1.0), GroupLoad(20, 20, 3.0), GroupLoad(20, 16, 2.0)), 5.0, 0.5, 2.0)
SOUND = Measured((10, 20, 20), (2.0, 1.0, 4.0), 0.25)
Folders = Callable[[str], Path]

# Pure functions


def test_measured_seconds_take_the_place_of_forecast_ones_and_nothing_else_does() -> None:
    found = measured_loads(LOADS, SOUND)
    assert [group.seconds for group in found.groups] == [2.0, 1.0, 4.0]
    assert found.before_seconds == 0.25 and found.compute_seconds == 7.25
    groups = tuple(replace(group, seconds=old.seconds) for group, old in zip(found.groups, LOADS.groups, strict=True))
    assert replace(found, groups=groups, before_seconds=0.5) == LOADS
    assert measured_loads(LOADS, None) is LOADS


def test_decoding_takes_no_more_of_a_group_than_was_measured() -> None:
    loads = replace(LOADS, groups=tuple(replace(group, decode_seconds=1.5) for group in LOADS.groups))
    assert [group.decode_seconds for group in measured_loads(loads, SOUND).groups] == [1.5, 1.0, 1.5]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(SOUND, sizes=(10, 20)),
        replace(SOUND, sizes=(10, 20), seconds=(1.0, 1.0)),
        replace(SOUND, sizes=(10, 20, 21)),
        replace(SOUND, sizes=(20, 10, 20)),
        replace(SOUND, seconds=(1.0, 2.0)),
        replace(SOUND, seconds=(1.0, math.nan, 1.0)),
        replace(SOUND, seconds=(1.0, math.inf, 1.0)),
        replace(SOUND, seconds=(1.0, -0.1, 1.0)),
        replace(SOUND, before_seconds=-1.0),
        replace(SOUND, before_seconds=math.nan),
        replace(SOUND, seconds=(0.0, 0.0, 0.0), before_seconds=0.0),
    ],
)
def test_what_cannot_be_of_these_groups_is_ignored(wrong: Measured) -> None:
    assert measured_loads(LOADS, wrong) is LOADS
    assert not differs(LOADS, wrong)


def test_small_differences_are_none_and_groups_that_trade_seconds_are_one() -> None:
    equal = Measured(LOADS.sizes, (1.0, 3.0, 2.0), 0.5)
    assert not differs(LOADS, equal)
    assert not differs(LOADS, replace(equal, seconds=(1.1, 2.9, 2.1)))
    assert differs(LOADS, replace(equal, seconds=(3.0, 1.0, 2.0)))
    assert differs(LOADS, replace(equal, before_seconds=0.9))
    at_once = replace(LOADS, groups=tuple(replace(p, seconds=0.0) for p in LOADS.groups), before_seconds=0.0)
    assert not differs(at_once, equal)


@given(st.lists(st.tuples(st.integers(1, 2**40), st.floats(0, 1e6)), max_size=20), st.floats(0, 1e6))
def test_files_hold_four_digits(groups: list[tuple[int, float]], before: float) -> None:
    measured = Measured(tuple(size for size, _ in groups), tuple(seconds for _, seconds in groups), before)
    found = Measured.from_dict(json.loads(json.dumps(measured.to_dict())))
    assert found.sizes == measured.sizes
    assert found.seconds == pytest.approx(measured.seconds, rel=5.1e-4)
    assert found.before_seconds == pytest.approx(before, rel=5.1e-4)
    assert Measured.from_dict(found.to_dict()) == found


def test_seconds_are_kept_for_a_card_a_model_a_shape_and_later_processes() -> None:
    sizes = UnitSizes(50, 0, (GroupSize(10, 10, ("a",)), GroupSize(20, 20, ("b",)), GroupSize(20, 16, ("c",))))
    work = UnitForecast(0, 1, 1, 4, Operations(80.0), (("a", Operations(40.0)), ("b", Operations(40.0))))
    assert learned.keep("card", sizes, work, SOUND) == SOUND == learned.recall("card", sizes, work)
    longer = replace(
        work,
        calls=8,
        operations=work.operations * 2,
        modules=tuple((path, done * 2) for path, done in work.modules),
        live_bytes=7,
    )
    others: list[tuple[str, UnitSizes, UnitForecast]] = [
        ("other", sizes, work),
        ("card", replace(sizes, groups=sizes.groups[:2]), work),
        ("card", sizes, replace(work, modules=(("a", Operations(30.0)), ("b", Operations(50.0))))),
    ]
    for _ in range(2):
        assert learned.recall("card", sizes, longer) == SOUND, "steps do not matter"
        assert all(learned.recall(*other) is None for other in others)
        speeds._groups.clear()  # as in another process
    assert learned.keep("card", sizes, work, None) is None is learned.recall("card", sizes, work)
    for damaged in ("{", "[1]", json.dumps({learned._key("card", sizes, work): [7]})):
        speeds._groups.clear()
        speeds._groups_file().write_text(damaged)
        assert learned.recall("card", sizes, work) is None
    assert learned.keep("card", sizes, work, SOUND) == learned.recall("card", sizes, work)


def test_only_so_many_lists_are_kept() -> None:
    for i in range(speeds.MAX_LISTS + 5):
        speeds.note_groups(f"key {i}", {"n": i})
    speeds._groups.clear()
    kept = [i for i in range(speeds.MAX_LISTS + 5) if speeds.groups(f"key {i}") is not None]
    assert kept == list(range(5, speeds.MAX_LISTS + 5))


# One call by events


def timed(module: Blocks, placement: Engine, **more: Any) -> Measured | None:
    """What the groups of one more call computed."""
    assert placement.time_call()
    run(module, noise(64), **more)
    torch.get_device_module("sim").synchronize()
    return placement.take_seconds()


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("h2d_gbps", [1e-3, 10.0])
def test_waiting_for_copies_is_not_computing(share: float, h2d_gbps: float, sim: ModuleType) -> None:
    module = Blocks()
    sim.enable(total="1GB", tflops=1e-4, h2d_gbps=h2d_gbps)
    x = noise(64)
    placement = put(module, budget(module, share))
    assert not placement.time_call(), "the first call brings the weights"
    run(module, x)
    before = card.card.host
    assert placement.time_call()
    expected = run(module, x)
    assert card.card.host == before and placement.take_seconds() is None, "the host has not waited"
    torch.get_device_module("sim").synchronize()
    found = placement.take_seconds()
    assert found is not None and placement.take_seconds() is None
    assert found.sizes == tuple(group.packed_bytes for group in placement._called)
    operations = [2 * 64 * nbytes(group.owners[0].module) / 4 for group in placement._called]
    in_all = 16 * 2 * 2 * 64 * 64 * 64
    assert sum(found.seconds) + found.before_seconds == pytest.approx(in_all / 1e8, rel=1e-3)
    if len(set(operations)) == 1:
        assert found.seconds == pytest.approx([in_all / 1e8 / len(found.seconds)] * len(found.seconds), rel=1e-3)
    assert torch.equal(run(module, x).cpu(), expected.cpu())
    placement.remove()


def test_calls_that_were_disturbed_tell_nothing(sim: ModuleType) -> None:
    module = Blocks()
    sim.enable(total="1GB", tflops=1e-4, h2d_gbps=1e-3)
    placement = put(module, budget(module, 0.5))
    run(module, noise(64))
    block = module.blocks[8]
    assert timed(module, placement) is not None

    def compile_something() -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

    for disturb in (
        lambda: placement.shrink(2 * nbytes(block)),
        lambda: placement.grow(4 * nbytes(block)),
        compile_something,
    ):
        block.middle = disturb
        assert timed(module, placement) is None, disturb
        block.middle = None
        assert timed(module, placement) is not None
    assert timed(module, placement, order=[*range(16), *range(16)]) is not None, "each twice"
    assert timed(module, placement, order=[*range(15)]) is None, "one was left out"

    def fail() -> None:
        raise KeyboardInterrupt

    block.middle = fail
    assert placement.time_call()
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        try:
            module(noise(64))
        finally:
            placement.end_call(failed=True)
    block.middle = None
    assert placement.take_seconds() is None and not placement.time_call()
    placement.remove()


# Runs


class Bench:
    """A tiny pipeline on a card, and what least and most its sampling takes."""

    def __init__(self, name: str, folder: Path, sim: ModuleType, h2d_gbps: float, tflops: float = 1e-3) -> None:
        sim.enable(total="1GB", h2d_gbps=h2d_gbps, tflops=tflops)
        self.sim, self.folder, family = sim, folder, tiny.FAMILIES[name]
        self.pipe = ballast.open_pipeline(folder, device="sim")
        self.cond = self.pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs)
        size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "guidance": family.guidance}
        self.run: dict[str, Any] = {**size, "steps": 6, **family.call_kwargs}
        least, most = self.plan(1, strategy="streamed"), self.plan("1GB", strategy="resident")
        self.least, self.most = least.peak_vram_bytes, most.peak_vram_bytes

    def vram(self, share: float) -> int:
        return self.least + int(share * (self.most - self.least))

    def plan(self, vram: int | str, pipe: Pipeline | None = None, **more: Any) -> Any:
        return (pipe or self.pipe).plan(**self.run, cond=self.cond, vram=vram, **more).sampling

    def seconds_of(self, plan: Any) -> float:
        """What a call takes by what was measured, where the groups lie as in this plan."""
        (unit,) = self.pipe.denoisers
        work = manager("sim").work.of(unit)
        assert work.forecast and work.measured
        loads = measured_loads(sizes_of(unit).loads(work.forecast, work.rates), work.measured)
        computes, copies = [p.seconds for p in loads.groups], [n / loads.bytes_per_second for n in loads.sizes]
        passing = [loads.sizes[i] for i in plan.streamed]
        ago = overwritten(passing, offsets(passing, plan.ring_bytes))
        return step_seconds(computes, copies, plan.streamed, ago, loads.before_seconds)

    def sample(self, vram: int, pipe: Pipeline | None = None) -> tuple[torch.Tensor, list[float]]:
        """The latents, and the seconds of each step but the first."""
        pipe, ends = pipe or self.pipe, list[float]()
        pipe.runner = pipe.runner.set(vram_bytes=vram)
        result = pipe.sample(self.cond, **self.run, on_step=lambda *_: ends.append(self.sim.stats().clock_seconds))
        assert manager("sim").timeline.stages[-1].peak_bytes <= vram
        assert self.sim.stats().hazards == 0
        return result, [end - begin for begin, end in itertools.pairwise(ends)]


def slow_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some products of the card take longer than its rate says; dry runs know nothing of it."""
    plain = dict(clock.OPERATIONS)

    def slow(name: str, times: Callable[[tuple], int]) -> None:
        def operations(args: tuple, out: Any) -> int:
            return plain[name](args, out) * (1 if card.card.dry else times(args))

        monkeypatch.setitem(clock.OPERATIONS, name, operations)

    slow("aten::scaled_dot_product_attention", lambda args: 20)
    slow("aten::linear", lambda args: 6 if args[1].shape[0] > args[1].shape[1] else 1)


@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(name, marks=pytest.mark.soak) for name in ("wan", "cogvideox"))]
)
def test_on_the_simulated_card_what_is_measured_is_what_was_forecast(
    name: str, tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(name, tiny_folders(name), sim, 0.05, 1e-2)
    found: list[Measured | None] = []
    take = Engine.take_seconds
    monkeypatch.setattr(Engine, "take_seconds", lambda self: found.append(take(self)) or found[-1])
    for share in (0, 0.5):
        plan = bench.plan(bench.vram(share))
        bench.sample(bench.vram(share))
        (measured,) = [each for each in found if each]
        found.clear()
        mgr, (unit,) = manager("sim"), bench.pipe.denoisers
        work = mgr.work.of(unit)
        assert work.measured is None and not work.learns and work.forecast
        loads = sizes_of(unit).loads(work.forecast, work.rates)
        assert measured.sizes == loads.sizes
        assert measured.seconds == pytest.approx([group.seconds for group in loads.groups], rel=1e-3)
        assert measured.before_seconds == pytest.approx(loads.before_seconds, rel=1e-3)
        again = bench.plan(bench.vram(share))
        assert (again.streamed, again.ring_bytes, again.step_seconds) == (
            plan.streamed,
            plan.ring_bytes,
            plan.step_seconds,
        )


@pytest.mark.parametrize("name", ["flux", pytest.param("cogvideox", marks=pytest.mark.soak)])
def test_runs_learn_what_their_forecast_did_not_know(
    name: str, tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The third call goes by what the second took, and so do plans and runs from then on, also of later processes."""
    expected, changed = None, 0
    for h2d_gbps in (0.002, 0.005, 0.01) if os.environ.get("BALLAST_SOAK") else (0.005,):
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{h2d_gbps}"))
            bench = Bench(name, tiny_folders(name), sim, h2d_gbps)
            plans = {share: bench.plan(bench.vram(share)) for share in (0, 0.3, 0.6)}
            slow_card(patch)
            for share, before in plans.items():
                vram = bench.vram(share)
                speeds._groups.clear()  # as in another process
                result, steps = bench.sample(vram)
                expected = result if expected is None else expected
                assert torch.equal(result, expected)
                plan = bench.plan(vram)
                assert plan.peak_vram_bytes <= vram and plan == bench.plan(vram)
                again, later = bench.sample(vram)
                assert torch.equal(again, expected)
                assert plan == bench.plan(vram), "learned once"
                steady = sum(later[1:]) / len(later[1:])
                assert plan.step_seconds == pytest.approx(steady, rel=0.05), (h2d_gbps, share)
                assert steps[-1] == pytest.approx(steady, rel=0.02), "within the run as after it"
                assert bench.seconds_of(plan) <= 1.01 * bench.seconds_of(before), "of what was forecast to be best"
                changed += before.streamed != plan.streamed
    assert changed, "what stays is another choice"
