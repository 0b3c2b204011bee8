"""Times of whole calls on the device, measured by events. The host waits for none of them.

`stage` compares them with the plan where a driver pages device memory silently (Windows).
"""

from __future__ import annotations

from typing import Any

import torch

from .streams import Queues


class Pace:
    """Times calls one after the other, and returns the seconds of those that the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._queues = Queues(device)
        self._begun: Any = None
        self._called: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin to time a call, behind the work that this thread has queued."""
        self._begun = self._mark()

    def end(self) -> None:
        """End the call, behind the work that this thread has queued. Does nothing if none was begun."""
        if self._begun:
            self._called.append((self._begun, self._mark()))
            self._begun = None

    def forget(self) -> None:
        """Discard the calls so far."""
        self._begun = None
        self._called.clear()

    def seconds(self) -> float | None:
        """Return the seconds of the latest call that the device has finished, or None. Earlier ones are discarded."""
        done = None
        while self._called and self._called[0][1].query():
            begun, ended = self._called.pop(0)
            done = begun.elapsed_time(ended) / 1000
        return done

    def _mark(self) -> Any:
        event = self._queues.timer()
        self._queues.mark(event)
        return event
