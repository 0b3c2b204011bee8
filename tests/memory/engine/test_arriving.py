"""Weights that are read to RAM while the model runs, and before it does."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import ballast
import pytest
import torch
from ballast.memory import ManagedModel, manager
from ballast.memory.host import management as host
from ballast.memory.memory_manager import MemoryManager
from ballast.memory.vocabulary import Role
from ballast.memory.weights import reader
from ballast.memory.weights.stored import stored_tensors
from safetensors.torch import save_file
from slow_disk import SECONDS, Slow
from streamed_models import Blocks, nbytes, noise, run

COUNT = 12


@pytest.fixture
def mgr(sim: ModuleType) -> Iterator[MemoryManager]:
    gc.collect()
    found = manager("sim")
    found.schedule(None)
    yield found
    found.schedule(None)
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("ballast-reader")]:
        thread.join(SECONDS)
        assert not thread.is_alive(), "it reads on"


def never() -> Blocks:
    raise AssertionError("read by the library")


def unit(folder: Path, name: str = "dit", role: Role = "transformer", count: int = COUNT) -> ManagedModel:
    """Blocks in a file of their own, in the order of their names, which is not that of their calls."""
    path = folder / f"{name}.safetensors"
    save_file(dict(Blocks(count).state_dict()), path)

    def build() -> Blocks:
        with torch.device("meta"):
            return Blocks(count)

    return ManagedModel(name, role, build, never, stored=lambda: stored_tensors([path]))


@pytest.mark.parametrize("strategy", ["streamed", "leafwise"])
@pytest.mark.parametrize("share", [0.4, 1.5])
def test_the_first_step_begins_with_the_first_weights(
    share: float, strategy: str, mgr: MemoryManager, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer lets the next one be read: if anything waited for more than it needs, nothing would go on."""
    sim.enable(total=int(nbytes(Blocks(COUNT)) * share) + 2**16)
    expected = run(Blocks(COUNT), noise().cpu())
    disk = Slow(monkeypatch)
    dit = unit(tmp_path)
    disk.allow(2)  # what is in no group, and the first group
    for block in dit.module.blocks:  # type: ignore[union-attr]
        block.middle = lambda: disk.allow(2)
    with mgr.stage("sample", [dit], strategy):
        found = run(dit.module, noise())
        assert dit.in_ram and len(disk.read) > COUNT / 2
        disk.allow(COUNT)
        torch.testing.assert_close(found.cpu(), expected)
        again = run(dit.module, noise())
    assert torch.equal(found.cpu(), again.cpu())
    assert sum(disk.read) == nbytes(Blocks(COUNT)), "nothing is read twice"
    assert sim.stats().allocated_bytes == found.nbytes + again.nbytes
    assert sim.stats().hazards == 0


