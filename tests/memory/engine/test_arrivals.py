"""What stays and comes as it is called: what its copies and its calls wait for, and what they do not."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.engine.ring import State
from ballast.memory.weights.groups import CallOrder
from coming_groups import ALL, COUNT, PATHS, coming, end, expected, followed
from slow_disk import Slow
from streamed_models import SIM, Blocks, budget, noise, run, unit_engine


@pytest.fixture(autouse=True)
def _registry(sim: ModuleType) -> Any:
    """Copies take longer than what they bring computes, and a test leaves nothing and has raced nowhere."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    yield
    gc.collect()
    assert sim.stats().allocated_bytes == sim.stats().hazards == 0


@pytest.mark.parametrize(("kind", "share"), [("resident", 1.0), ("streamed", 1.0), ("streamed", 0.5)])
def test_nothing_waits_for_what_comes_later(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, kind, budget(Blocks(COUNT), share))
    groups, arrivals = placement._groups, placement._uploads
    disk.allow(3)
    placement._source.await_ram(groups[2].stored())
    assert not arrivals.send_before(None, None) and arrivals.pending
    placement.complete()
    assert arrivals.pending
    sent = [group.state is not State.ALLOCATED for group in groups if group.resident]
    ahead = 1 if os.environ.get("BALLAST_COPIES") == "xpu" and share == 1 else 3  # one of pageable RAM
    assert sent == [group in groups[:ahead] for group in groups if group.resident]
    computed: list[int] = []
    for i, block in enumerate(placement.module.blocks):  # type: ignore[arg-type]

        def middle(i: int = i) -> None:
            assert not any(placement._source.in_ram(group.stored()) for group in groups[2 * i + 3 :])
            computed.append(i)
            disk.allow(2)

        block.middle = middle
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert computed == list(range(COUNT)) and not arrivals.pending
    end(unit, placement)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_what_is_called_is_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, runs = Slow(monkeypatch), threading.Event()
    disk.allow(1)
    unit, placement = coming(tmp_path, kind, look=lambda read: disk.allow(runs.is_set()))
    disk.allow(2 * COUNT - 1)
    assert not placement._source.in_ram(placement._groups[-1].stored())
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
    placement = unit_engine(unit, kind, ALL)
    placement.place()
    for _ in range(3):
        placement.complete()
        found = run(module, noise(512))
        placement.end_call()
        placement.shrink(ALL // 2)
        assert placement.grow(ALL)
    placement.complete()
    torch.testing.assert_close(run(module, noise(512)), found, rtol=0, atol=0)
    placement.remove()


@pytest.mark.eager
def test_room_is_given_up_when_no_copy_comes_to_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, "resident")
    groups, arrivals, copying = placement._groups, placement._uploads, placement._queues.copying
    disk.allow(4)
    placement._source.await_ram(groups[3].stored())
    arrivals.send_before(None, None)
    arrivals.enter(groups[0])
    for group in (groups[-1], groups[0]):  # that has not been sent, and that is waited for already
        placement._evict(group)
        assert not copying.query(), "the host waits for copies to others"
    placement._evict(groups[1])
    assert copying.query()
    torch.empty(ALL, dtype=torch.uint8, device=SIM).zero_()
    disk.allow(2 * COUNT)
    assert not arrivals.send_before(groups[2], None) or groups[1] not in arrivals._pending
    unit.await_reading()
    placement.complete()
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert placement.resident_bytes == ALL and not arrivals.pending
    end(unit, placement)


@pytest.mark.eager
def test_what_left_before_it_came_comes_in_its_turn(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Slow(monkeypatch)
    disk.allow(1)
    unit, placement = coming(tmp_path, "resident")
    asked = followed(placement, monkeypatch)
    placement.shrink(ALL // 3)
    assert sim.stats().allocated_bytes == placement.resident_bytes < ALL
    placement.complete()
    disk.allow(2 * COUNT)
    unit.await_reading()
    placement.complete()
    assert [placement._groups.index(group) for group in asked] == list(range(2 * COUNT))
    torch.testing.assert_close(run(placement.module, noise()).cpu(), expected())
    assert not any(group.uploads for group in placement._groups)
    placement.complete()
    assert not placement._gates, "all is there"
    end(unit, placement)
