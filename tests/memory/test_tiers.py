"""Three tiers in one model: some groups on the device, some in RAM, some on disk, within both budgets, in any mix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import DoesNotFitError, ManagedModel, manager
from ballast.memory.planning import planner
from ballast.memory.planning.fit import sizes_of
from ballast.memory.sizes import format_bytes
from ballast.memory.weights import hostbuffer
from ballast.pipelines import Pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import few
from streamed_models import weight_pages
from torch import nn

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 4, "guidance": 1.0}
Folders = Callable[[str], Path]


class Bench:
    """A tiny Flux, its latents when resident, and what each placement of it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pipe = ballast.open_pipeline(folder, device="sim")
        self.cond = pipe.encode("a red boat")
        self.expected = pipe.sample(self.cond, **SIZE)
        self.size_bytes = pipe.denoisers[0].size_bytes
        self.least_vram = self.plan(pipe, vram=1, strategy="streamed").peak_vram_bytes
        self.most_vram = self.plan(pipe, strategy="resident").peak_vram_bytes
        self.windows = 3 * max(group.packed_bytes for group in sizes_of(pipe.denoisers[0]).groups)
        for unit in (*pipe.encoders, *pipe.denoisers):
            unit.drop()

    def plan(self, pipe: Pipeline, **more: Any) -> Any:
        return pipe.plan(**SIZE, cond=self.cond, **more).sampling

    def open(self, vram_share: float, ram_share: float, **more: Any) -> Pipeline:
        vram = self.least_vram + int(vram_share * (self.most_vram - self.least_vram))
        ram = self.windows + int(ram_share * (self.size_bytes - self.windows))
        return ballast.open_pipeline(self.folder, device="sim", vram=vram, ram=ram, **more)


@pytest.fixture
def bench(tiny_folders: Folders, sim: ModuleType) -> Bench:
    return Bench(tiny_folders("flux"))


def pages() -> int:
    """Bytes of RAM that weights and windows really take."""
    return sum(weight_pages().values())


@pytest.mark.parametrize("vram_share", few([0, 0.3, 0.7, 1], 0.3))
@pytest.mark.parametrize("ram_share", few([0, 0.25, 0.5, 0.75, 0.999], 0.25, 0.999))
def test_any_mix_of_tiers_gives_the_same_and_is_as_planned(
    vram_share: float, ram_share: float, bench: Bench, sim: ModuleType
) -> None:
    pipe = bench.open(vram_share, ram_share)
    (dit,) = pipe.denoisers
    plan, mgr = bench.plan(pipe), manager("sim")
    assert plan.fits and plan.from_disk
    elsewhere = pages()
    reads: list[int] = []
    held: list[int] = []

    def note(*_: Any) -> None:
        reads.append(mgr.disk_bytes_read)
        held.append(pages() - elsewhere)
        assert dit.host_bytes <= pipe.ram_bytes

    for turn in range(2):
        before = mgr.disk_bytes_read
        assert torch.equal(pipe.sample(bench.cond, **SIZE, on_step=note), bench.expected)
        record = mgr.timeline.stages[-1]
        assert record.peak_bytes == plan.peak_vram_bytes <= pipe.vram_bytes
        assert max(held) <= pipe.ram_bytes and max(held) - plan.ram_bytes <= 0.05 * pipe.ram_bytes
        assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0
        # Between runs what was in RAM stays there, and is not read again.
        kept = sum(sizes_of(dit).groups[i].packed_bytes for i in dit.held)
        assert dit.host_bytes == kept
        assert plan.ram_bytes - kept in (0, bench.windows, 3 * sizes_of(dit).tensor_bytes)
        read = mgr.disk_bytes_read - before
        steps = SIZE["steps"]
        ring = plan.ring_bytes + bench.windows  # by which it is ahead of the last step
        asked = (steps - 1) * plan.read_bytes + dit.size_bytes - turn * kept
        assert abs(read - asked) <= ring + 0.05 * dit.size_bytes
    assert plan.read_bytes == 0 or reads[1] > reads[0]
    if plan.read_bytes == 0:
        assert reads[-1] == reads[-2], "nothing is read in a steady step"


