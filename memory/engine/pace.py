"""How long calls take on the device, by events. The host waits for none of them."""

from __future__ import annotations

from typing import Any

import torch

from .streams import Queues


class Pace:
    """Times calls one after the other, and tells of those that are done."""

    def __init__(self, device: torch.device) -> None:
        self._queues = Queues(device)
        self._begun: Any = None
        self._called: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin timing a call when the work that this thread has queued is done."""
        self._begun = self._mark()

    def end(self) -> None:
        """End the call when the work that this thread has queued is done."""
        if self._begun:
            self._called.append((self._begun, self._mark()))
            self._begun = None

    def forget(self) -> None:
        """Tell nothing of the calls until now."""
        self._begun = None
        self._called.clear()

    def seconds(self) -> float | None:
        """Return the seconds of the last call that the device is done with, each once, or None."""
        done = None
        while self._called and self._called[0][1].query():
            begun, ended = self._called.pop(0)
            done = begun.elapsed_time(ended) / 1000
        return done

    def _mark(self) -> Any:
        event = self._queues.timer()
        self._queues.mark(event)
        return event
