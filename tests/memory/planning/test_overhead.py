"""Plans learn what runs take beyond their dry run, on a card with workspaces, fragmentation and slower kernels."""

from __future__ import annotations

import itertools
import json
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
from ballast.memory.accelerator import Accelerator
from ballast.memory.planning import learned
from ballast.memory.planning.forecast import Operations, UnitForecast
from ballast.memory.planning.measured import Overhead
from ballast.memory.planning.planner import GroupSize, UnitSizes, make_plan
from ballast.memory.planning.room import Room
from ballast.memory.rates import ASSUMED
from ballast.memory.simulated import CardOverhead
from hypothesis import given
from hypothesis import strategies as st
from selection import few

Folders = Callable[[str], Path]
KB = 1024
SIZES = UnitSizes(50, 0, (GroupSize(10, 10, ("a",)), GroupSize(20, 20, ("b",))))
WORK = UnitForecast(0, 1, 1, 4, Operations(80.0), (("a", Operations(40.0)), ("b", Operations(40.0))))

# Pure functions

BYTES = st.integers(0, 10**9)
OVERHEADS = st.builds(Overhead, BYTES, BYTES, st.integers(1, 10**9), BYTES)


@given(OVERHEADS, st.integers(0, 10**10))
def test_a_budget_is_for_what_the_driver_counts(overhead: Overhead, budget: int) -> None:
    tensors = overhead.tensors_within(budget)
    if tensors:
        assert overhead.driver_bytes(tensors) <= budget < overhead.driver_bytes(tensors + 2)
    else:
        assert budget <= overhead.driver_bytes(0) + 1


@given(OVERHEADS, st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_tensors_never_take_less(overhead: Overhead, less: int, more: int) -> None:
    assert overhead.driver_bytes(less) <= overhead.driver_bytes(less + more)
    assert overhead.driver_bytes(less) >= less + overhead.spare_bytes + overhead.outside_bytes


def test_the_newer_run_counts_where_it_was_of_another_size() -> None:
    known = Overhead(10, 100, 1000, 7)
    assert known.seen_again(Overhead(20, 90, 950, 3)) == Overhead(20, 100, 1000, 7)
    assert known.seen_again(Overhead(5, 120, 1050, 9)) == Overhead(10, 120, 1050, 9)
    assert known.seen_again(Overhead(5, 40, 400, 9)) == Overhead(10, 40, 400, 9)
    assert Overhead().seen_again(known) == known
    assert known.scaled(3) == replace(known, workspace_bytes=30)
    assert known.over(Overhead(20, 90, 2000, 3)) == Overhead(20, 100, 1000, 7)
    assert known.outside(3) == known and known.outside(8).outside_bytes == 8


def test_overhead_is_kept_for_a_card_a_model_a_shape_and_later_processes() -> None:
    seen = Overhead(10, 100, 1000, 7)
    learned.keep_overhead("card", SIZES, WORK, seen)
    other = replace(WORK, modules=(("a", Operations(30.0)), ("b", Operations(50.0))))
    for _ in range(2):
        assert learned.recall_overhead("card", SIZES, WORK) == seen
        assert learned.recall_overhead("card", SIZES, WORK, 3) == seen.scaled(3)
        assert learned.recall_overhead("card", SIZES, other) == Overhead(outside_bytes=7), "the card has a context"
        assert learned.recall_overhead("other", SIZES, WORK) == Overhead()
        speeds._groups.clear()  # as in another process
    key = learned._key("card", SIZES, WORK, "overhead")
    for damaged in ({"spare_bytes": 3}, seen.to_dict() | {"at_bytes": -1}, seen.to_dict() | {"at_bytes": 1.5}, [7], 3):
        speeds._groups.clear()
        speeds._groups_file().write_text(json.dumps({key: damaged}))
        assert learned.recall_overhead("card", SIZES, WORK) == Overhead()


@pytest.mark.parametrize(
    ("budget", "placement", "fits"), [(76, "resident", True), (75, "streamed", True), (56, "streamed", False)]
)
def test_what_fits_is_told_by_the_driver_s_figure(budget: int, placement: str, fits: bool) -> None:
    """3 groups of 10 bytes in a budget; 10 of work with 6 of workspace, 10 spare and 20 outside."""
    sizes = UnitSizes(30, 0, tuple(GroupSize(10, 10, (each,)) for each in "abc"))
    work = UnitForecast(0, 10, 10, 1, Operations(3.0), tuple((name, Operations(1.0)) for name in "abc"))
    plan = make_plan("dit", sizes, work, Room(budget, 100, overhead=Overhead(6, 10, 100, 20)), ASSUMED)
    assert (plan.placement, plan.fits) == (placement, fits)
    assert plan.driver_bytes == plan.peak_vram_bytes + 30
    whole = next(c for c in (plan, *plan.rejected) if c.placement == "resident")
    assert (whole.peak_vram_bytes, whole.driver_bytes) == (46, 76)
    if placement != "resident":
        assert whole.why_not == f"76 B do not fit {budget} B"
    if not fits:
        assert plan.reason == f"Nothing fits {budget} B: streamed wants least, {plan.driver_bytes} B."


# Runs

CARD = CardOverhead(
    context_bytes=48 * KB,
    library_bytes=24 * KB,
    workspace_bytes=32 * KB,
    fragmentation=0.07,
    product_times=3.0,
    attention_times=12.0,
)


class Bench:
    """A tiny pipeline on a card that takes more than its dry run tells."""

    def __init__(self, name: str, folder: Path, sim: ModuleType, overhead: CardOverhead = CARD) -> None:
        sim.enable(total="1GB", h2d_gbps=0.02, tflops=1e-3, overhead=overhead)
        self.sim, family = sim, tiny.FAMILIES[name]
        self.pipe = ballast.open_pipeline(folder, device="sim")
        self.cond = self.pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs)
        size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "guidance": family.guidance}
        self.run: dict[str, Any] = {**size, "steps": 6, **family.call_kwargs}

    def plan(self, vram: int | str, **more: Any) -> Any:
        return self.pipe.plan(**self.run, cond=self.cond, vram=vram, **more)

    def sample(self, vram: int) -> tuple[torch.Tensor, float, Any]:
        """The latents, the seconds of a steady step, and the record of the stage."""
        ends: list[float] = []

        def ended(*_: Any) -> None:
            torch.sim.synchronize()
            ends.append(self.sim.stats().clock_seconds)

        self.pipe.runner = self.pipe.runner.set(vram_bytes=vram)
        result = self.pipe.sample(self.cond, **self.run, on_step=ended)
        steps = [end - begin for begin, end in itertools.pairwise(ends)]
        return result, steps[-1], manager("sim").timeline.stages[-1]


