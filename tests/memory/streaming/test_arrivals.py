"""What stays and comes as it is called: in which order its copies are queued, what they wait for, and who does not."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.simulated import clock
from ballast.memory.streaming import stager
from ballast.memory.streaming.arrivals import Arrivals
from ballast.memory.streaming.choice import make_placement
from ballast.memory.streaming.incoming import DiskTimes, Incoming
from ballast.memory.streaming.placement import Placement
from ballast.memory.streaming.resident import Resident
from ballast.memory.streaming.ring import Piece, Place
from ballast.memory.streaming.stream import Streamed
from ballast.memory.units.pieces import CallOrder
from ballast.memory.units.reader import Job, Look
from ballast.memory.units.weights import Stored, stored_tensors
from safetensors.torch import save_file
from slow_disk import Slow
from streamed_models import SIM, Blocks, budget, nbytes, noise, rests, run
from torch import nn

COUNT = 8
PATHS = tuple(f"blocks.{i}.{layer}" for i in range(COUNT) for layer in ("up", "down"))  # a piece each
ALL = nbytes(Blocks(COUNT))


@pytest.fixture(autouse=True)
def _books(sim: ModuleType) -> Any:
    """Copies take longer than what they bring computes, and a test leaves nothing and has raced nowhere."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    yield
    gc.collect()
    assert sim.stats().allocated_bytes == sim.stats().hazards == 0


def expected() -> torch.Tensor:
    return run(Blocks(COUNT), noise().cpu())


def stored(folder: Path, module: nn.Module, in_ram: Collection[str] = ()) -> dict[str, Stored]:
    """Write a module's weights to a file, and put on `meta` what is of none of the modules `in_ram`."""
    save_file(dict(module.state_dict()), folder / "dit.safetensors")
    for path, part in module.named_modules():
        for key, weight in part._parameters.items():
            if weight is not None and path not in in_ram:
                part._parameters[key] = nn.Parameter(weight.to("meta"), requires_grad=False)
    return stored_tensors([folder / "dit.safetensors"])


def coming(
    folder: Path, kind: str, weights_bytes: int = ALL, look: Look = lambda read: None, timed: bool = False
) -> tuple[ManagedModel, Placement]:
    """A module in place, of which the disk was let give what is in no piece. Who waits for more calls `look`."""
    save_file(dict(Blocks(COUNT).state_dict()), folder / "dit.safetensors")

    def build() -> Blocks:
        with torch.device("meta"):
            return Blocks(COUNT)

    unit = ManagedModel(
        "dit", "transformer", build, Blocks, stored=lambda: stored_tensors([folder / "dit.safetensors"])
    )
    unit.learn(CallOrder(PATHS))
    unit.load(look, behind=True)
    assert unit.reading
    times = DiskTimes(unit.reading.order, clock.read_from_disk) if timed else None
    incoming = Incoming(unit.reading, times)
    placement = make_placement(unit, kind, torch.device(SIM), weights_bytes, incoming=incoming)
    placement.place()
    return unit, placement


def end(unit: ManagedModel, placement: Placement) -> None:
    placement.remove()
    unit.await_reading()
    unit.drop()


