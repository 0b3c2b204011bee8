"""Which units will run, in order, as far as the running graph tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from .planning.eviction import Use
from .units.unit import ManagedModel


class Schedule:
    """The coming runs of units, which it refers to weakly. Not known until it is set."""

    def __init__(self) -> None:
        self._coming: list[weakref.ref[ManagedModel]] | None = None

    def set(self, units: Sequence[ManagedModel] | None) -> None:
        """What is coming, or None when that is not known any more."""
        self._coming = None if units is None else [weakref.ref(unit) for unit in units]

    def strike(self, unit: ManagedModel) -> None:
        """Take the next run of a unit off, and those before it, which did not come."""
        coming = self._coming or []
        for index, ref in enumerate(coming):
            if ref() is unit:
                del coming[: index + 1]
                return

    def uses(self, working_bytes: Callable[[ManagedModel], int]) -> list[Use] | None:
        """What is coming and still there, as the policy looks at it; None when it is not known.

        `working_bytes` tells what a unit takes beside its weights.
        """
        if self._coming is None:
            return None
        return [Use(unit, unit.size_bytes, working_bytes(unit)) for unit in self.units()]

    def units(self) -> list[ManagedModel]:
        """What is coming and still there, in order; nothing where that is not known."""
        return [unit for ref in self._coming or [] if (unit := ref()) is not None]
