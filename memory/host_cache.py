"""Host copies: the weights that lie in RAM, of all managers, and which of them go when RAM is short."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .budget import Budget, spare_ram_bytes
from .planning.eviction import Use, choose_shrinks
from .planning.ram_state import RamState
from .registry import Registry
from .reports.timeline import Timeline
from .schedule import Schedule
from .vocabulary import Role
from .weights.unit import ManagedModel


class HostCache:
    """The copies in RAM, within the RAM budget of one manager. Dropping a copy costs reading it again.

    `everyone` are the units of all managers, which share the RAM; `schedule` says what will run, `coming` as the
    policy looks at it.
    """

    def __init__(
        self,
        registry: Registry,
        everyone: Callable[[], list[ManagedModel]],
        budget: Budget,
        timeline: Timeline,
        schedule: Schedule,
        coming: Callable[[], list[Use] | None],
    ) -> None:
        self._registry, self._everyone, self._budget = registry, everyone, budget
        self._timeline, self._schedule, self._coming = timeline, schedule, coming

    def keep_budget(self, wanted: ManagedModel | None = None, wanted_bytes: int = 0) -> None:
        """Drop copies until those left, and `wanted_bytes` more, keep the RAM budget."""
        droppable = self._droppable()
        room = self._budget.ram_bytes - self.fixed_bytes()
        self._drop(droppable, room, Use(None if wanted in droppable else wanted, wanted_bytes))

    def drop_cached(self, roles: Collection[Role]) -> None:
        """Drop the copies that nobody refers to."""
        for unit in [u for u in self._droppable() if u.is_cached and u.role in roles]:
            self._timeline.record("drop", unit, unit.drop())
        self._registry.forget()

    def room_bytes(self) -> int:
        """RAM that could be had beside weights, if all copies that may be dropped were."""
        return spare_ram_bytes() + sum(self._droppable().values())

    def make_room(self, wanted_bytes: int) -> int:
        """Drop copies until so much RAM is free, as far as it goes. Returns what is free then."""
        room = self.room_bytes()
        self._drop(self._droppable(), room, Use(None, min(wanted_bytes, room)))
        return spare_ram_bytes()

    def left_for(self, unit: ManagedModel) -> int:
        """RAM that a unit's weights may take once every other copy that may go is gone; a negative number if none."""
        staying = [u for u in self._everyone() if u is not unit and (u.leases or u.pinned or not u.reloadable)]
        return self._budget.ram_bytes - sum(u.host_bytes for u in staying)

    def spare_bytes(self) -> int:
        """RAM of the budget that no copy takes."""
        return self._budget.ram_bytes - sum(unit.host_bytes for unit in self._everyone())

    def state(self, ram_bytes: int | None = None) -> RamState:
        """Return what RAM holds now, in a RAM budget, by default the present one."""
        units = sorted(self._everyone(), key=lambda unit: unit.last_use)
        return RamState(
            self._budget.ram_bytes if ram_bytes is None else ram_bytes,
            {unit: unit.host_bytes for unit in units if unit.host_bytes},
            {unit: unit.held for unit in units if unit.host_bytes and not unit.in_ram},
            frozenset(unit for unit in units if not self._may_go(unit)),
            frozenset(unit for unit in units if unit.is_cached),
            tuple(self._schedule.units()),
            tuple(self._schedule.ended()),
        )

    def fixed_bytes(self) -> int:
        """Bytes of the copies that may not be dropped now."""
        droppable = self._droppable()
        return sum(unit.host_bytes for unit in self._everyone() if unit not in droppable)

    def _may_go(self, unit: ManagedModel) -> bool:
        return unit.reloadable and not unit.leases and not unit.placement

    def _droppable(self) -> dict[ManagedModel, int]:
        """Return the copies that can be read again, least recently used first."""
        holding = sorted((u for u in self._everyone() if u.host_bytes), key=lambda unit: unit.last_use)
        return {u: u.host_bytes for u in holding if self._may_go(u)}

    def _drop(self, droppable: dict[ManagedModel, int], capacity_bytes: int, wanted: Use) -> None:
        cached = {unit for unit in droppable if unit.is_cached}
        for unit, nbytes in choose_shrinks(droppable, capacity_bytes, wanted, self._coming(), cached).items():
            self._timeline.record("drop", unit, unit.drop(nbytes))