@pytest.mark.parametrize(("kind", "share"), [("resident", 1.0), ("streamed", 1.0), ("streamed", 0.5)])
def test_nothing_waits_for_what_comes_later(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, kind, budget(Blocks(COUNT), share))
    pieces, arrivals = placement._pieces, placement._arrivals
    disk.allow(3)
    placement._supply.await_ram(pieces[2].stored())
    assert not arrivals.send_before(None, None) and arrivals.owes
    placement.complete()
    assert arrivals.owes
    sent = [piece.sent for piece in pieces if piece.resident]
    assert sent == [piece in pieces[:3] for piece in pieces if piece.resident]
    computed: list[int] = []
    for i, block in enumerate(placement.module.blocks):  # type: ignore[arg-type]

        def middle(i: int = i) -> None:
            assert not any(placement._supply.in_ram(piece.stored()) for piece in pieces[2 * i + 3 :])
            computed.append(i)
            disk.allow(2)

        block.middle = middle
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert computed == list(range(COUNT)) and not arrivals.owes
    end(unit, placement)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_what_is_called_is_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, runs = Slow(monkeypatch), threading.Event()
    disk.allow(1)
    unit, placement = coming(tmp_path, kind, look=lambda read: disk.allow(runs.is_set()))
    disk.allow(2 * COUNT - 1)
    assert not placement._supply.in_ram(placement._pieces[-1].stored())
    runs.set()
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    end(unit, placement)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_copies_wait_for_a_simulated_disk(kind: str, sim: ModuleType, tmp_path: Path) -> None:
    sim.enable(total="1GB", disk_gbps=1e-3)
    begin, end_of_call = (sim.Event(enable_timing=True) for _ in range(2))
    begin.record()
    unit, placement = coming(tmp_path, kind, timed=True)
    run(placement.module, noise())
    end_of_call.record()
    assert begin.elapsed_time(end_of_call) == pytest.approx(ALL / 1e6 * 1000, rel=0.01)
    end(unit, placement)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_copies_wait_for_what_queued_work_reads(kind: str) -> None:
    """The room of what comes may be that of what has just left, which work that is queued still reads."""
    module = Blocks(COUNT)
    unit = ManagedModel.from_module("dit", "transformer", module)
    unit.learn(CallOrder(PATHS))
    placement = make_placement(unit, kind, torch.device(SIM), ALL)
    placement.place()
    for _ in range(3):
        placement.complete()
        found = run(module, noise(512))
        placement.rest()
        placement.shrink(ALL // 2)
        assert placement.grow(ALL)
    placement.complete()
    torch.testing.assert_close(run(module, noise(512)), found, rtol=0, atol=0)
    placement.remove()


def test_room_is_given_up_when_no_copy_comes_to_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, "resident")
    pieces, arrivals, copying = placement._pieces, placement._arrivals, placement._queues.copying
    disk.allow(4)
    placement._supply.await_ram(pieces[3].stored())
    arrivals.send_before(None, None)
    arrivals.enter(pieces[0])
    for piece in (pieces[-1], pieces[0]):  # that has not been sent, and that is waited for already
        placement._give_up(piece)
        assert not copying.query(), "the host waits for copies to others"
    placement._give_up(pieces[1])
    assert copying.query()
    torch.empty(ALL, dtype=torch.uint8, device=SIM).zero_()
    disk.allow(2 * COUNT)
    assert not arrivals.send_before(pieces[2], None) or pieces[1] not in arrivals._owing
    unit.await_reading()
    placement.complete()
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert placement.resident_bytes == ALL and not arrivals.owes
    end(unit, placement)


