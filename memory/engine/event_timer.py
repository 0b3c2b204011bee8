"""How long the groups of a call compute, by events on the device. The host waits for none of them."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from .streams import Queues


class EventTimer:
    """Times parts of one call, which begins now. What lies between a `stop` and the next `start` is not counted."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._laps: list[tuple[Hashable, Any, Any]] = []
        self._running: tuple[Hashable, Any] | None = None
        self._traces = _traces()
        self.runs = True  # the call does
        self.start(None)

    def start(self, part: Hashable) -> None:
        """Begin a part when the work that this thread has queued is done, copies that it waits for included."""
        if self.runs:
            self._running = part, self._mark()

    def stop(self) -> None:
        """End the running part when the work that this thread has queued is done."""
        if self._running:
            part, begun = self._running
            self._laps.append((part, begun, self._mark()))
            self._running = None

    def end(self) -> bool:
        """End the call. Return False if it compiled something, so that its times tell nothing."""
        self.stop()
        self.runs = False
        return self._traces == _traces()

    def seconds(self) -> dict[Hashable, float] | None:
        """Return the seconds of each part, before the first under None. None while the device has not done all."""
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


def _traces() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo else 0