@pytest.mark.parametrize("seed", range(6))
def test_results_and_books_whatever_comes_when(
    seed: int, mgr: MemoryManager, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    fill = reader.fill_batch
    monkeypatch.setattr(reader, "fill_batch", lambda *batch: (time.sleep(chance.random() / 100), fill(*batch))[1])
    size = nbytes(Blocks(COUNT))
    expected: torch.Tensor | None = None
    dit = unit(tmp_path)
    for turn in range(4):
        sim.enable(total=int(size * chance.uniform(0.4, 1.5)) + 2**16)
        with mgr.stage("sample", [dit], chance.choice(["auto", "streamed", "leafwise"]), keep=chance.random() < 0.5):
            for _ in range(2):
                found = run(dit.module, noise()).cpu()
                expected = found if expected is None else expected
                assert torch.equal(found, expected), turn
                assert sim.stats().allocated_bytes == dit.resident_bytes
                if chance.random() < 0.3:
                    mgr.shrink(dit, chance.randrange(size))
        if chance.random() < 0.5:
            mgr.evict(dit)
            dit.drop()
    mgr.evict(dit)
    assert sim.stats().allocated_bytes == sim.stats().hazards == 0
    dit.drop()


def test_a_file_that_cannot_be_read_leaves_nothing(mgr: MemoryManager, sim: ModuleType, tmp_path: Path) -> None:
    dit = unit(tmp_path)
    whole = (tmp_path / "dit.safetensors").read_bytes()
    assert dit.size_bytes
    (tmp_path / "dit.safetensors").write_bytes(whole[:-100])
    with pytest.raises((OSError, ValueError), match="dit.safetensors"), mgr.stage("sample", [dit]):
        run(dit.module, noise())
    gc.collect()
    assert sim.stats().allocated_bytes == 0
    assert dit.tier == "disk" and dit.host_bytes == 0 and dit.reading is None


@pytest.mark.parametrize("strategy", ["resident", "streamed"])  # as it is put in place, and as it runs
def test_a_stop_while_weights_come_leaves_nothing(
    strategy: str, mgr: MemoryManager, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Slow(monkeypatch)
    dit, vae = unit(tmp_path), unit(tmp_path, "vae", "vae")
    mgr.schedule([mgr.adopt(dit), mgr.adopt(vae)])
    stops: list[Callable[[], None]] = []
    monkeypatch.setattr(host, "throw_if_interrupted", lambda: stops and stops[0]())

    def stop() -> None:
        disk.over = True
        disk.allow(4 * COUNT)
        raise KeyboardInterrupt

    threading.Timer(0.3, lambda: stops.append(stop)).start()
    disk.allow(3)
    with pytest.raises(KeyboardInterrupt), mgr.stage("sample", [dit], strategy):
        run(dit.module, noise())
    stops.clear()
    disk.over = False
    gc.collect()
    assert sim.stats().allocated_bytes == 0
    for each in (dit, vae):
        assert each.tier == "disk" and each.host_bytes == 0 and each.reading is None
    disk.allow(2 * COUNT)
    mgr.schedule(None)
    with mgr.stage("sample", [dit]):
        run(dit.module, noise())
    dit.await_reading()


def test_what_runs_next_is_read_meanwhile(mgr: MemoryManager, tmp_path: Path) -> None:
    first, dit, vae = unit(tmp_path, "first", "text_encoder"), unit(tmp_path), unit(tmp_path, "vae", "vae")
    mgr.schedule([mgr.adopt(each) for each in (first, dit, vae)])
    before = mgr.disk_bytes_read
    with mgr.stage("encode", [first]):
        run(first.module, noise())
        first.await_reading()
        run(first.module, noise())
        assert dit.in_ram, "it is being read"
        dit.await_reading()
    with mgr.stage("sample", [dit]):
        run(dit.module, noise())
        run(dit.module, noise())
    vae.await_reading()
    assert mgr.disk_bytes_read - before == 3 * nbytes(Blocks(COUNT)), "each once"
    events = [(event.kind, event.unit) for event in mgr.timeline.events if event.kind in ("read", "load")]
    assert events.index(("load", "first")) < events.index(("read", "dit")), "one after the other"
    assert events.index(("load", "dit")) < events.index(("read", "vae"))


@pytest.mark.parametrize("spare", [-1, 0])
def test_only_where_ram_has_room_for_it(spare: int, mgr: MemoryManager, tmp_path: Path) -> None:
    first, dit = unit(tmp_path, "first", "text_encoder"), unit(tmp_path)
    mgr.schedule([mgr.adopt(first), mgr.adopt(dit)])
    with mgr.stage("encode", [first], ram=2 * first.size_bytes + spare):
        run(first.module, noise())
        first.await_reading()
        run(first.module, noise())
        assert dit.in_ram == (spare == 0)
        dit.await_reading()
        assert first.in_ram


def test_what_is_dropped_while_it_is_read_has_not_come(
    mgr: MemoryManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, dit = unit(tmp_path, "first", "text_encoder"), unit(tmp_path)
    disk = Slow(monkeypatch)
    disk.allow(2 * COUNT + 1)  # of the first
    mgr.schedule([mgr.adopt(first), mgr.adopt(dit)])
    with mgr.stage("encode", [first]):
        run(first.module, noise())
        first.await_reading()
        run(first.module, noise())
        assert dit.reading
        disk.over = True
        disk.allow(4 * COUNT)
        assert dit.drop() == dit.size_bytes
        mgr.schedule(None)
        run(first.module, noise())
    assert dit.host_bytes == 0
    loads = [event.unit for event in mgr.timeline.events if event.kind == "load"]
    assert loads == ["first"]


def test_nothing_is_read_that_nobody_waits_for(mgr: MemoryManager, tmp_path: Path) -> None:
    first, dit = unit(tmp_path, "first", "text_encoder"), mgr.adopt(unit(tmp_path))
    with mgr.stage("encode", [first]):
        run(first.module, noise())
        first.await_reading()
        run(first.module, noise())
    assert not dit.in_ram


def test_a_graph_reads_its_transformer_while_it_encodes(
    mgr: MemoryManager, sim: ModuleType, tiny_folders: Callable[[str], Path]
) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim")
    cond = pipe.encode("a boat")
    expected = pipe.sample(cond, steps=2, width=32, height=32, seed=1)
    (dit,) = pipe.denoisers
    mgr.evict(dit)
    dit.drop()
    mgr.schedule([*pipe.encoders, dit, pipe.decoder])
    for prompt in ("a car", "a house"):  # at the first, the encoders may still be read themselves
        pipe.encode(prompt)
    assert dit.in_ram and dit.placement is None
    found = pipe.sample(cond, steps=2, width=32, height=32, seed=1)
    assert torch.equal(found, expected)
    pipe.decoder.await_reading()
    assert sim.stats().hazards == 0