def followed(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """The pieces in the order in which their copies are asked for."""
    asked: list[Piece] = []
    send, load = Arrivals._send, getattr(placement, "_load", None)

    def sent(self: Arrivals, piece: Piece) -> None:
        asked.append(piece)
        send(self, piece)

    def loaded(place: Place) -> None:
        asked.append(place.piece)
        load(place)

    monkeypatch.setattr(Arrivals, "_send", sent)
    if load:
        monkeypatch.setattr(placement, "_load", loaded)
    return asked


@pytest.mark.parametrize("seed", range(12))
def test_the_first_copies_are_in_the_order_of_the_calls(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stays, and wherever it comes from; and nothing is read twice."""
    chance = random.Random(seed)
    module, truth = Blocks(COUNT), expected()
    on_disk = set(chance.sample(PATHS, chance.choice([0, 4, 8, len(PATHS)])))
    source = stored(tmp_path, module, set(PATHS) - on_disk) if on_disk else None
    loads = Streamed(module, torch.device(SIM), 0, source, CallOrder(PATHS))._loads
    loads = replace(loads, pieces=tuple(replace(each, seconds=chance.random()) for each in loads.pieces))
    share = budget(module, chance.uniform(0.1, 0.9))
    placement = Streamed(module, torch.device(SIM), share, source, CallOrder(PATHS), loads)
    pieces = placement._pieces
    asked, reads = followed(placement, monkeypatch), reading(monkeypatch)
    placement.place()
    rests(placement)
    torch.testing.assert_close(run(module, noise()).cpu(), truth)
    assert {piece.resident for piece in pieces} == {True, False}
    assert [pieces.index(piece) for piece in asked[: len(pieces)]] == list(range(len(pieces))), on_disk
    came, read = placement.take_bytes_in(), placement.take_bytes_read()
    assert came == nbytes(module) + sum(piece.packed_bytes for piece in asked[len(pieces) :])
    placement.settle()
    coming = [piece for piece in asked[len(pieces) :] if placement._supply.is_on_disk(piece)]
    assert read == sum(piece.stored_bytes for piece in (*pieces, *coming) if placement._supply.is_on_disk(piece)) + (
        nbytes(module) - sum(piece.stored_bytes for piece in pieces)
    ) * bool(on_disk)
    if found := placement._supply._stager:
        coming += [window.fill.piece for window in found._windows if window.fill and window.fill.piece]
    assert max(reads.values(), default=1) == 1 + bool(coming)
    assert sum(reads.values()) == len(on_disk) + bool(on_disk) + len(set(coming))
    placement.remove()


def reading(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each part of a file is read, by where it begins and how long it is."""
    reads: Counter[tuple[int, int]] = Counter()
    read = stager.read_batch

    def counted(batch: list[Job]) -> None:
        reads.update((part.offset, part.count) for part, _ in batch)
        read(batch)

    monkeypatch.setattr(stager, "read_batch", counted)
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
    placement = Streamed(module, torch.device(SIM), budget(Blocks(COUNT), share), source, CallOrder(PATHS))
    unseen = placement._pieces[-1]
    assert not unseen.called
    asked = followed(placement, monkeypatch)
    marks: list[int] = []
    module.after = lambda: marks.append(len(asked))
    placement.place()
    rests(placement)
    for _ in range(3):
        torch.testing.assert_close(run(module, noise()).cpu(), truth)
    early = asked[asked.index(unseen) + 1 : marks[0]]
    assert not any(piece.resident for piece in early)
    assert share != 0.5 or any(piece.resident for piece in asked[marks[0] :]), "nothing was left to come early"
    placement.remove()


def test_what_the_windows_are_read_for(tmp_path: Path) -> None:
    """What streams before the next that is to stay and is on disk: that takes the windows."""
    module = Blocks(COUNT)
    source = stored(tmp_path, module, {PATHS[3]})
    placement = Streamed(module, torch.device(SIM), 0, source, CallOrder(PATHS))
    arrivals, pieces = placement._arrivals, placement._pieces
    with torch.no_grad():
        for i in (10, 3, 6, 2):
            arrivals.expect(pieces[i])

    def found(upcoming: list[int], now: int | None) -> list[int]:
        current = None if now is None else pieces[now]
        return [pieces.index(each) for each in arrivals.before_disk([pieces[i] for i in upcoming], current)]

    assert found([0, 1, 4], None) == [0, 1]
    assert found([4, 5, 7, 8, 11], 2) == [4, 5], "the third is in RAM"
    assert found([7, 8, 9, 11], 6) == [7, 8, 9]
    assert found([7, 9, 0, 1], 6) == [7, 9], "of the next call"
    assert found([12, 13, 0], 11) == [12, 13, 0], "it was left out in this call"
    assert [pieces.index(piece) for piece in order_of(arrivals)] == [2, 6, 10]
    assert [len(copies) for copies in arrivals.disk_copies()] == [1, 1, 1]
    arrivals.clear()
    assert found([4, 5, 7, 8, 11], 2) == [4, 5, 7, 8, 11] and not arrivals.owes


def order_of(arrivals: Arrivals) -> list[Piece]:
    """The pieces that come from disk, as they are read."""
    whose = {id(target): piece for piece in arrivals._order for _, target in piece.owed}
    return [whose[id(copies[0][1])] for copies in arrivals.disk_copies()]


def test_what_left_and_is_brought_back_comes_in_its_turn(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk no more comes than is called."""
    module, truth = Blocks(COUNT), expected()
    placement = Resident(module, torch.device(SIM), stored(tmp_path, module), CallOrder(PATHS))
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
    assert [placement._pieces.index(piece) for piece in asked] == list(range(2 * COUNT))
    placement.remove()


def test_what_left_before_it_came_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, "resident")
    asked = followed(placement, monkeypatch)
    placement.shrink(ALL // 3)
    placement.complete()
    disk.allow(2 * COUNT)
    unit.await_reading()
    placement.complete()
    assert [placement._pieces.index(piece) for piece in asked] == list(range(2 * COUNT))
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert not any(piece.owed for piece in placement._pieces)
    placement.complete()
    assert not placement._gates, "all is there"
    end(unit, placement)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_weight_with_two_names_comes_once(where: str, sim: ModuleType, tmp_path: Path) -> None:
    module, truth = Blocks(COUNT), expected()
    source = stored(tmp_path, module) if where == "disk" else None
    layer = module.blocks[0].up
    assert isinstance(layer, nn.Linear)
    layer.register_parameter("again", layer.weight)
    sim.reset_stats()
    placement = Resident(module, torch.device(SIM), source, CallOrder(PATHS))
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
    placement = Resident(module, torch.device(SIM), stored(tmp_path, module), CallOrder(PATHS))
    placement.place()
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stager, "read_batch", unplugged)
            with pytest.raises(OSError, match="unplugged"):
                run(module, noise())
    torch.testing.assert_close(run(module, noise()).cpu(), truth)
    placement.remove()


def unplugged(batch: list[Job]) -> None:
    raise OSError("unplugged")
