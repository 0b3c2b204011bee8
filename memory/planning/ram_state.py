"""The groups of each unit that RAM holds, now or later in a planned run. Frozen data, from one time to the next."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..weights.unit import ManagedModel
from .eviction import Use, choose_shrinks, free_for
from .fit import sizes_of
from .runplan import StagePlan


@dataclass(frozen=True)
class RamState:
    """The bytes that RAM holds of each unit, out of `ram_bytes`, least recently used first.

    `parts` names the groups of units that RAM does not hold whole. Units in `staying` keep their copies. Units in
    `cached`, which nobody refers to, are the first to drop theirs. For `told` and `ended` see `eviction.runs_sooner`.
    """

    ram_bytes: int = sys.maxsize
    held: Mapping[ManagedModel, int] = field(default_factory=dict)
    parts: Mapping[ManagedModel, frozenset[int]] = field(default_factory=dict)
    staying: frozenset[ManagedModel] = frozenset()
    cached: frozenset[ManagedModel] = frozenset()
    told: tuple[ManagedModel, ...] = ()
    ended: tuple[Collection[ManagedModel], ...] = ()

    def there(self, unit: ManagedModel) -> frozenset[int] | None:
        """Return the groups of a unit that are in RAM, None for all weights."""
        return None if self.held.get(unit) and unit not in self.parts else self.parts.get(unit, frozenset())

    def free_for(self, unit: ManagedModel) -> int:
        """Return the RAM that a unit may take without taking any from a unit that runs before it does again."""
        held = {other: nbytes for other, nbytes in self.held.items() if other not in self.cached}
        return free_for(unit, self.ram_bytes, held, self.staying, self.told, self.ended)

    def after(self, unit: ManagedModel, kept: frozenset[int] | None, windows_bytes: int) -> RamState:
        """Return the state once a unit has run with the groups `kept` in RAM beside its windows.

        None stands for all weights.
        """
        nbytes = sizes_of(unit).total_bytes if kept is None else sizes_of(unit).ram_bytes(kept)
        held = {other: size for other, size in self.held.items() if other is not unit}
        parts = {other: groups for other, groups in self.parts.items() if other is not unit}
        going = {other: size for other, size in held.items() if other not in self.staying}
        room = self.ram_bytes - sum(held.values()) + sum(going.values())
        future = [Use(other, other.size_bytes) for other in self.told] or None
        use = Use(unit, nbytes, 0 if kept is None else windows_bytes)
        for other, missing in choose_shrinks(going, room, use, future, self.cached).items():
            parts[other] = self._left(other, held[other] - missing)
            held[other] = sizes_of(other).ram_bytes(parts[other])
        held[unit] = nbytes
        return replace(self, held=held, parts=parts if kept is None else parts | {unit: kept})

    def after_stage(self, plan: StagePlan, units: Iterable[ManagedModel]) -> RamState:
        """Return the state once a stage has run as planned. `units` are those of the stage."""
        named, state = {unit.name: unit for unit in units}, self
        for each in plan.units:
            state = state.after(named[each.unit], each.kept, each.windows_bytes)
        return replace(state, ended=(*state.ended, tuple(named.values())))

    def _left(self, unit: ManagedModel, nbytes: int) -> frozenset[int]:
        """Return the groups of a unit that are left in `nbytes`, as `ManagedModel.drop` leaves them."""
        sizes, there, kept = sizes_of(unit), self.there(unit), []
        for i in range(len(sizes.groups) + len(sizes.idle)) if there is None else sorted(there):
            if (nbytes := nbytes - sizes.ram_bytes([i])) < 0:
                break
            kept.append(i)
        return frozenset(kept)


def ram_of(units: Iterable[ManagedModel]) -> RamState:
    """Return the state of RAM for these units now, as if there were no others and no limit."""
    held = {unit: unit.host_bytes for unit in units if unit.host_bytes}
    return RamState(held=held, parts={unit: unit.held for unit in held if not unit.in_ram})
