"""The first call of a module begins with the first of its weights, and takes what the plan says."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ballast.memory import ManagedModel, manager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.planning.planner import Plan, make_plan
from ballast.memory.planning.room import HeldWeights, PlanRequest, Room
from ballast.memory.probe import rates
from ballast.memory.weights.groups import CallOrder
from ballast.memory.weights.stored import stored_tensors
from safetensors.torch import save_file
from streamed_models import Blocks, nbytes, noise, run

COUNT = 24
TOKENS = 64
TIMES = 20
WIDE = 96
OPERATIONS = 2 * TOKENS * WIDE * WIDE  # of a layer
PATHS = tuple(f"blocks.{i}.{layer}" for i in range(COUNT) for layer in ("up", "down"))
# On a lazy card the host waits for copies from pageable RAM, which plans do not count.
EAGER = "BALLAST_COPIES" not in os.environ
QUICK = (0, 1, 26)  # the last has a resident plan no faster than a streamed one, but for how sums are rounded
MARKS = {True: pytest.mark.long, False: pytest.mark.soak}
WORK = UnitForecast(
    live_bytes=TOKENS * WIDE * 4,
    working_bytes=4 * TOKENS * WIDE * 4,
    first_bytes=4 * TOKENS * WIDE * 4,
    calls=1,
    operations=Operations(len(PATHS) * OPERATIONS),
    modules=tuple((path, Operations(OPERATIONS)) for path in PATHS),
)


class LateBlocks(Blocks):
    """The first of which computes far longer than the others."""

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        many = self.blocks[0](x.repeat(TIMES, 1))
        return super().forward(many[: x.shape[0]], list(range(1, COUNT)))


def unit(folder: Path, kind: type[Blocks] = Blocks) -> ManagedModel:
    path = folder / "dit.safetensors"
    if not path.exists():
        save_file(dict(kind(COUNT, WIDE).state_dict()), path)

    def build() -> Blocks:
        with torch.device("meta"):
            return kind(COUNT, WIDE)

    def never() -> Blocks:
        raise AssertionError("read by the library")

    made = ManagedModel("dit", "transformer", build, never, stored=lambda: stored_tensors([path]))
    made.learn(CallOrder(PATHS))
    return made


def planned(dit: ManagedModel, strategy: str, vram: int, ram: int, work: UnitForecast = WORK) -> Plan:
    sizes, known = sizes_of(dit), rates(torch.device("sim:0"))
    held = HeldWeights(None if dit.in_ram else dit.held, from_disk=sizes.total_bytes > ram)
    return make_plan("dit", sizes, work, Room(vram, ram), known, PlanRequest(strategy), held)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(n, marks=MARKS[n < 8]) for n in range(180) if n not in QUICK)])
def test_a_first_call_takes_what_is_planned(seed: int, sim: ModuleType, tmp_path: Path) -> None:
    """Whatever is slowest, wherever the weights are to lie, and wherever they lay before."""
    gc.collect()
    chance = random.Random(seed)
    size = nbytes(Blocks(COUNT, WIDE))
    computes = len(PATHS) * OPERATIONS / 1e9  # seconds
    copies, reads = (computes * chance.choice([0.2, 0.7, 1.0, 1.4, 4.0]) for _ in range(2))
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=size / copies / 1e9, disk_gbps=size / reads / 1e9)
    mgr, dit = manager("sim"), unit(tmp_path)  # its lock keeps the watch over the RAM away
    expected: torch.Tensor | None = None
    x = noise(TOKENS, WIDE)
    for turn in range(3):
        strategy = chance.choice(["auto", "streamed", "leafwise"])
        vram = int(size * chance.uniform(0.35, 1.3)) + 6 * x.nbytes
        ram = int(size * chance.choice([0.4, 0.7, 1.0, 2.0])) + 4096
        plan = planned(dit, strategy, vram, ram)
        assert plan.fits
        sim.reset_stats()
        events = [torch.get_device_module("sim").Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        forecast = Forecast(0, {"dit": WORK})
        with mgr._lock, mgr.stage("sample", [dit], strategy, forecast=forecast, vram=vram, ram=ram):
            found = run(dit.module, x).cpu()
            events[1].record()  # what is read for the next call may take longer
            seconds = events[0].elapsed_time(events[1]) / 1000
        assert dit.placement is None
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        case = turn, strategy, plan.label, copies / computes, reads / computes, ram / size
        if EAGER:
            assert seconds == pytest.approx(plan.first_step_seconds, rel=0.05), case
        assert sim.stats().hazards == sim.stats().d2h_bytes - found.nbytes == 0
        if chance.random() < 0.5:
            dit.drop(chance.choice([None, size // 3]))
    dit.drop()
    del x
    gc.collect()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.eager
def test_copies_wait_for_what_the_ring_still_holds(sim: ModuleType, tmp_path: Path) -> None:
    """What computes long at first holds up what streams, and that what stays and comes behind it."""
    size = nbytes(Blocks(COUNT, WIDE))
    operations = [float(OPERATIONS * (TIMES if path.startswith("blocks.0.") else 1)) for path in PATHS]
    computes = sum(operations) / 1e9  # seconds
    work = replace(
        WORK,
        working_bytes=TIMES * WORK.working_bytes,
        first_bytes=TIMES * WORK.first_bytes,
        operations=Operations(sum(operations)),
        modules=tuple(zip(PATHS, map(Operations, operations), strict=True)),
    )
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=size / computes / 1e9, disk_gbps=1e6)
    mgr, dit = manager("sim"), unit(tmp_path, LateBlocks)
    vram = size * 8 // 10 + work.peak_bytes
    plan = planned(dit, "streamed", vram, 2 * size, work)
    assert plan.first_step_seconds > 1.3 * computes > 1.2 * plan.step_seconds
    events = [torch.get_device_module("sim").Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    with mgr._lock, mgr.stage("sample", [dit], "streamed", forecast=Forecast(0, {"dit": work}), vram=vram):
        run(dit.module, noise(TOKENS, WIDE)).cpu()
        events[1].record()
        seconds = events[0].elapsed_time(events[1]) / 1000
    assert seconds == pytest.approx(plan.first_step_seconds, rel=0.05)
    dit.drop()
