"""The units of one manager: one for each model, whoever runs it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable

from .weights.unit import ManagedModel

_numbers = itertools.count()
_registries: weakref.WeakValueDictionary[int, Registry] = weakref.WeakValueDictionary()  # of all managers, in order


class Registry:
    """The units that there are. Those with a key are held here, the others belong to their makers.

    Without a lock: the manager holds its own around all of this.
    """

    def __init__(self) -> None:
        _registries[next(_numbers)] = self
        self._shared: dict[Hashable, ManagedModel] = {}
        self._adopted: weakref.WeakSet[ManagedModel] = weakref.WeakSet()

    def units(self) -> list[ManagedModel]:
        """All of them."""
        return list(dict.fromkeys([*self._shared.values(), *self._adopted]))

    @staticmethod
    def everyone() -> list[ManagedModel]:
        """Return the units of all managers, which share the RAM."""
        return [unit for registry in list(_registries.values()) for unit in registry.units()]

    def find(self, key: Hashable) -> ManagedModel | None:
        """Return the unit of a key, if there is one."""
        return self._shared.get(key)

    def add(self, unit: ManagedModel) -> None:
        """Enter a unit: by its key, if it has one that is not taken, until it is forgotten."""
        if unit.key is None or self._shared.setdefault(unit.key, unit) is not unit:
            self._adopted.add(unit)

    def remove(self, unit: ManagedModel) -> None:
        """Strike out a unit that is not on the device."""
        if self._shared.get(unit.key) is unit:
            del self._shared[unit.key]
        self._adopted.discard(unit)

    def cached(self) -> list[ManagedModel]:
        """Return the units that nobody refers to any more."""
        return [unit for unit in list(self._shared.values()) if unit.is_cached]

    def forget(self) -> None:
        """Strike out the cached units that hold nothing."""
        for unit in self.cached():
            if not (unit.placement or unit.host_bytes):
                self.remove(unit)
