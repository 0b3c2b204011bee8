"""The coming runs of units, in order, as far as the running graph or the run under way tells."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .planning.eviction import Use
from .weights.unit import ManagedModel

_Refs = list[weakref.ref[ManagedModel]]

_STAGES = 64  # ended stages to remember, from which repeating runs are guessed


class Schedule:
    """The coming runs of units, by weak references. Unknown until set."""

    def __init__(self) -> None:
        self._told: _Refs | None = None
        self._stage: _Refs | None = None
        self._ended: deque[_Refs] = deque(maxlen=_STAGES)  # the units of the last stages, oldest first

    def set(self, units: Sequence[ManagedModel] | None) -> None:
        """Set the units of the coming runs, in order. None means that they are not known any more."""
        self._told = None if units is None else _refs(units)

    @contextmanager
    def of_stage(self, units: Sequence[ManagedModel], then: Sequence[ManagedModel] | None) -> Iterator[None]:
        """Put the units of a stage, and then those of `then`, before the runs that were `set`, until the block ends.

        With `then` None the schedule stays as it is. In either case the stage is remembered as ended.
        """
        before = self._stage
        if then is not None:
            self._stage = _refs([*units, *then])
        try:
            yield
        finally:
            self._stage = before
            self._ended.append(_refs(units))

    def strike(self, unit: ManagedModel) -> None:
        """Take the next run of a unit off the schedule, and the runs before it, which did not happen."""
        coming = self._told or [] if self._stage is None else self._stage
        for index, ref in enumerate(coming):
            if ref() is unit:
                del coming[: index + 1]
                return

    def uses(self, working_bytes: Callable[[ManagedModel], int]) -> list[Use] | None:
        """Return the coming runs of units that still exist, for `planning.eviction`; None if they are not known.

        `working_bytes` returns the bytes that a unit takes beside its weights.
        """
        if self._told is None and self._stage is None:
            return None
        return [Use(unit, unit.size_bytes, working_bytes(unit)) for unit in self.units()]

    def units(self) -> list[ManagedModel]:
        """Return the units of the coming runs that still exist, in order. Empty if the runs are not known."""
        return _there([*(self._stage or []), *(self._told or [])])

    def ended(self) -> list[list[ManagedModel]]:
        """Return the units of each of the last stages that still exist, oldest stage first."""
        return [_there(units) for units in self._ended]


def _refs(units: Sequence[ManagedModel]) -> _Refs:
    return [weakref.ref(unit) for unit in units]


def _there(refs: _Refs) -> list[ManagedModel]:
    return [unit for ref in refs if (unit := ref()) is not None]
