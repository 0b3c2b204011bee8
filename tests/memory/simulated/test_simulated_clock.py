"""The simulated accelerator's virtual clock: copies, kernels, streams, events, and races between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ballast.memory import simulated

if simulated.supported():
    pytest.skip(simulated.supported() or "", allow_module_level=True)

COPY = 1.0  # seconds of one block's copy: 1e6 bytes at 1e6 bytes per second
BLOCKS = 8


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """1 MB/s each way, 1e6 operations per second."""
    simulated.enable("64MB", h2d_gbps=1e-3, d2h_gbps=1e-3, tflops=1e-6)
    yield
    torch.sim.synchronize()
    simulated.enable("64MB")


def now() -> float:
    return simulated.stats().clock_seconds


def pinned() -> torch.Tensor:
    """RAM of one copy that the host need not wait for, whatever device the card copies like."""
    return torch.zeros(250_000).pin_memory()


def compute(weight: torch.Tensor, seconds: float) -> None:
    """A kernel that reads the weight and takes so long (multiples of 1 ms)."""
    rows = int(seconds * 1e6 / 1000)
    torch.mm(torch.zeros(rows, 500, device="sim"), weight[:500].view(500, 1))


def test_a_blocking_copy_takes_bytes_over_bandwidth() -> None:
    x = torch.zeros(250_000).to("sim")
    assert now() == pytest.approx(COPY)
    x.cpu()
    assert now() == pytest.approx(2 * COPY)
    stats = simulated.stats()
    assert stats.h2d_seconds == pytest.approx(COPY) and stats.d2h_seconds == pytest.approx(COPY)
    simulated.reset_stats()
    assert now() == 0


def test_kernels_take_operations_over_rate() -> None:
    a, b = torch.zeros(100, 50, device="sim"), torch.zeros(50, 20, device="sim")
    with torch.inference_mode():
        for product in (lambda: a @ b, lambda: torch.nn.functional.linear(a, b.t())):
            simulated.reset_stats()
            product()
            assert simulated.stats().compute_seconds == pytest.approx(0.2)
        image, kernel = torch.zeros(1, 3, 8, 8, device="sim"), torch.zeros(5, 3, 3, 3, device="sim")
        for transposed in (False, True):
            simulated.reset_stats()
            if transposed:
                torch.nn.functional.conv_transpose2d(image, kernel.transpose(0, 1))
            else:
                torch.nn.functional.conv2d(image, kernel, padding=1)
            assert simulated.stats().compute_seconds == pytest.approx(2 * 64 * 5 * 27 / 1e6)
        query = torch.zeros(2, 3, 10, 4, device="sim")
        simulated.reset_stats()
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert simulated.stats().compute_seconds == pytest.approx(4 * 6 * 10 * 10 * 4 / 1e6)
        assert simulated.stats().attention_seconds == simulated.stats().compute_seconds
        simulated.reset_stats()
        a + 1
        a.view(-1)
        assert now() == 0


def test_attention_may_have_a_rate_of_its_own() -> None:
    simulated.enable("64MB", tflops=1e-6, attention_tflops=0.5e-6)
    query = torch.zeros(2, 3, 10, 4, device="sim")
    with torch.inference_mode():
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        seconds = 4 * 6 * 10 * 10 * 4 / 0.5e6
        assert simulated.stats().compute_seconds == simulated.stats().attention_seconds == pytest.approx(seconds)
        query @ query.transpose(-1, -2)
        assert simulated.stats().compute_seconds == pytest.approx(seconds + 2 * 6 * 10 * 10 * 4 / 1e6)
        assert simulated.stats().attention_seconds == pytest.approx(seconds)
    for wrong in ({"attention_tflops": 1.0}, {"tflops": 1.0, "attention_tflops": 0.0}):
        with pytest.raises(ValueError, match="attention_tflops"):
            simulated.enable("64MB", **wrong)


def test_events_and_waiting() -> None:
    weight, slot = pinned(), torch.zeros(250_000, device="sim")
    side, start, done = torch.sim.Stream(), torch.sim.Event(enable_timing=True), torch.sim.Event()
    with torch.sim.stream(side):
        assert torch.sim.current_stream() is side
        start.record()
        slot.copy_(weight, non_blocking=True)
        done.record(side)
    assert torch.sim.current_stream() is torch.sim.default_stream()
    assert start.query() and not done.query() and not side.query()
    assert start.elapsed_time(done) == pytest.approx(1000 * COPY)
    done.wait()
    assert not done.query(), "the stream waits, the host does not"
    done.synchronize()
    assert done.query() and side.query()
    side.wait_stream(torch.sim.default_stream())
    second = side.record_event()
    second.synchronize()
    side.synchronize()
    assert now() == pytest.approx(COPY)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(torch.sim.Event())


def test_one_engine_for_each_direction() -> None:
    weight, slots = pinned(), [torch.zeros(250_000, device="sim") for _ in range(3)]
    streams = [torch.sim.Stream() for _ in range(3)]
    for stream, slot in zip(streams[:2], slots, strict=False):
        with stream:
            slot.copy_(weight, non_blocking=True)
    with streams[2]:
        pinned().copy_(slots[2], non_blocking=True)
    torch.sim.synchronize()
    assert now() == pytest.approx(2 * COPY), "two h2d copies queue, d2h runs beside them"


def stream_blocks(seconds: float, overlap: bool, gated: bool = True) -> float:
    """Run BLOCKS blocks through two slots, a block's compute taking `seconds`; how long it took."""
    weight = pinned()
    slots = [torch.zeros(250_000, device="sim") for _ in range(2)]
    copier = torch.sim.Stream()
    free: list[torch.sim.Event | None] = [None, None]
    simulated.reset_stats()
    for index in range(BLOCKS):
        slot = slots[index % 2]
        if not overlap:
            slot.copy_(weight)
            compute(slot, seconds)
            torch.sim.synchronize()
            continue
        with torch.sim.stream(copier):
            released = free[index % 2]
            if released is not None:
                copier.wait_event(released)
            slot.copy_(weight, non_blocking=True)
            copied = copier.record_event()
        if gated:
            torch.sim.current_stream().wait_event(copied)
        compute(slot, seconds)
        free[index % 2] = torch.sim.current_stream().record_event()
    torch.sim.synchronize()
    return now()


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0])
def test_double_buffering_reaches_the_bound(seconds: float) -> None:
    overlapped = stream_blocks(seconds, overlap=True)
    assert simulated.stats().hazards == 0
    # the first copy has nothing to hide behind, nor, where copies rule, has the last kernel
    assert overlapped == pytest.approx(BLOCKS * max(COPY, seconds) + min(COPY, seconds))
    assert stream_blocks(seconds, overlap=False) == pytest.approx(BLOCKS * (COPY + seconds))


