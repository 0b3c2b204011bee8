"""The weights of units in RAM: read before a run and while it runs, and dropped when RAM is short.

All managers share the RAM, each within its own budget. A copy that was dropped must be read again. There is no lock
here: the manager holds its own around all of this.
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
from .reports.timeline import Activity, Timeline
from .schedule import Schedule
from .vocabulary import Role
from .weights.reader import Look
from .weights.unit import ManagedModel
from .workload import WorkloadStats

log = logging.getLogger("ballast")


class InRam(Enum):
    """The way in which the weights of a unit are to lie in RAM while it is in place."""

    AS_THEY_ARE = "as they are"
    WHOLE = "all of them"
    GROUPS = "some weight groups, while the others come from disk"
    NO_ROOM = "nowhere: the stated RAM budget has no room, and the unit cannot run from disk"


@dataclass
class _Loading:
    """The reads of one unit. It is in one of three states:

    - Idle: `coming_bytes` is 0. `progress` is None from the end of the next call on.
    - Read while its caller waits, or past RAM to the device: `coming_bytes` is 0, `progress` is set.
    - Read to RAM in the background: `coming_bytes` and `progress` are set, and `times` on a simulated disk.

    `room_bytes` does not depend on the state. It is set once the unit had to run with some of its groups in RAM.
    """

    room_bytes: int | None = None  # RAM that its groups may take
    coming_bytes: int = 0  # of files
    times: DiskTimes | None = None
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
        """Drop the copies of units with these roles that nobody refers to."""
        for unit in [u for u in self._droppable() if u.is_cached and u.role in roles]:
            self._timeline.record("drop", unit, unit.drop())
        self._registry.forget()

    def keep_groups(self, unit: ManagedModel, groups: Collection[int]) -> None:
        """Drop all weights of a unit except for `groups`."""
        if dropped := unit.keep(groups):
            self._timeline.record("drop", unit, dropped)

    def make_ram_room(self, wanted_bytes: int) -> int:
        """Drop copies until `wanted_bytes` of RAM are free, or none is left to drop. Return the bytes that are free."""
        room = self.room_bytes()
        self._drop(self._droppable(), room, Use(None, min(wanted_bytes, room)))
        return spare_ram_bytes()

    # What RAM has room for

    def room_bytes(self) -> int:
        """Return the RAM that would be free beside weights if all copies that may be dropped were."""
        return spare_ram_bytes() + sum(self._droppable().values())

    def left_for(self, unit: ManagedModel, kind: str = "") -> int:
        """Return the RAM for a unit's weights in the placement `kind` if all other units that can were dropped.

        Units stay that are leased, pinned, or cannot be read again. The result is negative if these exceed the budget.
        """
        staying = [u for u in self._registry.everyone() if u is not unit and (u.leases or u.pinned or not u.reloadable)]
        room = self._budget.ram_bytes - sum(u.host_bytes for u in staying)
        return room if kind == "cpu" else ram_left(unit, room, self._accelerator.is_unified)

    def missing_bytes(self, coming_bytes: int) -> int:
        """Return the bytes by which `coming_bytes` more exceed the RAM budget once all droppable copies are gone."""
        return self._fixed_bytes() + coming_bytes - self._budget.ram_bytes

    def state(self, ram_bytes: int | None = None) -> RamState:
        """Return the units in RAM now, for a plan within `ram_bytes`, by default the present RAM budget."""
        units = sorted(self._registry.everyone(), key=lambda unit: unit.last_use)
        return RamState(
            self._budget.ram_bytes if ram_bytes is None else ram_bytes,
            {unit: unit.host_bytes for unit in units if unit.host_bytes},
            {unit: unit.held for unit in units if unit.host_bytes and not unit.in_ram},
            frozenset(unit for unit in units if not _may_drop(unit)),
            frozenset(unit for unit in units if unit.is_cached),
            tuple(self._schedule.units()),
            tuple(self._schedule.ended()),
        )

    # How weights come for a run

    def choose_form(self, unit: ManagedModel, kind: str) -> InRam:
        """Return how a unit is to lie in RAM for the placement `kind`. Nothing is read or dropped.

        - A unit that is whole in RAM stays if it fits, cannot be read again, or no RAM budget was stated.
        - A unit that fits comes whole. A text encoder that can run from disk comes whole only if no unit has to leave
          the device for it: it is read once a run, so that a copy in RAM saves nothing.
        - Else it runs with some groups in RAM if its files allow that.
        - Else it comes whole all the same if no RAM budget was stated. In a stated one it has no room.

        Example: 8 GB of RAM, and a denoiser of 6 GB on the device that is held there too. A text encoder of 5 GB runs
        from disk. A VAE of 5 GB comes whole, and the denoiser leaves.
        """
        limit, left = self._budget.ram_limit, self.left_for(unit, kind)
        stays = limit is None and not self._accelerator.is_unified
        if unit.in_ram and (stays or not unit.reloadable or unit.size_bytes <= left):
            return InRam.AS_THEY_ARE
        from_disk = unit.source() is not None
        if unit.size_bytes <= left and not (from_disk and self._is_better_from_disk(unit, kind)):
            return InRam.WHOLE
        if from_disk and (limit is None or self._least_ram(unit, kind) <= left):
            return InRam.GROUPS
        if limit is None:
            return InRam.AS_THEY_ARE if unit.in_ram else InRam.WHOLE
        return InRam.NO_ROOM

    def _is_better_from_disk(self, unit: ManagedModel, kind: str) -> bool:
        """Return whether a unit is read once, and its copy in RAM would take the place of a unit on the device."""
        if unit.role != "text_encoder" or kind == "cpu":
            return False
        is_short = self.missing_bytes(unit.size_bytes - unit.host_bytes) > 0
        return is_short and window_bytes(sizes_of(unit), kind) < unit.size_bytes

    def _least_ram(self, unit: ManagedModel, kind: str) -> int:
        """Return the least RAM in which a unit runs from disk. On the device it needs none beside its windows."""
        return least_ram_on_cpu(sizes_of(unit)) if kind == "cpu" and unit.source() is not None else 0

    def refuse(self, unit: ManagedModel, kind: str) -> DoesNotFitError:
        """Drop a unit that has no room in the stated RAM budget, and return the error that says so."""
        least, limit = self._least_ram(unit, kind), self._budget.ram_limit or 0
        self._timeline.record("drop", unit, unit.drop())
        return DoesNotFitError(why_no_ram(unit, least, self.left_for(unit, "cpu"), limit))

    def set_room_for_groups(self, unit: ManagedModel, kind: str) -> None:
        """Set the RAM that the groups of a unit may take, as `held_in` returns it from now on."""
        if self._budget.ram_limit is None and not self._accelerator.is_unified:
            self._timeline.ram_is_short(unit)
        self._loading(unit).room_bytes = self.room_for_groups(unit, kind)

    def room_for_groups(self, unit: ManagedModel, kind: str) -> int:
        """Return the RAM for the groups of a unit that cannot be whole in RAM.

        The copies of other units may be dropped for it. A text encoder, which is read once a run, takes the spare RAM
        only, unless it runs on the CPU.
        """
        if unit.role == "text_encoder" and kind != "cpu":
            return self.spare_for_groups(unit)
        return self.left_for(unit, kind)

    def spare_for_groups(self, unit: ManagedModel) -> int:
        """Return the RAM for the groups of a unit for which no unit that runs sooner is dropped.

        Example: 10 GB of RAM, with 4 GB of a unit that runs next and 3 GB of one that ran. Spare are 10 - 4 = 6 GB.
        """
        return ram_left(unit, self.state().free_for(unit), self._accelerator.is_unified)

    def load(self, unit: ManagedModel, kind: str, nbytes: int, groups: Collection[int] | None = None) -> None:
        """Read a unit to RAM, or only its `groups`. They take `nbytes` there, for which other copies are dropped.

        If the system refuses the RAM, a unit that can runs from disk.
        """
        self.keep_budget(unit, max(0, nbytes - unit.host_bytes))
        if groups is not None and not set(groups) - unit.held:
            return
        coming = unit.bytes_to_read(groups)
        self._timeline.record("read", unit, coming)
        look = self.read_callback(unit, coming)
        try:
            came = unit.load(look, behind=kind != "cpu") if groups is None else unit.hold(groups, look, behind=True)
        except Exception as error:
            if not is_out_of_ram(error) or kind == "cpu" or unit.source() is None:
                raise
            release_frames(error)
            log.warning("Ballast: %s runs from disk: %s", unit.name, str(error))
            self.keep_budget(unit, window_bytes(sizes_of(unit), kind))
            return
        self._record_read(unit, came)
        if came and not unit.reading:
            self._timeline.record("load", unit, came)

    def incoming(self, unit: ManagedModel) -> PendingReads:
        """Return the reads to RAM of a unit that are under way, for its placement."""
        loading = self._loading(unit)
        return PendingReads(unit.reading, loading.times, loading.progress or self._progress(unit))

    def held_in(self, unit: ManagedModel) -> int | None:
        """Return the RAM that the groups of a unit may take. None if it was never short of RAM."""
        return self._loading(unit).room_bytes

    def count_read(self, nbytes: int) -> None:
        """Add `nbytes` that a placement has read from disk to the total."""
        self.disk_bytes += nbytes

    # How weights come ahead of their run

    def read_ahead(self) -> None:
        """Begin to read the next scheduled unit that is not in RAM, in the background.

        It must fit beside all copies that are there. Nothing is begun while another unit is read, or runs from disk:
        both would share the disk.
        """
        units = self._registry.units()
        for unit in units:
            self._record_arrival(unit)
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
        with contextlib.suppress(OSError, ValueError, MemoryError):  # the run of the unit meets the error again
            coming = unit.bytes_to_read()
            if came := unit.read_ahead(self.read_callback(unit, coming)):
                self._timeline.record("read", unit, coming)
                self._record_read(unit, came)

    def cancel_reads(self, units: Sequence[ManagedModel] | None = None) -> None:
        """Cancel the reads of these units, by default of all, except for units in place."""
        for unit in self._registry.units() if units is None else units:
            self._record_arrival(unit)
            if unit.reading and unit.placement is None:
                self._loading(unit).coming_bytes = 0
                unit.give_up_reading()

    def cancel_failed_read(self, unit: ManagedModel) -> None:
        """Cancel the read of a unit if it failed in the background, so that it can be read again."""
        if unit.reading and unit.reading.failed:
            unit.give_up_reading()

    def after_call(self, unit: ManagedModel) -> None:
        """End the progress of a unit's reads after a call, unless it is still read in the background.

        Example: a call that streamed from disk has waited for all its bytes, so that its progress is at 100%.
        """
        self._record_arrival(unit)
        loading = self._loading(unit)
        if not unit.reading and loading.progress:
            loading.progress.end()
            loading.progress = None

    def read_callback(self, unit: ManagedModel, nbytes: int, activity: Activity = "reading") -> Look:
        """Return a callback for a read of `nbytes`. It raises the user's interrupt, and reports the progress."""
        progress = self._progress(unit, nbytes, activity)

        def look(read: int) -> None:
            host.throw_if_interrupted()
            progress.look(read)

        return look

    def _progress(self, unit: ManagedModel, nbytes: int = 0, activity: Activity = "reading") -> Progress:
        """Return a new progress of a unit's reads, of which `nbytes` of files go to RAM. It reports each 1%."""
        told, wanted = -1, weakref.ref(unit)

        def tell(read: int, total: int) -> None:
            nonlocal told
            there = wanted()
            if there and read != told and (told < 0 or read == total or read - told >= total // 100):
                told = read
                self._timeline.tell(activity, there, read, total)

        progress = Progress(tell, nbytes)
        if activity == "reading":
            self._loading(unit).progress = progress
        return progress

    def _record_arrival(self, unit: ManagedModel) -> None:
        """Record that a read in the background has ended, or report how far it is."""
        unit.forget_reading()
        loading = self._loading(unit)
        if unit.reading:
            if loading.progress:
                loading.progress.look(unit.reading.so_far)
            return
        came, loading.coming_bytes = loading.coming_bytes, 0
        if came and (unit.in_ram or unit.held):  # it was not dropped meanwhile
            self._timeline.record("load", unit, came)

    def _record_read(self, unit: ManagedModel, nbytes: int) -> None:
        """Record that `nbytes` were read, or are being read in the background."""
        self.disk_bytes += nbytes
        if nbytes and unit.reading:
            self._loading(unit).coming_bytes = nbytes
        self._simulate_read(unit, nbytes)

    def _simulate_read(self, unit: ManagedModel, nbytes: int) -> None:
        """Let a read take time on the clock of a simulated disk, if there is one."""
        disk = self._accelerator.simulated_disk
        if not (disk and nbytes):
            return
        if unit.reading:
            times = self._loading(unit).times = DiskTimes(unit.reading.order, disk)
            if unit.in_ram:  # else the placement begins it
                times.read_all()
        elif event := disk(nbytes):
            event.synchronize()

    def _loading(self, unit: ManagedModel) -> _Loading:
        return self._loadings.setdefault(unit, _Loading())

    def _fixed_bytes(self) -> int:
        """Return the bytes of the copies that may not be dropped now."""
        droppable = self._droppable()
        return sum(unit.host_bytes for unit in self._registry.everyone() if unit not in droppable)

    def _droppable(self) -> dict[ManagedModel, int]:
        """Return the copies that can be read again, least recently used first."""
        holding = sorted((u for u in self._registry.everyone() if u.host_bytes), key=lambda unit: unit.last_use)
        return {unit: unit.host_bytes for unit in holding if _may_drop(unit)}

    def _drop(self, droppable: dict[ManagedModel, int], capacity_bytes: int, wanted: Use) -> None:
        cached = {unit for unit in droppable if unit.is_cached}
        coming = self._schedule.uses(self._workloads.working_bytes)
        for unit, nbytes in choose_shrinks(droppable, capacity_bytes, wanted, coming, cached).items():
            self._timeline.record("drop", unit, unit.drop(nbytes))


def _may_drop(unit: ManagedModel) -> bool:
    return unit.reloadable and not unit.leases and not unit.placement
