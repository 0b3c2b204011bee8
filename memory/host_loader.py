"""How weights come to RAM: before a unit runs, while it does, and ahead of what runs next. Without a lock."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Sequence

from .accelerator import Accelerator
from .budget import Budget
from .engine.pending_reads import DiskTimes, PendingReads, Progress
from .errors import DoesNotFitError, is_out_of_ram, release_frames
from .host import management as host
from .host_cache import HostCache
from .planning.fit import ram_left, sizes_of, why_no_ram
from .planning.planner import least_ram_on_cpu, window_bytes
from .reports.timeline import Progress as Doing
from .reports.timeline import Timeline
from .weights.reader import Look
from .weights.unit import ManagedModel

log = logging.getLogger("ballast")

Groups = Callable[[int], tuple[frozenset[int], int]]  # to hold, and the RAM that takes, where so many bytes are spare


class HostLoader:
    """Reads the weights of one manager's units, within its RAM budget.

    `give_ram` lets others than a unit leave the device, as far as so many bytes of RAM are missing.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        units: Callable[[], list[ManagedModel]],
        budget: Budget,
        copies: HostCache,
        timeline: Timeline,
        give_ram: Callable[[ManagedModel, int], None],
    ) -> None:
        self.disk_bytes = 0  # that were read so far
        self._accelerator, self._units = accelerator, units
        self._budget, self._copies, self._timeline, self._give_ram = budget, copies, timeline, give_ram
        # The RAM that there was for units that have groups there.
        self._held_in: weakref.WeakKeyDictionary[ManagedModel, int] = weakref.WeakKeyDictionary()
        # What is being read to RAM while something runs.
        self._coming_bytes: weakref.WeakKeyDictionary[ManagedModel, int] = weakref.WeakKeyDictionary()
        self._times: weakref.WeakKeyDictionary[ManagedModel, DiskTimes] = weakref.WeakKeyDictionary()
        self._progress: weakref.WeakKeyDictionary[ManagedModel, Progress] = weakref.WeakKeyDictionary()

    def load(self, unit: ManagedModel, kind: str, groups: Groups) -> None:
        """Bring a unit to RAM for a placement, or the `groups` of one that can run from disk and does not fit there.

        Raises DoesNotFitError for what can do neither in a RAM budget that was stated.
        """
        limit = self._budget.ram_limit
        if unit.reading and unit.reading.failed:
            unit.give_up_reading()
        stays = limit is None and not self._accelerator.is_unified
        if unit.in_ram and (stays or not unit.reloadable or unit.size_bytes <= self.left_for(unit, kind)):
            self._copies.keep_budget(unit)
            if kind == "cpu":
                unit.load()
            return
        if not self._make_ram(unit, kind):
            runs_from_disk = unit.source() is not None
            least = least_ram_on_cpu(sizes_of(unit)) if runs_from_disk and kind == "cpu" else 0
            if runs_from_disk and (limit is None or least <= self.left_for(unit, kind)):
                if limit is None and not self._accelerator.is_unified:
                    self._timeline.ram_is_short(unit)
                self._hold(unit, kind, groups)
                return
            if dropped := unit.drop():
                self._timeline.record("drop", unit, dropped)
            if limit is not None:
                raise DoesNotFitError(why_no_ram(unit, least, self._copies.left_for(unit), limit))
            self._copies.keep_budget(unit, unit.size_bytes)
        self._read(unit, lambda look: unit.load(look, behind=kind != "cpu"), kind)

    def incoming(self, unit: ManagedModel) -> PendingReads:
        """Return what is on its way to RAM of a unit."""
        return PendingReads(unit.reading, self._times.get(unit), self._progress.get(unit) or self.progress(unit))

    def held_in(self, unit: ManagedModel) -> int | None:
        """Return the RAM that there was for a unit of which only groups were brought there."""
        return self._held_in.get(unit)

    def ram_for(self, unit: ManagedModel, kind: str = "") -> tuple[int, int]:
        """RAM for the groups of a unit that cannot have all, and what of it is taken from none that run sooner.

        An encoder, which is read once wherever to, takes none from others, unless it runs there.
        """
        spare = ram_left(unit, self._copies.state().free_for(unit), self._accelerator.is_unified)
        return (spare if unit.role == "text_encoder" and kind != "cpu" else self.left_for(unit, kind)), spare

    def left_for(self, unit: ManagedModel, kind: str = "") -> int:
        """RAM that a unit's weights may take in a placement, once every other copy that may go is gone."""
        room = self._copies.left_for(unit)
        return room if kind == "cpu" else ram_left(unit, room, self._accelerator.is_unified)

    def read_ahead(self, coming: Sequence[ManagedModel]) -> None:
        """Begin to read the first of what is coming, where RAM has room for it beside all that is there, and nothing
        else is read.

        Its disk is left to a unit that runs from there.
        """
        units = self._units()
        for unit in units:
            self.has_come(unit)
        beside = not (self._accelerator.is_cpu or self._accelerator.is_unified)
        if not beside or any(u.reading or (u.leases and not u.in_ram) for u in units):
            return
        for unit in [unit for unit in coming if not unit.in_ram][:1]:
            self._begin_ahead(unit)

    def _begin_ahead(self, unit: ManagedModel) -> None:
        if unit.placement or unit.leases or not unit.reloadable or unit not in self._units():
            return
        if unit.size_bytes - unit.host_bytes > self._copies.spare_bytes():
            return
        with contextlib.suppress(OSError, ValueError, MemoryError):  # of which it is told when it runs
            coming = unit.bytes_to_read()
            if came := unit.read_ahead(self.looking(unit, coming)):
                self._timeline.record("read", unit, coming)
                self._begun(unit, came)

    def stop(self, units: Sequence[ManagedModel] | None = None) -> None:
        """Give up what is being read of these units, by default of all, but not of those in place."""
        for unit in self._units() if units is None else units:
            self.has_come(unit)
            if unit.reading and unit.placement is None:
                self._coming_bytes.pop(unit, None)
                unit.give_up_reading()

    def has_come(self, unit: ManagedModel) -> None:
        """Note that a unit is in RAM, if it was read while it ran, or others did."""
        unit.forget_reading()
        if unit.reading and (progress := self._progress.get(unit)):
            progress.look(unit.reading.so_far)
        if not unit.reading and (came := self._coming_bytes.pop(unit, 0)) and (unit.in_ram or unit.held):
            self._timeline.record("load", unit, came)  # it was not dropped meanwhile

    def ran(self, unit: ManagedModel) -> None:
        """Note that a call of a unit has ended: what is still read after it, if anything, is not what it waited for."""
        self.has_come(unit)
        if not unit.reading and (progress := self._progress.pop(unit, None)):
            progress.end()

    def looking(self, unit: ManagedModel, nbytes: int, doing: Doing = "reading") -> Look:
        """Return what is to be called while so many bytes are read: lets the user stop it, and tells how far it is."""
        progress = self.progress(unit, nbytes, doing)

        def look(read: int) -> None:
            host.throw_if_interrupted()
            progress.look(read)

        return look

    def progress(self, unit: ManagedModel, nbytes: int = 0, doing: Doing = "reading") -> Progress:
        """Return what is to be told while a unit is read, of which so many bytes of files go to RAM."""
        told, wanted = -1, weakref.ref(unit)

        def tell(read: int, total: int) -> None:
            nonlocal told
            there = wanted()
            if there and read != told and (told < 0 or read == total or read - told >= total // 100):
                told = read
                self._timeline.tell(doing, there, read, total)

        progress = Progress(tell, nbytes)
        if doing == "reading":
            self._progress[unit] = progress
        return progress

    def _make_ram(self, unit: ManagedModel, kind: str) -> bool:
        """Make RAM for a unit's weights. False, and nothing is done, if the budget has none or they are best left.

        An encoder is read once, wherever to: one that can run from disk takes no RAM from units on the device.
        """
        if unit.size_bytes > self.left_for(unit, kind):
            return False
        coming = unit.size_bytes - unit.host_bytes
        best_left = unit.role == "text_encoder" and kind != "cpu" and unit.source() is not None
        if self._missing(coming) > 0 and best_left and window_bytes(sizes_of(unit), kind) < unit.size_bytes:
            return False
        self._take_ram(unit, coming)
        return True

    def _missing(self, coming_bytes: int) -> int:
        """Return what is missing of RAM for so many bytes more, when all copies that may be dropped now have been."""
        return self._copies.fixed_bytes() + coming_bytes - self._budget.ram_bytes

    def _take_ram(self, unit: ManagedModel, coming_bytes: int) -> None:
        """Make others give up the RAM that a unit needs, those on the device last."""
        self._give_ram(unit, self._missing(coming_bytes))
        self._copies.keep_budget(unit, coming_bytes)

    def _hold(self, unit: ManagedModel, kind: str, groups: Groups) -> None:
        """Hold in RAM as much of a unit as fits, the best groups first."""
        self._held_in[unit], spare = self.ram_for(unit, kind)
        chosen, wanted = groups(spare)
        if dropped := unit.keep(chosen):
            self._timeline.record("drop", unit, dropped)
        self._take_ram(unit, max(0, wanted - unit.host_bytes))
        if chosen - unit.held:
            self._read(unit, lambda look: unit.hold(chosen, look, behind=True), kind, chosen)

    def _read(
        self,
        unit: ManagedModel,
        read: Callable[[Look], int],
        kind: str,
        groups: Collection[int] | None = None,
    ) -> None:
        """Read weights of a unit to RAM, or of these groups. If the system refuses that, it runs from disk."""
        coming = unit.bytes_to_read(groups)
        self._timeline.record("read", unit, coming)
        try:
            came = read(self.looking(unit, coming))
        except Exception as error:
            if not is_out_of_ram(error) or kind == "cpu" or unit.source() is None:
                raise
            release_frames(error)
            log.warning("Ballast: %s runs from disk: %s", unit.name, str(error))
            self._copies.keep_budget(unit, window_bytes(sizes_of(unit), kind))
            return
        self._begun(unit, came)
        if came and not unit.reading:
            self._timeline.record("load", unit, came)

    def _begun(self, unit: ManagedModel, came: int) -> None:
        """Note that so many bytes have been read, or are being read while others run."""
        self.disk_bytes += came
        disk = self._accelerator.simulated_disk
        if came and unit.reading:
            self._coming_bytes[unit] = came
            if disk:
                self._times[unit] = DiskTimes(unit.reading.order, disk)
                if unit.in_ram:  # else the placement begins it
                    self._times[unit].read_all()
        elif came and disk and (event := disk(came)):
            event.synchronize()