def test_a_missing_wait_is_seen() -> None:
    stream_blocks(0.5, overlap=True, gated=False)
    assert simulated.stats().hazards > 0


def test_overwriting_a_slot_in_use_is_seen() -> None:
    weight, slot = pinned(), torch.zeros(250_000, device="sim")
    compute(slot, 1.0)
    with torch.sim.Stream():
        slot.copy_(weight, non_blocking=True)
    assert simulated.stats().hazards == 1
    torch.sim.synchronize()
    slot.copy_(weight, non_blocking=True)
    assert simulated.stats().hazards == 1


def test_reading_a_value_waits_for_it() -> None:
    x = torch.zeros(1000, 500, device="sim")
    total = torch.mm(x, torch.zeros(500, 1, device="sim")).sum()
    done = torch.sim.current_stream().record_event()
    assert not done.query()
    assert total.item() == 0
    assert done.query()


@pytest.mark.parametrize("waits", ["not", "for the work", "on its stream", "on the host"])
def test_bytes_that_were_freed_may_be_given_away_at_once(waits: str) -> None:
    """A new storage may have the bytes of one that queued work still reads."""
    weight, old = pinned(), torch.zeros(250_000, device="sim")
    compute(old, 1.0)
    del old
    new, side, done = torch.empty(250_000, device="sim"), torch.sim.Stream(), torch.sim.Event()
    done.record()
    if waits == "for the work":
        side.wait_event(done)
    elif waits == "on the host":
        done.synchronize()
    with torch.sim.default_stream() if waits == "on its stream" else side:
        new.copy_(weight, non_blocking=True)
    assert simulated.stats().hazards == (waits == "not")


def test_a_copy_to_bytes_that_are_freed_may_come_upon_others() -> None:
    old = torch.empty(250_000, device="sim")
    with torch.sim.Stream():
        old.copy_(pinned(), non_blocking=True)
    del old
    new = torch.empty(250_000, device="sim")
    new.zero_()
    found = simulated.stats().hazards
    assert found
    torch.sim.synchronize()
    new.zero_()
    assert simulated.stats().hazards == found
