"""Times of calls of units that are wholly on the device, measured by events. The host waits for none of them."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

from ..weights.unit import ManagedModel
from .event_timer import EventTimer
from .streams import Queues

About = TypeVar("About")


class CallTimes(Generic[About]):
    """Times one call of each unit, after a first call that warmed it up.

    `About` is the caller's note on the call, which `take` returns with the seconds. `Residency` passes the workload.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm: weakref.WeakSet[ManagedModel] = weakref.WeakSet()
        self._timed: weakref.WeakKeyDictionary[ManagedModel, tuple[About, EventTimer]] = weakref.WeakKeyDictionary()

    def begins(self, unit: ManagedModel, about: About) -> None:
        """Begin to time a call, behind the work that this thread has queued, if the unit is warm and not timed yet."""
        queues = Queues(self._device)
        if unit in self._warm and unit not in self._timed and queues.copying:
            self._timed[unit] = about, EventTimer(queues)

    def ended(self, unit: ManagedModel, failed: bool) -> None:
        """End the call. Its time is discarded if it `failed` or compiled something."""
        if unit in self._timed and self._timed[unit][1].runs and (not self._timed[unit][1].end() or failed):
            del self._timed[unit]
        (self._warm.discard if failed else self._warm.add)(unit)

    def forget(self, unit: ManagedModel) -> None:
        """Forget a unit that leaves the device, or is no longer whole there."""
        self._warm.discard(unit)
        self._timed.pop(unit, None)

    def take(self, unit: ManagedModel) -> tuple[About, float] | None:
        """Return the note on the timed call and its seconds, once.

        None if no call was timed, or the device has not finished it.
        """
        if unit not in self._timed or self._timed[unit][1].runs:
            return None
        about, watch = self._timed[unit]
        try:
            found = watch.seconds()
        except RuntimeError:  # some builds of torch have such events without the time
            found = {}
        if found is None:
            return None
        del self._timed[unit]
        return (about, sum(found.values())) if found else None
