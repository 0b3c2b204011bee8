"""What stays and comes as it is called: in which order it is read and copied, once each."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.engine import staging_buffers as stager
from ballast.memory.engine.deferred_uploads import DeferredUploads
from ballast.memory.engine.ring import WeightGroup
from ballast.memory.weights.groups import CallOrder
from ballast.memory.weights.reader import Job
from coming_groups import ALL, COUNT, PATHS, expected, followed, stored
from streamed_models import SIM, Blocks, budget, nbytes, noise, resident_engine, rests, run, streamed_engine
from torch import nn


@pytest.fixture(autouse=True)
def _registry(sim: ModuleType) -> Any:
    """Copies take longer than what they bring computes, and a test leaves nothing and has raced nowhere."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    yield
    gc.collect()
    assert sim.stats().allocated_bytes == sim.stats().hazards == 0


@pytest.mark.eager
@pytest.mark.parametrize("seed", range(12))
def test_the_first_copies_are_in_the_order_of_the_calls(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stays, and wherever it comes from; and nothing is read twice."""
    chance = random.Random(seed)
    module, truth = Blocks(COUNT), expected()
    on_disk = set(chance.sample(PATHS, chance.choice([0, 4, 8, len(PATHS)])))
    source = stored(tmp_path, module, set(PATHS) - on_disk) if on_disk else None
    loads = streamed_engine(module, torch.device(SIM), 0, source, CallOrder(PATHS)).layout.loads
    loads = replace(loads, groups=tuple(replace(each, seconds=chance.random()) for each in loads.groups))
    share = budget(module, chance.uniform(0.1, 0.9))
    placement = streamed_engine(module, torch.device(SIM), share, source, CallOrder(PATHS), loads)
    groups = placement._groups
    asked, reads = followed(placement, monkeypatch), reading(monkeypatch)
    placement.place()
    rests(placement)
    torch.testing.assert_close(run(module, noise()).cpu(), truth)
    assert {group.resident for group in groups} == {True, False}
    assert [groups.index(group) for group in asked[: len(groups)]] == list(range(len(groups))), on_disk
    came, read = placement.take_bytes_in(), placement.take_bytes_read()
    assert came == nbytes(module) + sum(group.packed_bytes for group in asked[len(groups) :])
    placement.wait_for_copies()
    coming = [group for group in asked[len(groups) :] if placement._source.is_on_disk(group)]
    assert read == sum(group.stored_bytes for group in (*groups, *coming) if placement._source.is_on_disk(group)) + (
        nbytes(module) - sum(group.stored_bytes for group in groups)
    ) * bool(on_disk)
    if found := placement._source._staging:
        coming += [window.fill.group for window in found._windows if window.fill and window.fill.group]
    assert max(reads.values(), default=1) == 1 + bool(coming)
    assert sum(reads.values()) == len(on_disk) + bool(on_disk) + len(set(coming))
    placement.remove()


def reading(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each part of a file is read, by where it begins and how long it is."""
    reads: Counter[tuple[int, int]] = Counter()
    read = stager.fill_batch

    def counted(batch: list[Job], room: int) -> None:
        reads.update((part.offset, part.count) for part, _ in batch)
        read(batch, room)

    monkeypatch.setattr(stager, "fill_batch", counted)
    return reads


class Detour(Blocks):
    """Calls a layer in its middle that was not seen."""

    def __init__(self, width: int) -> None:
        super().__init__(COUNT)
        self.unseen = nn.Linear(64, width, bias=False).requires_grad_(False)
        self.after: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, list(range(COUNT // 2)))
        x = self.unseen(x)[:, :64]
        self.after()
        return super().forward(x, list(range(COUNT // 2, COUNT)))


@pytest.mark.parametrize("width", [64, 1024])  # which the ring has no room for
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_what_was_not_seen_lets_nothing_come_early(
    where: str, share: float, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when it is called, and what follows it is not known."""
    module = Detour(width)
    truth = run(module, noise().cpu())
    source = stored(tmp_path, module) if where == "disk" else None
    placement = streamed_engine(module, torch.device(SIM), budget(Blocks(COUNT), share), source, CallOrder(PATHS))
    unseen = placement._groups[-1]
    assert not unseen.called
    asked = followed(placement, monkeypatch)
    marks: list[int] = []
    module.after = lambda: marks.append(len(asked))
    placement.place()
    rests(placement)
    for _ in range(3):
        torch.testing.assert_close(run(module, noise()).cpu(), truth)
    early = asked[asked.index(unseen) + 1 : marks[0]]
    ahead = int(where == "ram" and share == 1)  # where all stay, one comes from pageable RAM while each group runs
    assert sum(group.resident for group in early) <= ahead
    assert share != 0.5 or any(group.resident for group in asked[marks[0] :]), "nothing was left to come early"
    placement.remove()


def test_what_the_windows_are_read_for(tmp_path: Path) -> None:
    """What streams before the next that is to stay and is on disk: that takes the windows."""
    module = Blocks(COUNT)
    source = stored(tmp_path, module, {PATHS[3]})
    placement = streamed_engine(module, torch.device(SIM), 0, source, CallOrder(PATHS))
    arrivals, groups = placement._uploads, placement._groups
    with torch.no_grad():
        for i in (10, 3, 6, 2):
            arrivals.allocate(groups[i])

    def found(upcoming: list[int], now: int | None) -> list[int]:
        current = None if now is None else groups[now]
        return [groups.index(each) for each in arrivals.before_disk([groups[i] for i in upcoming], current)]

    assert found([0, 1, 4], None) == [0, 1]
    assert found([4, 5, 7, 8, 11], 2) == [4, 5], "the third is in RAM"
    assert found([7, 8, 9, 11], 6) == [7, 8, 9]
    assert found([7, 9, 0, 1], 6) == [7, 9], "of the next call"
    assert found([12, 13, 0], 11) == [12, 13, 0], "it was left out in this call"
    assert [groups.index(group) for group in order_of(arrivals)] == [2, 6, 10]
    assert [len(copies) for copies in arrivals.disk_copies()] == [1, 1, 1]
    arrivals.clear()
    assert found([4, 5, 7, 8, 11], 2) == [4, 5, 7, 8, 11] and not arrivals.pending


def order_of(arrivals: DeferredUploads) -> list[WeightGroup]:
    """The groups that come from disk, as they are read."""
    whose = {id(target): group for group in arrivals._order for _, target in group.uploads}
    return [whose[id(copies[0][1])] for copies in arrivals.disk_copies()]


def test_what_left_and_is_brought_back_comes_in_its_turn(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk no more comes than is called."""
    module, truth = Blocks(COUNT), expected()
    placement = resident_engine(module, torch.device(SIM), stored(tmp_path, module), CallOrder(PATHS))
    asked, copies, early = followed(placement, monkeypatch), [], []
    placement.place()
    placement.shrink(ALL // 3)
    placement.grow(ALL)
    assert placement.is_whole and not asked
    module.blocks[0].middle = lambda: early.extend((len(asked), len(copies)))  # type: ignore[union-attr]
    x = noise()
    with sim.watch(copies.append):
        torch.testing.assert_close(run(module, x).cpu(), truth)
    assert early == [1, 1]
    assert [placement._groups.index(group) for group in asked] == list(range(2 * COUNT))
    placement.remove()


@pytest.mark.eager
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_weight_with_two_names_comes_once(where: str, sim: ModuleType, tmp_path: Path) -> None:
    module, truth = Blocks(COUNT), expected()
    source = stored(tmp_path, module) if where == "disk" else None
    layer = module.blocks[0].up
    assert isinstance(layer, nn.Linear)
    layer.register_parameter("again", layer.weight)
    sim.reset_stats()
    placement = resident_engine(module, torch.device(SIM), source, CallOrder(PATHS))
    placement.place()
    assert placement.resident_bytes == sim.stats().allocated_bytes == ALL
    x = noise()
    torch.testing.assert_close(run(module, x).cpu(), truth)
    assert sim.stats().h2d_bytes == ALL + x.nbytes
    assert (placement.take_bytes_in(), placement.take_bytes_read()) == (ALL, ALL if source else 0)
    assert (placement.take_bytes_in(), placement.take_bytes_read()) == (0, 0)
    assert layer.weight.data_ptr() == layer.again.data_ptr() and not layer.weight.is_inference()
    placement.remove()
    assert layer.weight is layer.again


def test_what_could_not_be_read_comes_when_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, truth = Blocks(COUNT), expected()
    placement = resident_engine(module, torch.device(SIM), stored(tmp_path, module), CallOrder(PATHS))
    placement.place()
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stager, "fill_batch", unplugged)
            with pytest.raises(OSError, match="unplugged"):
                run(module, noise())
    torch.testing.assert_close(run(module, noise()).cpu(), truth)
    placement.remove()


def unplugged(batch: list[Job], room: int) -> None:
    raise OSError("unplugged")
