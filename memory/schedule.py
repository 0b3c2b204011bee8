"""Which units will run, in order, as far as the running graph or the run under way tells."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .planning.eviction import Use
from .weights.unit import ManagedModel

_Refs = list[weakref.ref[ManagedModel]]

_STAGES = 64  # that are remembered, to guess what comes again


class Schedule:
    """The coming runs of units, which it refers to weakly. Not known until it is set."""

    def __init__(self) -> None:
        self._told: _Refs | None = None
        self._stage: _Refs | None = None
        self._ended: deque[_Refs] = deque(maxlen=_STAGES)  # the units of the last stages

    def set(self, units: Sequence[ManagedModel] | None) -> None:
        """Set the units that are coming, or None when that is not known any more."""
        self._told = None if units is None else _refs(units)

    @contextmanager
    def of_stage(self, units: Sequence[ManagedModel], then: Sequence[ManagedModel] | None) -> Iterator[None]:
        """Until the block ends these units come first, `then` those, and then what was `set`, which stays as it is.

        Where `then` is None all stays as it was.
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
        """Take the next run of a unit off, and those before it, which did not come."""
        coming = self._told or [] if self._stage is None else self._stage
        for index, ref in enumerate(coming):
            if ref() is unit:
                del coming[: index + 1]
                return

    def uses(self, working_bytes: Callable[[ManagedModel], int]) -> list[Use] | None:
        """Return what is coming and still there, as the policy looks at it; None when it is not known.

        `working_bytes` tells what a unit takes beside its weights.
        """
        if self._told is None and self._stage is None:
            return None
        return [Use(unit, unit.size_bytes, working_bytes(unit)) for unit in self.units()]

    def units(self) -> list[ManagedModel]:
        """Return what is coming and still there, in order; nothing where that is not known."""
        return _there([*(self._stage or []), *(self._told or [])])

    def ended(self) -> list[list[ManagedModel]]:
        """Return the units of the last stages that are still there, in order."""
        return [_there(units) for units in self._ended]


def _refs(units: Sequence[ManagedModel]) -> _Refs:
    return [weakref.ref(unit) for unit in units]


def _there(refs: _Refs) -> list[ManagedModel]:
    return [unit for ref in refs if (unit := ref()) is not None]