def test_what_stays_on_the_device_needs_no_copy_in_ram(bench: Bench, sim: ModuleType) -> None:
    half = bench.open(0.6, 0.6)
    plan = bench.plan(half)
    assert plan.read_bytes == 0
    assert plan.ram_bytes <= half.ram_bytes < 0.75 * bench.size_bytes
    assert torch.equal(half.sample(bench.cond, **SIZE), bench.expected)
    (dit,) = half.denoisers
    assert 0 < len(dit.held) < len(sizes_of(dit).groups)


@pytest.mark.long
def test_less_of_either_budget_is_never_planned_faster(bench: Bench, sim: ModuleType) -> None:
    sim.enable(total="1GB", h2d_gbps=5.0, tflops=0.1, disk_gbps=0.3)
    shares = [0, 0.3, 0.6, 1] if os.environ.get("BALLAST_SOAK") else [0, 0.4, 1]
    rows = [[bench.plan(bench.open(vram, ram)).step_seconds for ram in shares] for vram in shares]
    for row in (*rows, *zip(*rows, strict=True)):
        assert all(more <= less for less, more in zip(row, row[1:], strict=False))
    assert rows[0][0] > 1.05 * rows[0][-1] > 1.02 * rows[-1][-1]


@pytest.mark.parametrize("disk_gbps", few([0.02, 0.2], 0.2))
@pytest.mark.parametrize("ram_share", few([0, 0.3, 0.6, 0.9], 0.6))
def test_planned_seconds_are_those_of_the_virtual_clock(
    ram_share: float, disk_gbps: float, bench: Bench, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.enable(total="1GB", h2d_gbps=0.5, tflops=0.01, disk_gbps=disk_gbps)
    monkeypatch.setattr(planner, "SLOWEST_DISK_BYTES_PER_SECOND", 0.0)
    for vram_share in (0, 0.4):
        pipe = bench.open(vram_share, ram_share)
        plan = bench.plan(pipe)
        ends: list[float] = []
        pipe.sample(bench.cond, **SIZE, on_step=lambda *_, ends=ends: ends.append(clock(sim)))
        measured = (ends[-1] - ends[1]) / 2
        assert plan.step_seconds == pytest.approx(measured, rel=0.05), (vram_share, plan.label)


def clock(sim: ModuleType) -> float:
    """When what computes is done with all that was queued."""
    return float(sim.clock.default_stream.ready)


@pytest.mark.long
@settings(
    max_examples=6 if os.environ.get("BALLAST_SOAK") else 2, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=2, max_size=5), st.data())
def test_budgets_change_between_runs_and_in_the_middle(
    bench: Bench, sim: ModuleType, runs: list[tuple[float, float, bool]], data: st.DataObject
) -> None:
    mgr, elsewhere = manager("sim"), pages()
    for vram_share, ram_share, keep in runs:
        pipe = bench.open(vram_share, ram_share, keep=keep)
        (dit,) = pipe.denoisers
        change = data.draw(st.integers(-200_000, 200_000))

        def move(*_: Any, dit: ManagedModel = dit, change: int = change) -> None:
            (mgr.shrink if change < 0 else mgr.grow)(dit, abs(change))

        latents = pipe.sample(bench.cond, **SIZE, on_step=move)
        assert torch.equal(latents, bench.expected)
        assert dit.host_bytes <= pipe.ram_bytes
        assert mgr.report().resident_bytes == sim.stats().allocated_bytes
        gaps = hostbuffer.ALIGNMENT_BYTES * len(list(dit.module.parameters()))  # between the tensors of a group
        assert mgr.report().host_bytes <= pages() <= mgr.report().host_bytes + gaps + elsewhere
        assert sim.stats().hazards == 0
        if not keep:
            assert sim.stats().allocated_bytes == 0
    mgr.free()


def test_ram_for_less_than_the_windows_is_refused_with_the_least(bench: Bench, sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(bench.folder, device="sim", ram=bench.windows - 1, vram=bench.least_vram)
    with pytest.raises(DoesNotFitError, match="Nothing fits .* of RAM: .* Raise the ram budget to ") as caught:
        pipe.sample(bench.cond, **SIZE)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f" to {format_bytes(bench.windows, up=True)}.")
    enough = ballast.open_pipeline(bench.folder, device="sim", ram=bench.windows, vram=bench.least_vram)
    assert torch.equal(enough.sample(bench.cond, **SIZE), bench.expected)


