"""Lazy copies: what waits, what does not, and that a program which forgets to wait gets the wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.simulated import lazy
from ballast.memory.weights import hostbuffer

SIM = "sim:0"
LAZY = ("cuda", "xpu")


@pytest.fixture(autouse=True)
def _no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that other tests have loaded in this process would decide what is pinned."""
    monkeypatch.setattr(hostbuffer.host, "pin_memory", lambda _: None)


def backend() -> Any:
    return torch.get_device_module("sim")


def pinned(value: float, count: int = 1000) -> torch.Tensor:
    """RAM that the mode of the moment copies from by itself."""
    flat = hostbuffer.window(4 * count, torch.device(SIM))
    assert hostbuffer.pin(flat, torch.device(SIM))
    return flat.view(torch.float32).fill_(value)


def sent(source: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    """Zeros on the device that are to become a copy of it, the stream, and the event behind that."""
    target, stream, event = torch.zeros(source.shape, device=SIM), backend().Stream(), backend().Event()
    with stream:
        target.copy_(source, non_blocking=True)
    event.record(stream)
    return target, stream, event


def races(sim: ModuleType) -> int:
    return sim.stats().hazards


WAITS: dict[str, Callable[[Any, Any], None]] = {
    "event": lambda stream, event: backend().current_stream().wait_event(event),
    "stream": lambda stream, event: backend().current_stream().wait_stream(stream),
    "host, event": lambda stream, event: event.synchronize(),
    "host, stream": lambda stream, event: stream.synchronize(),
    "host, device": lambda stream, event: backend().synchronize(),
}


def third(stream: Any, event: Any) -> None:
    """Wait for a stream that has waited."""
    other, after = backend().Stream(), backend().Event()
    other.wait_event(event)
    after.record(other)
    backend().current_stream().wait_event(after)


@pytest.mark.parametrize("mode", LAZY)
@pytest.mark.parametrize("wait", [None, *WAITS, "third"])
def test_copy_to_the_device_is_there_once_waited_for(mode: str, wait: str | None, sim: ModuleType) -> None:
    sim.enable(copies=mode)
    source = pinned(1)
    target, stream, event = sent(source)
    source.fill_(2)  # pinned memory is read when the copy is made
    if wait:
        (third if wait == "third" else WAITS[wait])(stream, event)
    doubled = target * 2
    assert set(doubled.tolist()) == ({4} if wait else {0})
    assert (races(sim) > 0) == (wait is None)
    stream.synchronize()
    assert set(target.tolist()) == {2}


@pytest.mark.parametrize("mode", LAZY)
def test_unpinned_memory_is_read_at_the_call(mode: str, sim: ModuleType) -> None:
    sim.enable(copies=mode, h2d_gbps=1e-6)
    source = torch.ones(1000)
    target, _, event = sent(source)
    source.fill_(2)
    assert event.query() == (mode == "cuda")  # the host has waited
    backend().synchronize()
    assert set(target.tolist()) == {1} and races(sim) == 0


@pytest.mark.parametrize("mode", LAZY)
@pytest.mark.parametrize("kind", ["pinned", "unpinned", "gaps", "type", "to"])
def test_copy_to_ram(mode: str, kind: str, sim: ModuleType) -> None:
    sim.enable(copies=mode, d2h_gbps=1e-6)
    source, side = torch.ones(20, 50, device=SIM), backend().Stream()
    there = pinned(7).view(20, 50)
    targets = {
        "pinned": there, "unpinned": torch.full((20, 50), 7.0), "gaps": torch.full((20, 60), 7.0)[:, :50],
        "type": torch.full((20, 50), 7.0, dtype=torch.float64),
    }  # fmt: skip
    with side:
        target = source.to("cpu", non_blocking=True) if kind == "to" else targets[kind].copy_(source, non_blocking=True)
    early = target.flatten()[0].item()
    side.synchronize()
    late = target.flatten()[0].item()
    if mode == "cuda" and kind not in ("pinned", "to"):
        assert (early, late) == (1, 1)
    elif kind in ("gaps", "type"):  # of a temporary that is gone: never to be had
        assert early != early and late != late
    else:
        assert early != 1 and late == 1


@pytest.mark.parametrize("mode", LAZY)
def test_blocking_copies_wait_for_what_is_before_them(mode: str, sim: ModuleType) -> None:
    sim.enable(copies=mode)
    target, side, first = torch.zeros(1000, device=SIM), backend().Stream(), pinned(1)
    with side:
        target.copy_(first, non_blocking=True)
        first.fill_(3)
        assert set(target.cpu().tolist()) == {3} and target[0].item() == 3
        target.copy_(pinned(4), non_blocking=True)
        target[:500].copy_(torch.full((500,), 5.0))
    assert target.tolist() == [5] * 500 + [4] * 500 and races(sim) == 0


@pytest.mark.parametrize("mode", LAZY)
def test_ram_is_fetched_behind_what_is_being_stored_there(mode: str, sim: ModuleType) -> None:
    """Finding the rows that another copy is still to write."""
    sim.enable(copies=mode)
    ram, source, out, into = pinned(0), torch.ones(1000, device=SIM), backend().Stream(), backend().Stream()
    for waits in (True, False):
        ram.fill_(0)
        with out:
            ram.copy_(source, non_blocking=True)
        if waits:
            into.wait_stream(out)
        with into:
            target = torch.zeros(1000, device=SIM).copy_(ram, non_blocking=True)
        into.synchronize()
        assert set(target.tolist()) == {int(waits)} and (races(sim) > 0) == (not waits)
        backend().synchronize()


def test_unpinned_ram_of_xpu_is_fetched_before_the_stream_has_waited(sim: ModuleType) -> None:
    sim.enable(copies="xpu")
    ram, source, out, into = torch.zeros(1000), torch.ones(1000, device=SIM), backend().Stream(), backend().Stream()
    with out:
        ram.copy_(source, non_blocking=True)
    into.wait_stream(out)
    with into:
        target = torch.empty(1000, device=SIM).copy_(ram, non_blocking=True)
    backend().synchronize()
    assert set(target.tolist()) == {0} and races(sim) == 1


@pytest.mark.parametrize("mode", LAZY)
@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_freed_too_early_is_written_to(mode: str, waits: bool, sim: ModuleType) -> None:
    sim.enable(copies=mode)
    target, stream, event = sent(pinned(1))
    if waits:
        backend().current_stream().wait_event(event)
    del target
    assert sim.stats().allocated_bytes == 0
    other = torch.full((1500,), 5.0, device=SIM)
    stream.synchronize()
    assert other.tolist() == ([5] * 1500 if waits else [1] * 1000 + [5] * 500)
    assert (races(sim) > 0) == (not waits)


@pytest.mark.parametrize("mode", LAZY)
def test_memory_that_is_freed_too_early_is_read_anew(mode: str, sim: ModuleType) -> None:
    sim.enable(copies=mode)
    ram, source, out = pinned(0), torch.ones(1000, device=SIM), backend().Stream()
    with out:
        ram.copy_(source, non_blocking=True)
    del source
    other = torch.full((400,), 5.0, device=SIM)
    out.synchronize()
    assert ram.tolist() == [5] * 400 + [1] * 600 and races(sim) > 0
    del other


@pytest.mark.parametrize("mode", LAZY)
def test_memory_that_a_copy_reads_is_overwritten(mode: str, sim: ModuleType) -> None:
    sim.enable(copies=mode)
    ram, source, out = pinned(0), torch.ones(1000, device=SIM), backend().Stream()
    with out:
        ram.copy_(source, non_blocking=True)
    assert (source + 1)[0].item() == 2 and races(sim) == 0  # to read it too is no race
    source.mul_(3)
    out.synchronize()
    assert set(ram.tolist()) == {3} and races(sim) == 1


@pytest.mark.eager
def test_eager_copies_are_made_at_once(sim: ModuleType) -> None:
    target, _, _ = sent(torch.ones(1000))
    assert lazy.copies.mode == "eager" and not lazy.copies.queued and set(target.tolist()) == {1}
    with pytest.raises(ValueError, match=r"copies must be one of eager, cuda, xpu, not 'rocm'"):
        sim.enable(copies="rocm")


def test_ram_is_pinned_for_the_card_that_takes_it_so(sim: ModuleType) -> None:
    for mode, is_pinned in (("eager", False), ("cuda", True), ("xpu", False)):
        sim.enable(copies=mode)
        flat = hostbuffer.allocate(1000)
        assert (
            hostbuffer.pin(flat, torch.device(SIM))
            == is_pinned
            == flat.is_pinned()
            == flat[10:20].view(5, 2).is_pinned()
        )
        address = flat.data_ptr()
        del flat
        assert not lazy.copies.is_registered(address)
