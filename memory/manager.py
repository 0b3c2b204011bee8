"""MemoryManager: who holds the memory of one device.

There is one manager for each device of the process, and it is the only global state of the pack. It refers to units
weakly: whoever opened a pipeline owns its units, and when the pipeline goes, they go. What the manager keeps on the
device is bounded by the budget, what it keeps in RAM by the RAM budget.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from . import host
from .accelerator import Accelerator, resolve_device
from .budget import Budget
from .errors import DoesNotFitError, is_out_of_memory, release_frames
from .eviction import Use, choose_evictions, choose_shrinks
from .fit import fitting_placements, make_placement, need_bytes, sizes_of, weights_to_hold, why_nothing_fits
from .forecast import Forecast
from .host_patcher import HostPatcher
from .placement import Resident
from .report import Report, UnitReport
from .sizes import parse_bytes
from .stage import run_stage
from .stream import Streamed
from .timeline import OnDevice, Timeline
from .unit import ROLES, ManagedModel, Role

if TYPE_CHECKING:
    from .runplan import StagePlan

STRATEGIES = ("auto", "resident", "streamed", "leafwise", "cpu")

_managers: dict[torch.device, MemoryManager] = {}
_managers_lock = threading.Lock()


def manager(device: str | torch.device = "auto") -> MemoryManager:
    """The one manager of a device."""
    found = resolve_device(device)
    with _managers_lock:
        if found not in _managers:
            _managers[found] = MemoryManager(found)
        return _managers[found]


def managers() -> list[MemoryManager]:
    """All managers that exist by now."""
    return list(_managers.values())


class MemoryManager:
    """Loads units onto one device within a budget, and takes them away again. Use `manager()` to get it."""

    def __init__(self, device: torch.device) -> None:
        self.accelerator = Accelerator(device)
        self.device = device
        self.timeline = Timeline(self.accelerator, self._residents)
        self.disk_bytes_read = 0
        self.device_bytes_in = 0
        self._units: weakref.WeakSet[ManagedModel] = weakref.WeakSet()
        self._called: weakref.WeakKeyDictionary[ManagedModel, int] = weakref.WeakKeyDictionary()
        self._patchers: weakref.WeakKeyDictionary[ManagedModel, HostPatcher] = weakref.WeakKeyDictionary()
        self._future: list[weakref.ref[ManagedModel]] | None = None
        self.budget = Budget(self.accelerator, self.units)
        self._clock = itertools.count(1)
        self._lock = threading.RLock()
        self._stage_lock = threading.RLock()

    def limit(self, vram: int | str | None = None, ram: int | str | None = None) -> None:
        """Set the budgets: bytes, "6GB", or None for what is free less the reserve."""
        self.budget.vram_limit = None if vram is None else parse_bytes(vram)
        self.budget.ram_limit = None if ram is None else parse_bytes(ram)

    @property
    def budget_bytes(self) -> int:
        """VRAM that weights may hold."""
        return self.budget.vram_bytes

    @property
    def ram_budget_bytes(self) -> int:
        """RAM that weights may hold."""
        return self.budget.ram_bytes

    def adopt(self, unit: ManagedModel) -> ManagedModel:
        """Take a unit under management. The caller keeps it alive."""
        with self._lock:
            self._units.add(unit)
        return unit

    def pin(self, unit: ManagedModel, pinned: bool = True) -> None:
        """Keep a unit on the device, once it is there, until it is unpinned."""
        unit.pinned = pinned

    def schedule(self, units: Sequence[ManagedModel] | None) -> None:
        """The units that will run, in order, as far as the graph tells; None when it is not known.

        Each `use` strikes its unit from the front.
        """
        with self._lock:
            self._future = None if units is None else [weakref.ref(unit) for unit in units]

    @contextmanager
    def use(self, unit: ManagedModel, strategy: str = "auto", *, alone: bool = False) -> Iterator[nn.Module]:
        """A lease: the unit's module, in place and ready to run under inference mode, until the block ends.

        `strategy` names a placement, or leaves the choice to the manager; with `alone` every other unit that may leave
        does so first. The unit stays in place afterwards, free to be evicted; if the block raises, it leaves.
        Raises DoesNotFitError when no placement fits the budget.
        """
        with self._lock:
            self.strike(unit)
            others = [other for other in self._units if other is not unit] if alone else []
        self.acquire(unit, strategy, instead_of=others)
        try:
            with torch.inference_mode():
                yield unit.module
        except BaseException as error:
            release_frames(error)
            self.release(unit, evict=True, failed=True)
            raise
        else:
            self.release(unit)

    def acquire(
        self,
        unit: ManagedModel,
        strategy: str = "auto",
        *,
        instead_of: Collection[ManagedModel] = (),
        anew: bool = True,
    ) -> None:
        """Put a unit in place and count a lease; of `instead_of` leaves what may. `release` must follow.

        With `anew`, one that is in place already is fitted to what it is going to do now.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}. Use {', '.join(STRATEGIES)}.")
        with self._lock:
            self.adopt(unit)
            unit.runs_on(self.execution_device(strategy))
            unit.last_use = next(self._clock)
            unit.leases += 1
            try:
                if unit.leases == 1 and self._is_outdated(unit, strategy):
                    self._evict(unit)
                for other in self._evictable(unit):
                    if other in instead_of:
                        self._evict(other)
                if unit.placement is None:
                    self._place(unit, strategy)
                else:
                    if unit.leases == 1 and (anew or unit.is_misfit):
                        self._resize(unit)
                    self._complete(unit)
                unit.is_misfit = False
                self._tell_host(unit)
                self._called[unit] = self.timeline.record("call", unit).allocated_bytes
            except BaseException:
                self.release(unit, evict=True, failed=True)
                raise

    def release(self, unit: ManagedModel, *, evict: bool = False, failed: bool = False) -> None:
        """End a lease; with `evict` the unit leaves the device when it was the last one.

        What a run that `failed` worked in tells nothing, and is not remembered.
        """
        with self._lock:
            unit.leases -= 1
            if (before := self._called.pop(unit, None)) is not None:
                peak = self._came(unit, "ran")
                if not failed and not (unit.placement and unit.placement.name == "leafwise"):
                    self._replan(unit, peak - before)
            if unit.leases == 0 and (evict or unit.is_leaving):
                self._evict(unit)
            if unit.leases == 0 and unit.placement is None:
                self._keep_ram_budget(unit)

    @contextmanager
    def stage(
        self,
        name: str,
        units: Sequence[ManagedModel],
        strategy: str = "auto",
        *,
        work: Hashable = None,
        forecast: Forecast | None = None,
        planned: StagePlan | None = None,
        alone: bool = True,
        keep: bool = False,
        vram: int | None = None,
        ram: int | None = None,
    ) -> Iterator[None]:
        """A graph step: each unit comes when its module is called, and all are gone when the block ends.

        Stages run one at a time, whatever thread they are of. A call that runs out of memory is made again on lower
        terms (see `ladder`); DoesNotFitError when there are none left.
        `work` tells sizes of work apart, so that what was measured for one is not expected of another; `forecast` is
        what it will take, and `planned` goes into the record. Of the stage's units at most one is on the device at a
        time, with `alone` of all units.
        `vram` and `ram` are budgets in bytes for this stage. With `keep` its units stay when the block ends well, to be
        evicted when others need the room. However the block ends, nothing that it leased stays leased.
        """
        run = run_stage(
            self, name, units, strategy, work=work, forecast=forecast, planned=planned, alone=alone, keep=keep
        )
        with self._stage_lock, self.budget.narrowed(vram, ram), run:
            yield

    def between_stages(self) -> AbstractContextManager[Any]:
        """Holds until the stages of other threads are done, and keeps them waiting until the block ends."""
        return self._stage_lock

    def units(self) -> list[ManagedModel]:
        """All units under management."""
        with self._lock:
            return list(self._units)

    def execution_device(self, strategy: str) -> torch.device:
        """Where a unit runs under a strategy."""
        return torch.device("cpu") if strategy == "cpu" else self.device

    def strike(self, unit: ManagedModel) -> None:
        """Take the next use of a unit off the schedule."""
        with self._lock:
            future = self._future or []
            for i, ref in enumerate(future):
                if ref() is unit:
                    del future[: i + 1]
                    return

    # What the host asks for, from any thread

    def shrink(self, unit: ManagedModel, bytes: int) -> int:
        """Let blocks of a unit leave that do not run. Returns the bytes really freed, which may be fewer, or none."""
        with self._lock:
            if unit.placement is None or unit.pinned or (unit.leases and not isinstance(unit.placement, Streamed)):
                return 0
            freed = unit.placement.shrink(bytes)
            if freed:
                self._called.pop(unit, None)  # what the call under way takes cannot be told any more
                self.timeline.record("evict", unit, freed)
            return freed

    def grow(self, unit: ManagedModel, bytes: int) -> int:
        """Let up to so many bytes more of a unit's blocks stay. Returns the bytes taken."""
        with self._lock:
            return unit.placement.grow(bytes) if unit.placement and bytes > 0 else 0

    def let_go(self, unit: ManagedModel) -> None:
        """Take a unit off the device: at once, or what does not run of it at once and the rest when its lease ends."""
        with self._lock:
            if unit.leases and not unit.pinned:
                self.shrink(unit, unit.resident_bytes)
                unit.is_leaving = True
            else:
                self.evict(unit)

    def evict(self, unit: ManagedModel) -> None:
        """Take a unit off the device, unless it is leased or pinned."""
        with self._lock:
            if not (unit.leases or unit.pinned):
                self._evict(unit)

    def leave(self, units: Sequence[ManagedModel], keep: bool) -> None:
        """End of a stage: its units go, unless they are kept or pinned."""
        with self._lock:
            for unit in units:
                if not (keep or unit.pinned or unit.leases):
                    self._evict(unit)
                    self._keep_ram_budget(unit)
                elif unit.placement is not None:
                    unit.placement.settle()

    def free(self, roles: Iterable[Role] | None = None, bytes: int | None = None) -> int:
        """Evict units that are neither leased nor pinned, least recently used first.

        `roles` restricts them; with `bytes` it stops when so much is free. Returns the bytes really freed.
        """
        wanted = set(ROLES if roles is None else roles)
        if unknown := wanted - set(ROLES):
            raise ValueError(f"unknown roles {', '.join(sorted(unknown))}. Roles are {', '.join(ROLES)}.")
        with self._lock:
            before = self.accelerator.allocated_bytes()
            for unit in self._evictable():
                if bytes is not None and before - self.accelerator.allocated_bytes() >= bytes:
                    break
                if unit.role in wanted:
                    self._evict(unit)
            gc.collect()
            self.accelerator.empty_cache()
            return max(0, before - self.accelerator.allocated_bytes())

    def report(self) -> Report:
        """Units, tiers, bytes and budgets, as they are now."""
        with self._lock:
            units = sorted(self._units, key=lambda unit: (unit.label, unit.name))
            return Report(
                device=str(self.device),
                budget_bytes=self.budget_bytes,
                reserve_bytes=self.budget.reserve_bytes,
                allocated_bytes=self.accelerator.allocated_bytes(),
                free_bytes=self.accelerator.free_bytes(),
                ram_budget_bytes=self.ram_budget_bytes,
                disk_bytes_read=self.disk_bytes_read,
                device_bytes_in=self.device_bytes_in,
                units=tuple(UnitReport.of(unit) for unit in units),
            )

    # Mechanism; all under the lock

    def _residents(self) -> tuple[OnDevice, ...]:
        placed = sorted((u for u in self._units if u.resident_bytes), key=lambda unit: (unit.role, unit.name))
        return tuple(OnDevice(unit.name, unit.role, unit.resident_bytes) for unit in placed)

    def _evictable(self, wanted: ManagedModel | None = None) -> list[ManagedModel]:
        """Units that may leave the device, least recently used first."""
        free = [u for u in self._units if u.placement and u is not wanted and not u.leases and not u.pinned]
        return sorted(free, key=lambda unit: unit.last_use)

    def _uses(self, size: str) -> list[Use] | None:
        if self._future is None:
            return None
        return [Use(u, getattr(u, size), u.working_bytes) for ref in self._future if (u := ref()) is not None]

    def _load(self, unit: ManagedModel, kind: str) -> None:
        """Bring a unit to RAM, unless it does not fit there and can run from disk."""
        streams = kind == "streamed" or (kind == "resident" and sizes_of(unit).blocks)
        if not unit.in_ram and streams and unit.size_bytes > self.ram_budget_bytes and unit.source() is not None:
            return
        self._keep_ram_budget(unit, wanted_bytes=0 if unit.in_ram else unit.size_bytes)
        if not unit.in_ram:
            self.timeline.record("read", unit, unit.size_bytes)
        read = unit.load()
        self.disk_bytes_read += read
        if read:
            self.timeline.record("load", unit, read)

    def _keep_ram_budget(self, wanted: ManagedModel, wanted_bytes: int = 0) -> None:
        """Drop host copies until those left, and `wanted_bytes` more, keep the RAM budget."""
        capacity = self.ram_budget_bytes
        holding = sorted((u for u in self._units if u.host_bytes), key=lambda unit: unit.last_use)
        droppable = {u: u.host_bytes for u in holding if u.reloadable and not u.leases and not u.placement}
        fixed = sum(u.host_bytes for u in holding if u not in droppable)
        use = Use(None if wanted in droppable else wanted, wanted_bytes)
        for unit in choose_evictions(droppable, capacity - fixed, use, self._uses("size_bytes")):
            self.timeline.record("drop", unit, unit.drop())

    def _place(self, unit: ManagedModel, strategy: str) -> None:
        kinds = ["cpu"] if self.accelerator.is_cpu else [strategy]
        if kinds == ["auto"]:
            ours = sum(u.resident_bytes for u in self._evictable(unit))
            wanted = min(need_bytes(unit, "resident"), self.budget.vram_limit or sys.maxsize)
            self.budget.ask_host(wanted - ours)
            kinds = self._fitting_placements(unit)
            if not kinds:
                pinned = [u for u in self._units if u.placement and u.pinned and u is not unit]
                why = why_nothing_fits(unit, pinned, str(self.device), self.budget_bytes, self._room_bytes(unit))
                raise DoesNotFitError(why)
        for attempt, kind in enumerate(kinds):
            try:
                self._load(unit, kind)
                self._make_room(unit, kind)
                placement = make_placement(unit, kind, self.device, self._weights(unit, kind))
                placement.place()
            except Exception as error:
                if not is_out_of_memory(error) or attempt + 1 == len(kinds):
                    raise
                release_frames(error)
                self.free()
            else:
                unit.placement = placement
                self._came(unit, "place")
                return

    def _replan(self, unit: ManagedModel, measured_bytes: int) -> None:
        """Note what a call took. If that was not known before, more blocks stay, or fewer, when there is another."""
        known = unit.working_bytes
        unit.worked_in(measured_bytes * unit.terms.parts)
        unit.is_misfit = unit.working_bytes != known

    def _resize(self, unit: ManagedModel) -> None:
        """Let more of a streamed unit's blocks stay, or fewer, as the room and the work now want it."""
        if isinstance(unit.placement, Streamed):
            more = self._weights(unit, "streamed") - unit.resident_bytes
            if more > 0:
                # Else blocks settle in the gaps that the last call left, and the next one finds none.
                self.accelerator.empty_cache()
            unit.placement.grow(more) if more > 0 else unit.placement.shrink(-more)

    def _complete(self, unit: ManagedModel) -> None:
        """Bring back the blocks that others were given the room of, where a unit must be whole to run."""
        if isinstance(unit.placement, Resident) and unit.resident_bytes < sizes_of(unit).total_bytes:
            self._make_room(unit, "resident")
            unit.placement.complete()
            self._came(unit, "place")

    def _tell_host(self, unit: ManagedModel) -> None:
        """Let the host count a unit that is on its device."""
        if unit.resident_bytes and host.lists_units(self.device):
            if unit not in self._patchers:
                self._patchers[unit] = HostPatcher(self, unit, host.device() or self.device)
            self._patchers[unit].target_bytes = unit.resident_bytes
            host.list_unit(self._patchers[unit], unit.working_bytes)

    def _came(self, unit: ManagedModel, kind: Literal["place", "ran"]) -> int:
        """Count what a unit has brought to the device. Returns the highest allocation meanwhile."""
        came = unit.placement.take_bytes_in() if unit.placement else 0
        self.device_bytes_in += came
        if not unit.in_ram:
            self.disk_bytes_read += came
        return self.timeline.record(kind, unit, came).peak_bytes

    def _is_outdated(self, unit: ManagedModel, strategy: str) -> bool:
        """Whether a unit sits otherwise than `strategy` wants, or than it could by now."""
        if unit.placement is None or self.accelerator.is_cpu:
            return False
        if strategy != "auto":
            # What runs from disk is always streamed, wholly resident or not.
            return strategy != unit.placement.name and not (strategy == "resident" and not unit.in_ram)
        fitting = self._fitting_placements(unit)
        return bool(fitting) and fitting[0] != unit.placement.name

    def _room_bytes(self, unit: ManagedModel) -> int:
        """What a unit could have once everything that may leave has left."""
        fixed = [u for u in self._units if u.placement and u is not unit and (u.leases or u.pinned)]
        return self.budget_bytes - sum(u.resident_bytes for u in fixed)

    def _fitting_placements(self, unit: ManagedModel) -> list[str]:
        """Placements that a unit has room for, best first."""
        room, free = self._room_bytes(unit), self.accelerator.free_bytes()
        return fitting_placements(unit, room, free, stated=self.budget.vram_limit is not None)

    def _weights(self, unit: ManagedModel, kind: str) -> int:
        return weights_to_hold(unit, kind, self._room_bytes(unit))

    def _make_room(self, unit: ManagedModel, kind: str) -> None:
        """Evict what must leave, of ours by the policy and of the host's by its own."""
        if kind == "cpu":
            return
        need = self._weights(unit, kind)
        evictable = {u: u.resident_bytes for u in self._evictable(unit)}
        others = sum(u.resident_bytes for u in self._units if u not in evictable and u is not unit)
        use = Use(unit, need, unit.working_bytes)
        leaving = choose_shrinks(evictable, self.budget_bytes - others, use, self._uses("size_bytes"))
        for other, missing in leaving.items():
            if missing == evictable[other] or self.shrink(other, missing) < missing:
                self._evict(other)
        self.budget.ask_host(need - unit.resident_bytes + unit.working_bytes)

    def _evict(self, unit: ManagedModel) -> None:
        if unit.placement is None:
            return
        placement, unit.placement, unit.is_leaving = unit.placement, None, False
        left = placement.resident_bytes
        placement.remove()
        self.timeline.record("evict", unit, left)
