"""How long calls of units take that are wholly on the device, by events. The host waits for none of them."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

from ..weights.unit import ManagedModel
from .event_timer import EventTimer
from .streams import Queues

About = TypeVar("About")


class CallTimes(Generic[About]):
    """Times one call of a unit, after one that warmed up since the unit came."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm: weakref.WeakSet[ManagedModel] = weakref.WeakSet()
        self._timed: weakref.WeakKeyDictionary[ManagedModel, tuple[About, EventTimer]] = weakref.WeakKeyDictionary()

    def begins(self, unit: ManagedModel, about: About) -> None:
        """Begin timing a call when the work that this thread has queued is done."""
        queues = Queues(self._device)
        if unit in self._warm and unit not in self._timed and queues.copying:
            self._timed[unit] = about, EventTimer(queues)

    def ended(self, unit: ManagedModel, failed: bool) -> None:
        """End the call. One that `failed`, or compiled something, is not timed."""
        if unit in self._timed and self._timed[unit][1].runs and (not self._timed[unit][1].end() or failed):
            del self._timed[unit]
        (self._warm.discard if failed else self._warm.add)(unit)

    def forget(self, unit: ManagedModel) -> None:
        """Forget the unit, which leaves or is no longer whole."""
        self._warm.discard(unit)
        self._timed.pop(unit, None)

    def take(self, unit: ManagedModel) -> tuple[About, float] | None:
        """Return what the call was about and its seconds, once.

        None if none was timed, or the device is not done with it.
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
