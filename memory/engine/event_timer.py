"""Times of the parts of one call on the device, measured by events. The host waits for none of them.

`Engine` times each weight group so; `timing.CallTimes` times whole calls.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from .streams import Queues


class EventTimer:
    """Times the parts of a call that begins now. Time between a `stop` and the next `start` is not counted.

    The part None begins at once: it is the time ahead of the first group.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._laps: list[tuple[Hashable, Any, Any]] = []
        self._running: tuple[Hashable, Any] | None = None
        self._traces = _traces()
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
        """End the call. Return False if torch compiled something in it, so that its times are of no use."""
        self.stop()
        self.runs = False
        return self._traces == _traces()

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


def _traces() -> int:
    """Return how many frames torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo else 0
