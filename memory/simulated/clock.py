"""The virtual clock of the simulated accelerator: streams, events, and how many operations a kernel does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from . import card as state
from .lazy import Queued, copies, joined


class Stream:
    """A queue of device work; the counterpart of `torch.cuda.Stream`. Also a context manager."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.ready = state.card.host
        self.tail: tuple[Queued, ...] = ()  # queued copies that later work of this stream is ordered behind
        state.card.timed = True  # from now on work can overlap, so reads and writes are followed

    @property
    def device(self) -> torch.device:
        """The only device."""
        return torch.device("sim", 0)

    @property
    def stream_id(self) -> int:
        """A unique number."""
        return id(self)

    def wait_event(self, event: Event) -> None:
        """Make work queued from now on start after the event."""
        self.ready = max(self.ready, event.time or 0.0)
        copies.join(self, event.tail)

    def wait_stream(self, stream: Stream) -> None:
        """Make work queued from now on start after all work queued on the other stream so far."""
        self.ready = max(self.ready, stream.ready)
        copies.join(self, stream.tail)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that happens when all work queued so far is done."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all queued work is done at the host's present time."""
        done = self.ready <= state.card.host
        if done:
            copies.force(self.tail)
        return done

    def synchronize(self) -> None:
        """Wait on the host for all queued work."""
        state.card.wait_until(self.ready)
        copies.force(self.tail)

    def __enter__(self) -> Stream:
        vars(_local).setdefault("outer", []).append(current_stream())
        _local.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _local.stream = _local.outer.pop()


class Event:
    """A moment in a stream; the counterpart of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.time: float | None = None
        self.tail: tuple[Queued, ...] = ()

    def record(self, stream: Stream | None = None) -> None:
        """Set the moment to when the stream's work queued so far is done."""
        stream = stream or current_stream()
        self.time = max(stream.ready, state.card.host)
        self.tail = joined(stream.tail, ())

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether it has happened at the host's present time. True if never recorded."""
        done = self.time is None or self.time <= state.card.host
        if done:
            copies.force(self.tail)
        return done

    def synchronize(self) -> None:
        """Wait on the host for the event."""
        if self.time is not None:
            state.card.wait_until(self.time)
            copies.force(self.tail)

    def wait_aside(self) -> None:
        """Wait as `synchronize` does, in a thread beside the computing one, whose clock does not move.

        There is one host clock, and it is the computing thread's. Copies that the waiting thread queues later come
        after the event anyway if it was recorded on their stream.
        """
        copies.force(self.tail)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds of the virtual clock to `end`. Raises RuntimeError if either was not recorded."""
        if self.time is None or end.time is None:
            raise RuntimeError("both events must be recorded before their elapsed time is asked for")
        return (end.time - self.time) * 1000.0


_local = threading.local()
default_stream = Stream()
state.card.timed = False  # until there is a second stream


def current_stream() -> Stream:
    """Return the stream that this thread queues work on."""
    return getattr(_local, "stream", default_stream)


def set_stream(stream: Stream | None) -> None:
    """Set the stream on which this thread queues work; None means the default stream."""
    _local.stream = stream or default_stream


def read_from_disk(nbytes: int, after: Event | None = None) -> Event | None:
    """Return the event that `nbytes` of a file have come to RAM, by a read that begins after the event `after`.

    Reads are made one after another. Returns None if the disk takes no time.
    """
    ends = state.card.read(nbytes, (after and after.time) or 0.0)
    if ends is None:
        return None
    event = Event()
    event.time = ends
    return event


def _attention(args: tuple, out: Any) -> int:
    query, key, value = args[:3]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _convolution(args: tuple, out: Any) -> int:
    transposed = len(args) > 6 and args[6] is True
    return 2 * (args[0] if transposed else out).numel() * math.prod(args[1].shape[1:])


def _product(args: tuple, out: Any) -> int:
    return 2 * out.numel() * args[0].shape[-1]


def _sum_and_product(args: tuple, out: Any) -> int:
    return 2 * out.numel() * args[1].shape[-1]


ATTENTION = "aten::scaled_dot_product_attention"

# For each operator that takes time: the operations of a call, from its arguments and result.
OPERATIONS: dict[str, Callable[[tuple, Any], int]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::linear": _product,
    "aten::matmul": _product,
    "aten::addmm": _sum_and_product,
    "aten::baddbmm": _sum_and_product,
    "aten::convolution": _convolution,
    "aten::conv1d": _convolution,
    "aten::conv2d": _convolution,
    "aten::conv3d": _convolution,
    ATTENTION: _attention,
}