def by_driver(tensor_bytes: int) -> int:
    """What the driver counts on the card where so many bytes are in tensors of a forecast."""
    pool = (1 + CARD.fragmentation) * (tensor_bytes + CARD.workspace_bytes)
    return int(pool) + CARD.context_bytes + CARD.library_bytes


@pytest.mark.parametrize("name", few(["flux", "cogvideox"], "flux"))
@pytest.mark.parametrize("share", few([0.3, 2.0], 0.3))
def test_plan_after_one_run_is_what_the_next_takes(
    name: str, share: float, tiny_folders: Folders, sim: ModuleType
) -> None:
    """Streamed and wholly resident: its peak by the allocator and by the driver, and its seconds, within 5 %."""
    bench = Bench(name, tiny_folders(name), sim)
    least = bench.plan(1, strategy="streamed").sampling.peak_vram_bytes
    most = bench.plan("1GB", strategy="resident").sampling.peak_vram_bytes
    vram = by_driver(int(least + share * (most - least)))
    first = bench.plan(vram).sampling
    expected, _, record = bench.sample(vram)
    assert record.driver_bytes > first.driver_bytes, "what the card takes is no part of a dry run"
    plan = bench.plan(vram).sampling
    assert plan.step_seconds > 1.5 * first.step_seconds
    assert plan.placement == ("streamed" if share < 1 else "resident")
    speeds._groups.clear()  # as in another process
    assert bench.plan(vram).sampling == plan
    sim.reset_stats()
    again, step, record = bench.sample(vram)
    assert torch.equal(again, expected)
    assert sim.stats().driver_peak_bytes <= vram
    for planned, taken in (
        (plan.peak_vram_bytes, sim.stats().peak_bytes),
        (plan.driver_bytes, sim.stats().driver_peak_bytes),
    ):
        assert taken <= planned <= 1.05 * taken
    assert record.driver_bytes == sim.stats().driver_peak_bytes
    assert plan.step_seconds == pytest.approx(step, rel=0.05)
    assert bench.plan(vram).sampling.driver_bytes <= vram


