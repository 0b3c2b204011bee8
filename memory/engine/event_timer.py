"""Seconds on the device, by events: of the parts of one call, and of whole calls. The host waits for none of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from ..codecs import fused
from .streams import Queues


class EventTimer:
    """Times the parts of a call that begins now. Time between a `stop` and the next `start` is not counted.

    The part None begins at once: it is the time ahead of the first group.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._laps: list[tuple[Hashable, Any, Any]] = []
        self._running: tuple[Hashable, Any] | None = None
        self._built = _built()
        self.runs = True  # until `end`
        self.start(None)

    def start(self, part: Hashable) -> None:
        """Begin a part, behind the work that this thread has queued and the copies that this work waits for."""
        if self.runs:
            self._running = part, self._mark()

    def stop(self) -> None:
        """End the running part, behind the work that this thread has queued."""
        if self._running:
            part, begun = self._running
            self._laps.append((part, begun, self._mark()))
            self._running = None

    def end(self) -> bool:
        """End the call. Return False if something was compiled in it, so that its times are of no use."""
        self.stop()
        self.runs = False
        return self._built == _built()

    def seconds(self) -> dict[Hashable, float] | None:
        """Return the seconds of each part; the part None is the time ahead of the first group.

        None while the call or the device has not finished.
        """
        if self.runs or not self._laps[-1][2].query():
            return None
        found: dict[Hashable, float] = {}
        for part, begun, ended in self._laps:
            found[part] = found.get(part, 0.0) + begun.elapsed_time(ended) / 1000
        return found

    def _mark(self) -> Any:
        event = self._queues.timer()
        self._queues.mark(event)
        return event


class Pace:
    """Times calls one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._queues = Queues(device)
        self._running: EventTimer | None = None
        self._ended: deque[EventTimer] = deque()

    def begin(self) -> None:
        """Begin timing a call when the work that this thread has queued is done."""
        self._running = EventTimer(self._queues)

    def end(self) -> None:
        """End the call when the work that this thread has queued is done."""
        if self._running:
            self._running.end()
            self._ended.append(self._running)
            self._running = None

    def forget(self) -> None:
        """Forget the calls until now."""
        self._running = None
        self._ended.clear()

    def seconds(self) -> float | None:
        """Return the seconds of the last call that the device is done with, once, or None."""
        done = None
        while self._ended and (found := self._ended[0].seconds()) is not None:
            self._ended.popleft()
            done = sum(found.values())
        return done


def _built() -> int:
    """Return how many frames torch has compiled in this process, and how many kinds of fused kernels were built."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return fused.built() + (dynamo.counters["frames"]["total"] if dynamo else 0)