def test_a_spinning_disk_is_no_tier(bench: Bench, sim: ModuleType) -> None:
    """It is read once, but not in each step, whatever was stated."""
    sim.enable(total="1GB", disk_gbps=0.15)
    pipe = bench.open(0, 0.4)
    plan = bench.plan(pipe)
    assert not plan.fits and plan.reason.startswith("A disk of 0.15 GB/s is too slow to read ")
    with pytest.raises(DoesNotFitError, match=r"0.15 GB/s .* in each step, .*Raise the ram budget to .* on an SSD\.$"):
        pipe.sample(bench.cond, **SIZE)
    assert sim.stats().allocated_bytes == 0
    assert bench.plan(bench.open(1, 0.4)).fits, "what stays is read once"
    rich = ballast.open_pipeline(
        bench.folder, device="sim", ram=plan.ram_bytes + plan.read_bytes, vram=bench.least_vram
    )
    assert torch.equal(rich.sample(bench.cond, **SIZE), bench.expected)
    sim.enable(total="1GB", disk_gbps=0.5)
    assert torch.equal(pipe.sample(bench.cond, **SIZE), bench.expected)


def test_pressure_takes_whole_groups_and_the_next_run_reads_those(bench: Bench, sim: ModuleType) -> None:
    mgr = manager("sim")
    pipe = ballast.open_pipeline(bench.folder, device="sim", vram=bench.least_vram)
    pipe.sample(bench.cond, **SIZE)
    (dit,) = pipe.denoisers
    whole = dit.host_bytes
    assert dit.in_ram
    freed = dit.drop(whole // 3)
    assert whole // 3 <= freed < whole and dit.host_bytes == whole - freed
    assert dit.tier == "host" and dit.held and not dit.in_ram
    assert all(
        ref.tensor.is_meta == (i not in dit.held)
        for i, group in enumerate(dit._groups())
        for ref in group.refs
        if isinstance(ref.tensor, nn.Parameter)
    )
    read = mgr.disk_bytes_read
    missing = sum(parameter.nbytes for parameter in dit.module.parameters() if parameter.is_meta)
    assert torch.equal(pipe.sample(bench.cond, **SIZE), bench.expected)
    assert dit.in_ram and mgr.disk_bytes_read - read == missing, "what lies in files, without the gaps in RAM"
    assert dit.drop() == whole and (dit.tier, dit.host_bytes) == ("disk", 0)


def test_a_reader_that_fails_leaves_what_was_there(
    bench: Bench, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = bench.open(0, 0.3)
    pipe.sample(bench.cond, **SIZE)
    (dit,) = pipe.denoisers
    held, more = dit.held, bench.open(0, 0.8)
    with monkeypatch.context() as patch:
        patch.setattr("ballast.memory.weights.reader.fill_batch", fails)
        with pytest.raises(OSError, match="no such luck"):
            more.sample(bench.cond, **SIZE)
    assert dit.held and dit.held <= held  # with more RAM, others than some of them are best held
    assert sim.stats().allocated_bytes == 0
    assert torch.equal(more.sample(bench.cond, **SIZE), bench.expected)
    assert len(dit.held) > len(held)


def fails(*batch: Any) -> None:
    raise OSError("no such luck")


def test_refused_ram_means_disk(
    tiny_folders: Callable[[str], Path], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives no more pages while the transformer is read: it runs from its files, and nothing is left."""
    size = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0}
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim")
    cond = pipe.encode("a red boat")
    expected = pipe.sample(cond, **size)
    assert pipe.denoisers[0].drop()
    allocate, made = hostbuffer.allocate, [0]

    def refused(nbytes: int) -> torch.Tensor:
        made[0] += 1
        if made[0] > 5:
            raise MemoryError("the system gives no more RAM")
        return allocate(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr("ballast.memory.weights.loading.allocate", refused)
        latents = pipe.sample(cond, **size)
        (unit,) = pipe.denoisers
        assert unit.tier == "disk"
    assert made[0] == 6
    torch.testing.assert_close(latents, expected, atol=0, rtol=0)
    assert torch.equal(pipe.sample(cond, **size), expected)
