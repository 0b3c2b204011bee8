"""The weights of units in RAM: how they come there, before a run and while it runs, and which go when RAM is short.

All managers share the RAM, each within its own budget. Dropping a copy costs reading it again. Without a lock: the
manager holds its own around all of this.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from .accelerator import Accelerator
from .budget import Budget, spare_ram_bytes
from .engine.pending_reads import DiskTimes, PendingReads, Progress
from .errors import DoesNotFitError, is_out_of_ram, release_frames
from .host import management as host
from .planning.eviction import Use, choose_shrinks
from .planning.fit import ram_left, sizes_of, why_no_ram
from .planning.planner import least_ram_on_cpu, window_bytes
from .planning.ram_state import RamState
from .registry import Registry
from .reports.timeline import Progress as Doing
from .reports.timeline import Timeline
from .schedule import Schedule
from .vocabulary import Role
from .weights.reader import Look
from .weights.unit import ManagedModel
from .workload import WorkloadStats

log = logging.getLogger("ballast")


class InRam(Enum):
    """How the weights of a unit are to lie in RAM while it is in place."""

    AS_THEY_ARE = "as they are"
    WHOLE = "all of them"
    GROUPS = "some weight groups, while the others come from disk"


@dataclass
class _Loading:
    """What is known of the reading of one unit."""

    room_bytes: int | None = None  # the RAM that there was for its groups, where not all had room
    coming_bytes: int = 0  # of files, that are being read while something runs
    times: DiskTimes | None = None  # on the clock of a simulated disk
    progress: Progress | None = None


class HostCache:
    """The weights in RAM, within the RAM budget of one manager."""

    def __init__(
        self,
        accelerator: Accelerator,
        registry: Registry,
        budget: Budget,
        timeline: Timeline,
        schedule: Schedule,
        workloads: WorkloadStats,
    ) -> None:
        self.disk_bytes = 0  # read so far
        self._accelerator, self._registry, self._budget = accelerator, registry, budget
        self._timeline, self._schedule, self._workloads = timeline, schedule, workloads
        self._loadings: weakref.WeakKeyDictionary[ManagedModel, _Loading] = weakref.WeakKeyDictionary()

    # What goes

    def keep_budget(self, wanted: ManagedModel | None = None, wanted_bytes: int = 0) -> None:
        """Drop copies until those left, and `wanted_bytes` more, keep the RAM budget."""
        droppable = self._droppable()
        room = self._budget.ram_bytes - self._fixed_bytes()
        self._drop(droppable, room, Use(None if wanted in droppable else wanted, wanted_bytes))

    def drop_cached(self, roles: Collection[Role]) -> None:
        """Drop the copies that nobody refers to."""
        for unit in [u for u in self._droppable() if u.is_cached and u.role in roles]:
            self._timeline.record("drop", unit, unit.drop())
        self._registry.forget()

    def keep_groups(self, unit: ManagedModel, groups: Collection[int]) -> None:
        """Drop all of a unit but these groups."""
        if dropped := unit.keep(groups):
            self._timeline.record("drop", unit, dropped)

    def make_room(self, wanted_bytes: int) -> int:
        """Drop copies until `wanted_bytes` of RAM are free, as far as it goes. Return what is free then."""
        room = self.room_bytes()
        self._drop(self._droppable(), room, Use(None, min(wanted_bytes, room)))
        return spare_ram_bytes()

    # What there is

    def room_bytes(self) -> int:
        """RAM that could be had beside weights, if all copies that may be dropped were."""
        return spare_ram_bytes() + sum(self._droppable().values())

    def left_for(self, unit: ManagedModel, kind: str = "") -> int:
        """RAM that a unit's weights may take in a placement, once every other copy that may go is gone.

        A negative number if there is none.
        """
        staying = [u for u in self._registry.everyone() if u is not unit and (u.leases or u.pinned or not u.reloadable)]
        room = self._budget.ram_bytes - sum(u.host_bytes for u in staying)
        return room if kind == "cpu" else ram_left(unit, room, self._accelerator.is_unified)

    def missing_bytes(self, coming_bytes: int) -> int:
        """Return what is missing of RAM for `coming_bytes` more, when all copies that may go now are gone."""
        return self._fixed_bytes() + coming_bytes - self._budget.ram_bytes

    def state(self, ram_bytes: int | None = None) -> RamState:
        """Return what RAM holds now, in a RAM budget, by default the present one."""
        units = sorted(self._registry.everyone(), key=lambda unit: unit.last_use)
        return RamState(
            self._budget.ram_bytes if ram_bytes is None else ram_bytes,
            {unit: unit.host_bytes for unit in units if unit.host_bytes},
            {unit: unit.held for unit in units if unit.host_bytes and not unit.in_ram},
            frozenset(unit for unit in units if not _may_go(unit)),
            frozenset(unit for unit in units if unit.is_cached),
            tuple(self._schedule.units()),
            tuple(self._schedule.ended()),
        )

    # How weights come for a run

    def wanted(self, unit: ManagedModel, kind: str) -> InRam:
        """Return how a unit is to lie in RAM for a placement. Nothing comes or goes yet.

        An encoder is read once, wherever to: one that can run from disk takes no RAM from units on the device.
        Raises DoesNotFitError, and drops it, for a unit that has no room in a stated RAM budget, and cannot run from
        disk in it.
        """
        if unit.reading and unit.reading.failed:
            unit.give_up_reading()
        limit, left = self._budget.ram_limit, self.left_for(unit, kind)
        stays = limit is None and not self._accelerator.is_unified
        if unit.in_ram and (stays or not unit.reloadable or unit.size_bytes <= left):
            return InRam.AS_THEY_ARE
        from_disk = unit.source() is not None
        if unit.size_bytes <= left:
            is_read_once = from_disk and unit.role == "text_encoder" and kind != "cpu"
            short = self.missing_bytes(unit.size_bytes - unit.host_bytes) > 0
            if not (is_read_once and short and window_bytes(sizes_of(unit), kind) < unit.size_bytes):
                return InRam.WHOLE
        least = least_ram_on_cpu(sizes_of(unit)) if from_disk and kind == "cpu" else 0
        if from_disk and (limit is None or least <= left):
            return InRam.GROUPS
        if limit is None:
            return InRam.AS_THEY_ARE if unit.in_ram else InRam.WHOLE
        self._timeline.record("drop", unit, unit.drop())
        raise DoesNotFitError(why_no_ram(unit, least, self.left_for(unit, "cpu"), limit))

    def room_for_groups(self, unit: ManagedModel, kind: str) -> int:
        """Return the RAM for groups of a unit that is taken from none that run sooner, and note the room in all."""
        if self._budget.ram_limit is None and not self._accelerator.is_unified:
            self._timeline.ram_is_short(unit)
        self._loading(unit).room_bytes, spare = self.ram_for(unit, kind)
        return spare

    def load(self, unit: ManagedModel, kind: str, nbytes: int, groups: Collection[int] | None = None) -> None:
        """Bring a unit to RAM, or some of its groups, which take `nbytes` there. Others are dropped for it.

        If the system refuses the RAM, it runs from disk, where it can.
        """
        self.keep_budget(unit, max(0, nbytes - unit.host_bytes))
        if groups is not None and not set(groups) - unit.held:
            return
        coming = unit.bytes_to_read(groups)
        self._timeline.record("read", unit, coming)
        look = self.looking(unit, coming)
        try:
            came = unit.load(look, behind=kind != "cpu") if groups is None else unit.hold(groups, look, behind=True)
        except Exception as error:
            if not is_out_of_ram(error) or kind == "cpu" or unit.source() is None:
                raise
            release_frames(error)
            log.warning("Ballast: %s runs from disk: %s", unit.name, str(error))
            self.keep_budget(unit, window_bytes(sizes_of(unit), kind))
            return
        self._begun(unit, came)
        if came and not unit.reading:
            self._timeline.record("load", unit, came)

    def incoming(self, unit: ManagedModel) -> PendingReads:
        """Return what is on its way to RAM of a unit."""
        loading = self._loading(unit)
        return PendingReads(unit.reading, loading.times, loading.progress or self._progress(unit))

    def held_in(self, unit: ManagedModel) -> int | None:
        """Return the RAM that there was for a unit of which only groups were brought there."""
        return self._loading(unit).room_bytes

    def ram_for(self, unit: ManagedModel, kind: str = "") -> tuple[int, int]:
        """RAM for the groups of a unit that cannot have all, and what of it is taken from none that run sooner.

        An encoder, which is read once wherever to, takes none from others, unless it runs there.
        """
        spare = ram_left(unit, self.state().free_for(unit), self._accelerator.is_unified)
        return (spare if unit.role == "text_encoder" and kind != "cpu" else self.left_for(unit, kind)), spare

    def count_read(self, nbytes: int) -> None:
        """Add `nbytes` that a placement has read from disk to the total."""
        self.disk_bytes += nbytes

    # How weights come ahead of their run

    def read_ahead(self) -> None:
        """Begin to read what runs next, where RAM has room for it beside all that is there, and nothing else is read.

        Its disk is left to a unit that runs from there.
        """
        units = self._registry.units()
        for unit in units:
            self._has_come(unit)
        beside = not (self._accelerator.is_cpu or self._accelerator.is_unified)
        if not beside or any(u.reading or (u.leases and not u.in_ram) for u in units):
            return
        following = next((unit for unit in self._schedule.units() if not unit.in_ram), None)
        if following and following in units:
            self._begin_ahead(following)

    def _begin_ahead(self, unit: ManagedModel) -> None:
        spare = self._budget.ram_bytes - sum(u.host_bytes for u in self._registry.everyone())
        if unit.placement or unit.leases or not unit.reloadable or unit.size_bytes - unit.host_bytes > spare:
            return
        with contextlib.suppress(OSError, ValueError, MemoryError):  # of which it is told when it runs
            coming = unit.bytes_to_read()
            if came := unit.read_ahead(self.looking(unit, coming)):
                self._timeline.record("read", unit, coming)
                self._begun(unit, came)

    def stop(self, units: Sequence[ManagedModel] | None = None) -> None:
        """Cancel the reading of these units, by default of all, but not of those in place."""
        for unit in self._registry.units() if units is None else units:
            self._has_come(unit)
            if unit.reading and unit.placement is None:
                self._loading(unit).coming_bytes = 0
                unit.give_up_reading()

    def ran(self, unit: ManagedModel) -> None:
        """Note that a call of a unit has ended: what is still read after it, if anything, is not what it waited for."""
        self._has_come(unit)
        loading = self._loading(unit)
        if not unit.reading and loading.progress:
            loading.progress.end()
            loading.progress = None

    def looking(self, unit: ManagedModel, nbytes: int, doing: Doing = "reading") -> Look:
        """Return a callback for the reading of `nbytes`: it lets the user stop it, and tells how far it is."""
        progress = self._progress(unit, nbytes, doing)

        def look(read: int) -> None:
            host.throw_if_interrupted()
            progress.look(read)

        return look

    def _progress(self, unit: ManagedModel, nbytes: int = 0, doing: Doing = "reading") -> Progress:
        """Return the progress of a unit's reading, of which `nbytes` of files go to RAM."""
        told, wanted = -1, weakref.ref(unit)

        def tell(read: int, total: int) -> None:
            nonlocal told
            there = wanted()
            if there and read != told and (told < 0 or read == total or read - told >= total // 100):
                told = read
                self._timeline.tell(doing, there, read, total)

        progress = Progress(tell, nbytes)
        if doing == "reading":
            self._loading(unit).progress = progress
        return progress

    def _has_come(self, unit: ManagedModel) -> None:
        """Note that a unit is in RAM, if it was read while it ran, or others did."""
        unit.forget_reading()
        loading = self._loading(unit)
        if unit.reading:
            if loading.progress:
                loading.progress.look(unit.reading.so_far)
            return
        came, loading.coming_bytes = loading.coming_bytes, 0
        if came and (unit.in_ram or unit.held):  # it was not dropped meanwhile
            self._timeline.record("load", unit, came)

    def _begun(self, unit: ManagedModel, came: int) -> None:
        """Note that `came` bytes have been read, or are being read while others run."""
        self.disk_bytes += came
        disk, loading = self._accelerator.simulated_disk, self._loading(unit)
        if came and unit.reading:
            loading.coming_bytes = came
            if disk:
                loading.times = DiskTimes(unit.reading.order, disk)
                if unit.in_ram:  # else the placement begins it
                    loading.times.read_all()
        elif came and disk and (event := disk(came)):
            event.synchronize()

    def _loading(self, unit: ManagedModel) -> _Loading:
        return self._loadings.setdefault(unit, _Loading())

    def _fixed_bytes(self) -> int:
        """Bytes of the copies that may not be dropped now."""
        droppable = self._droppable()
        return sum(unit.host_bytes for unit in self._registry.everyone() if unit not in droppable)

    def _droppable(self) -> dict[ManagedModel, int]:
        """Return the copies that can be read again, least recently used first."""
        holding = sorted((u for u in self._registry.everyone() if u.host_bytes), key=lambda unit: unit.last_use)
        return {unit: unit.host_bytes for unit in holding if _may_go(unit)}

    def _drop(self, droppable: dict[ManagedModel, int], capacity_bytes: int, wanted: Use) -> None:
        cached = {unit for unit in droppable if unit.is_cached}
        coming = self._schedule.uses(self._workloads.working_bytes)
        for unit, nbytes in choose_shrinks(droppable, capacity_bytes, wanted, coming, cached).items():
            self._timeline.record("drop", unit, unit.drop(nbytes))


def _may_go(unit: ManagedModel) -> bool:
    return unit.reloadable and not unit.leases and not unit.placement