@pytest.mark.parametrize("strategy", ["resident", "leafwise"])
def test_a_first_run_is_planned_with_what_the_library_is_known_to_take(
    strategy: str, tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "workspace_bytes", lambda _: 32 * KB)
    bench = Bench("flux", tiny_folders("flux"), sim, CardOverhead(workspace_bytes=32 * KB))
    plan = bench.plan("1GB", strategy=strategy).sampling
    bench.pipe.sample(bench.cond, **bench.run, strategy=strategy)
    taken = manager("sim").timeline.stages[-1].peak_bytes
    assert taken <= plan.peak_vram_bytes <= 1.05 * taken


def test_blocks_of_a_model_that_leaves_go_back_before_the_next_one_comes(
    tiny_folders: Folders, sim: ModuleType
) -> None:
    """The allocator would keep them beside those of the next, whose weights are of other sizes."""
    bench = Bench("flux", tiny_folders("flux"), sim, CardOverhead(fragmentation=0.07))
    blocker = torch.empty(2**20, dtype=torch.uint8, device="sim")  # a larger model, which leaves
    del blocker
    sim.reset_stats()
    pools: list[int] = []
    bench.pipe.sample(bench.cond, **bench.run, on_step=lambda *_: pools.append(torch.sim.memory_reserved()))
    assert max(pools) <= 1.08 * sim.stats().peak_bytes < 2**20


@pytest.mark.parametrize("way", ["whole", "in stripes"])
def test_each_stage_of_a_second_run_is_planned_as_it_is(way: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """Text encoders and the VAE too."""
    bench = Bench("flux", tiny_folders("flux"), sim)
    size = {**bench.run, "width": 128, "height": 128, "steps": 2}
    whole = bench.pipe.plan(**size, vram="1GB")
    decoding = next(stage for stage in whole.stages if stage.name == "decode").peak_vram_bytes
    vram = by_driver(whole.peak_vram_bytes if way == "whole" else decoding * 6 // 10)
    for run in range(2):
        prompt: dict[str, Any] = {"prompt": f"a boat, {run}"} if way == "whole" else {"cond": bench.cond}
        pipe = bench.pipe.within(vram=vram)
        plan = pipe.plan(**size, **prompt)
        manager("sim").timeline.clear()
        sim.reset_stats()
        cond = pipe.encode(prompt["prompt"]) if way == "whole" else bench.cond
        pipe.decode(pipe.sample(cond, **size))
        for planned, record in zip(plan.stages, manager("sim").timeline.stages, strict=True):
            assert planned.name == record.name
            if run == 0:
                assert record.driver_bytes > planned.driver_bytes
            else:
                assert record.peak_bytes <= planned.peak_vram_bytes <= 1.05 * record.peak_bytes
                assert record.driver_bytes <= planned.driver_bytes <= 1.05 * record.driver_bytes
        assert manager("sim").timeline.stages[-1].note == ("" if way == "whole" else way)
        assert (sim.stats().driver_peak_bytes <= vram) or run == 0
        assert plan.driver_bytes == max(stage.driver_bytes for stage in plan.stages) <= vram


def test_what_one_card_took_says_nothing_of_another(
    tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards of one name in other slots, and one card under another torch."""

    def use(slot: int) -> None:
        sim.enable(total="1GB", h2d_gbps=0.02, tflops=1e-3, overhead=CARD, slot=slot)

    def planned() -> tuple[int, int, float]:
        plan = bench.plan("1GB")
        return plan.peak_vram_bytes, plan.driver_bytes, plan.step_seconds

    bench = Bench("flux", tiny_folders("flux"), sim)
    manager("sim").free()
    use(1)  # in slot 0 the prompt was encoded
    first = planned()
    bench.sample(2**30)
    found = planned()
    assert all(more > less for more, less in zip(found, first, strict=True))
    use(2)
    assert planned() == first
    use(1)
    assert planned() == found
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.0")
        assert planned() == first
    assert planned() == found
