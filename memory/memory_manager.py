"""The owners of memory: one MemoryManager for each device of the process.

The managers are the only global state of the pack. A unit is known by its model: all who claim the same model get the
same unit. A unit that nobody refers to any more stays as a cached copy while there is room, and is the first to go.
The VRAM budget limits what a manager keeps on its device. The RAM budget limits what all managers keep in RAM.
"""

from __future__ import annotations

import enum
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from .accelerator import Accelerator, resolve_device
from .errors import release_frames
from .host import management as host
from .host.patcher import HostPatcher
from .planning.forecast import Forecast
from .planning.ram_state import RamState
from .planning.runplan import StagePlan
from .registry import Registry
from .reports.host_models import host_model_reports
from .reports.report import Report, UnitReport
from .residency import Residency
from .sizes import parse_bytes
from .stage import StageRequest, run_stage
from .stage_lock import StageLock
from .vocabulary import ROLES, STRATEGIES, Role
from .watch import Watch
from .weights.branches import ActiveAdapters, keys_of
from .weights.unit import ManagedModel
from .workload import WorkloadStats

_managers: dict[torch.device, MemoryManager] = {}
_managers_lock = threading.Lock()
_lock = threading.RLock()  # of all managers, since they share the RAM

_LOOK_SECONDS = 2.0  # seconds between two checks whether other programs want RAM
_PATIENCE_SECONDS = 1.0  # seconds that a finalizer waits for the lock before it leaves the work to the watch
_SOON_SECONDS = 0.02  # seconds until the next check while a manager is at work, or the host is about to unload


def manager(device: str | torch.device = "auto") -> MemoryManager:
    """Return the one manager of a device. Raises RuntimeError in a forked process, see `refuse_fork`."""
    refuse_fork()
    found = resolve_device(device)
    with _managers_lock:
        if found not in _managers:
            _managers[found] = MemoryManager(found)
        return _managers[found]


def refuse_fork() -> None:
    """Raise RuntimeError in a process that was forked from one with managers.

    Their threads do not exist there, and their locks may be held forever.
    """
    if any(each.process != os.getpid() for each in _managers.values()):
        raise RuntimeError(
            "this process was forked from one that uses Ballast, whose threads and device it does not have. Start it "
            "with multiprocessing's 'spawn', and open the pipeline there."
        )


def managers() -> list[MemoryManager]:
    """Return all managers that exist by now."""
    return list(_managers.values())


class _DropRequest(enum.Enum):
    """The state of a request of the host to drop copies in RAM that nobody refers to."""

    NONE = "none"
    ASKED = "asked"  # to be done as soon as no prompt runs
    DONE = "done"  # once; copies that the host stops referring to within `_LOOK_SECONDS` are dropped too


def _check_ram() -> float | None:
    """Drop copies in RAM that nobody refers to. Return the seconds until the next check, None if no copy is left.

    Called by the watch's thread.
    """
    if not _lock.acquire(blocking=False):
        return _SOON_SECONDS  # another thread is at work
    try:
        for each in managers():
            each._drop_unneeded()
        if any(each._drop_request is _DropRequest.ASKED for each in managers()):
            return _SOON_SECONDS
        return _LOOK_SECONDS if any(unit.host_bytes and unit.reloadable for unit in Registry.everyone()) else None
    finally:
        _lock.release()


_watch = Watch(_check_ram)


class MemoryManager:
    """Loads units onto one device within a budget, and evicts them again. Use `manager()` to get it."""

    def __init__(self, device: torch.device) -> None:
        self.process = os.getpid()  # the process that made it
        self.accelerator = Accelerator(device)
        self.device = device
        self._registry = Registry()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._residency = Residency(self.accelerator, self._registry)
        self.budget, self.timeline = self._residency.budget, self._residency.timeline
        self._patchers: weakref.WeakKeyDictionary[ManagedModel, HostPatcher[ManagedModel]] = weakref.WeakKeyDictionary()
        self._kept_patchers: list[HostPatcher[ManagedModel]] = []  # those of shared units, see `_tell_host`
        self._drop_request = _DropRequest.NONE
        self._dropped_at = 0.0  # `time.monotonic` when the request was done
        self._clock = itertools.count(1)
        self._lock = _lock  # one for all managers: a change of one may drop copies of another
        self._stage_lock = StageLock()

    def limit(self, vram: int | str | None = None, ram: int | str | None = None) -> None:
        """Set the budgets: bytes, "6GB", or None for what is free less the reserve.

        Copies in RAM beyond the new budget are dropped soon, in another thread.
        """
        self.budget.vram_limit = None if vram is None else parse_bytes(vram)
        self.budget.ram_limit = None if ram is None else parse_bytes(ram)
        _watch.wake()

    @property
    def budget_bytes(self) -> int:
        """Bytes of VRAM that weights may hold."""
        return self.budget.vram_bytes

    @property
    def ram_budget_bytes(self) -> int:
        """Bytes of RAM that weights may hold."""
        return self.budget.ram_bytes

    @property
    def disk_bytes_read(self) -> int:
        """Bytes of weights that have been read from files so far."""
        return self._residency.host_cache.disk_bytes

    @property
    def device_bytes_in(self) -> int:
        """Bytes of weights that have been copied to the device so far."""
        return self._residency.device_bytes_in

    def claim(self, key: Hashable, make: Callable[[], ManagedModel], owner: object) -> ManagedModel:
        """Return the unit known by `key`, made by `make` if there is none.

        The unit belongs to `owner`, among others, for as long as that object lives. Without owners it is a cached copy.
        A cached copy that belongs to another device's manager is taken over.
        """
        with self._lock:
            unit = self._registry.find(key)
            if unit is None:
                unit = next((found for other in managers() if (found := other._give(key))), None) or make()
                unit.key = key
                self._registry.add(unit)
            unit.owners.add(owner)
            if owner not in self._owners:
                self._owners.add(owner)
                weakref.finalize(owner, self._owner_is_gone).atexit = False
        return unit

    def _owner_is_gone(self) -> None:
        """Evict and drop the units of an owner that has ended. Called by its finalizer."""
        # A finalizer runs in any thread. That thread may hold a lock for which the holder of this one waits: so do not
        # wait for long.
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                self._drop_unneeded()
            finally:
                self._lock.release()
        _watch.wake()

    def _drop_unneeded(self) -> None:
        """Evict and drop cached copies that the budgets have no room for, or the host asked to drop.

        Called under the lock.
        """
        self._residency.tidy()
        # The host unloads between two prompts, and forgets cached outputs then. References that end within a prompt
        # have other reasons.
        if self._drop_request is not _DropRequest.NONE and not host.is_busy():
            self._residency.host_cache.drop_cached(ROLES)
            if self._drop_request is _DropRequest.ASKED:
                self._drop_request, self._dropped_at = _DropRequest.DONE, time.monotonic()
        is_over = host.is_busy() or time.monotonic() > self._dropped_at + _LOOK_SECONDS
        if self._drop_request is _DropRequest.DONE and is_over:
            self._drop_request = _DropRequest.NONE

    def _give(self, key: Hashable) -> ManagedModel | None:
        """Hand a cached copy over to another manager. None if there is none, or if it is in use."""
        unit = self._registry.find(key)
        if unit is None or not unit.is_cached or unit.leases or unit.pinned:
            return None
        self._residency.evict(unit)
        self._registry.remove(unit)
        return unit

    def adopt(self, unit: ManagedModel) -> ManagedModel:
        """Take a unit under management. A unit without a key lives as long as its maker keeps it."""
        with self._lock:
            self._registry.add(unit)
        return unit

    def pin(self, unit: ManagedModel, pinned: bool = True) -> None:
        """Keep a unit on the device once it is there, until it is unpinned."""
        unit.pinned = pinned

    def set_adapters(self, unit: ManagedModel, adapters: ActiveAdapters) -> None:
        """Set the adapters that a unit runs with from now on. The unit is evicted if they are new to it.

        Raises RuntimeError while the unit is leased, unless only strengths change.
        """
        with self._lock:
            if keys_of(adapters) != keys_of(unit.active_adapters) and not unit.leases:
                self._residency.evict(unit)
            unit.set_adapters(adapters)

    def convert(self, units: Iterable[ManagedModel]) -> None:
        """Convert the weights of units that are to be, where the files are missing. A leased unit stays as it is.

        Raises OSError, in one line, if a file cannot be written.
        """
        with self._lock:
            for unit in units:
                self.adopt(unit)
                self._residency.convert(unit)

    def schedule(self, units: Sequence[ManagedModel] | None, host_roles: Sequence[Role] | None = None) -> None:
        """Set the units that will run, in order, as far as the graph tells; None when they are not known.

        `host_roles` are the roles of the host's own models that will run. Each `use` strikes its unit from the front.
        """
        with self._lock:
            self._residency.schedule.set(units)
            self.budget.host_roles = host_roles

    @contextmanager
    def use(self, unit: ManagedModel, strategy: str = "auto", *, alone: bool = False) -> Iterator[nn.Module]:
        """Yield a lease: the unit's module, in place and ready to run under inference mode, until the block ends.

        `strategy` names a placement, or leaves the choice to the manager. With `alone` every other unit that may leave
        is evicted first. Afterwards the unit stays on the device, free to be evicted. If the block raises, it is
        evicted. Raises DoesNotFitError when no placement fits the budget.
        """
        with self._lock:
            self.strike(unit)
            others = [other for other in self._registry.units() if other is not unit] if alone else []
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
        """Put a unit in place and count a lease. `release` must follow, unless this raises.

        Units of `instead_of` are evicted if they may leave. With `anew` a unit that is in place already is fitted to
        its present workload. Raises ValueError for an unknown strategy, DoesNotFitError when no placement fits.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}. Use {', '.join(STRATEGIES)}.")
        with self._lock:
            self.adopt(unit)
            unit.runs_on(self.execution_device(strategy))
            unit.last_use = next(self._clock)
            unit.leases += 1
            try:
                self._residency.ensure_resident(unit, strategy, instead_of, anew)
                self._tell_host(unit)
                self._residency.host_cache.read_ahead()
                self._residency.before_call(unit)
            except BaseException:
                self.release(unit, evict=True, failed=True)
                raise

    def release(self, unit: ManagedModel, *, evict: bool = False, failed: bool = False) -> None:
        """End a lease. With `evict` the unit leaves the device if this was the last one.

        With `failed` the measurements of the run are not kept.
        """
        with self._lock:
            unit.leases -= 1
            try:
                self._residency.after_call(unit, failed)  # a listener of the timeline may raise the user's interrupt
            finally:
                if unit.leases == 0 and (evict or unit in self._residency.leaving):
                    self._residency.evict(unit)
                if unit.leases == 0 and unit.placement is None:
                    self._residency.host_cache.keep_budget(unit)
                if failed and evict:
                    self._residency.host_cache.cancel_reads()
                else:
                    self._residency.host_cache.read_ahead()

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
        then: Sequence[ManagedModel] | None = None,
    ) -> Iterator[None]:
        """Run a graph step: each unit is placed when its module is called, and all leave when the block ends.

        Stages run one at a time, in whatever thread (see `calling`). A call that runs out of memory is tried again in
        less (see `planning.oom_fallback`). DoesNotFitError is raised when no fallback is left.

        - `work` is the key of the workload's size, so that measurements of one size are not expected of another.
        - `forecast` is the result of a dry run. `planned` goes into the record.
        - With `alone` a call evicts all other units, otherwise only those of the stage. Units that take turns in each
          step stay beside each other if there is room.
        - `vram` and `ram` are budgets in bytes for this stage.
        - `then` are the units that run after it, ahead of those set by `schedule`. None means that they are not known.
        - With `keep` its units stay when the block ends well, to be evicted when others need the room.

        However the block ends, nothing that it leased stays leased.
        """
        request = StageRequest(name, units, strategy, work, forecast, planned, alone, keep)
        coming = self._residency.schedule.of_stage(units, then)
        with self._stage_lock:
            self._residency.clear_cached_tensors()
            with self.budget.for_stage(vram, ram), coming, run_stage(self, request):
                yield

    def between_stages(self) -> AbstractContextManager[Any]:
        """Wait until the stages of other threads are done, and hold off new ones until the block ends."""
        return self._stage_lock

    def calling(self) -> AbstractContextManager[None]:
        """Mark a stage as being in its caller's code, such as `on_step`, until the block ends.

        That code may wait for other threads. If it does not return within a minute, stages that these begin get a
        RuntimeError. See `StageLock`.
        """
        return self._stage_lock.calling()

    def units(self) -> list[ManagedModel]:
        """Return all units under management."""
        with self._lock:
            self._registry.forget()
            return self._registry.units()

    def execution_device(self, strategy: str) -> torch.device:
        """Return the device on which a unit runs under a strategy."""
        return torch.device("cpu") if strategy == "cpu" else self.device

    def take_turns(self, units: Sequence[ManagedModel]) -> AbstractContextManager[None]:
        """Let the units of a stage that take turns stay beside each other until the block ends, if there is room."""
        return self._residency.take_turns(units)

    def shrink_for_stage(self, units: Sequence[ManagedModel], strategy: str, idle_bytes: int) -> None:
        """Make the weights on the device keep the present budget, before a stage of these units begins.

        `idle_bytes` is what the stage holds before it calls any of them.
        """
        with self._lock:
            self._residency.shrink_for_stage(units, strategy, idle_bytes)

    @property
    def work(self) -> WorkloadStats:
        """The workloads of the units, and what their calls were seen to take."""
        return self._residency.work

    def strike(self, unit: ManagedModel) -> None:
        """Take the next use of a unit off the schedule."""
        with self._lock:
            self._residency.schedule.strike(unit)

    def ram_room(self) -> int:
        """Return the RAM that could be had beside weights if all host copies that can be read again were dropped."""
        with self._lock:
            return self._residency.host_cache.room_bytes()

    def ram_state(self, ram_bytes: int | None = None) -> RamState:
        """Return what RAM holds now, for plans within `ram_bytes`, by default the present RAM budget."""
        with self._lock:
            return self._residency.host_cache.state(ram_bytes)

    def make_ram_room(self, wanted_bytes: int) -> int:
        """Drop host copies until `wanted_bytes` of RAM are free beside weights, or all that may go are gone.

        Return the bytes that are free then.
        """
        with self._lock:
            return self._residency.host_cache.make_ram_room(wanted_bytes)

    # Requests of the host, from any thread. See [Note: Host shrink during a call].

    def shrink(self, unit: ManagedModel, bytes: int) -> int:
        """Evict groups of a unit that do not run. Return the bytes really freed, which may be fewer than `bytes`."""
        with self._lock:
            return self._residency.shrink(unit, bytes)

    def grow(self, unit: ManagedModel, bytes: int) -> int:
        """Keep up to `bytes` more of a unit's groups on the device. Return the bytes taken."""
        with self._lock:
            return unit.placement.grow(bytes) if unit.placement and bytes > 0 else 0

    def evict_when_idle(self, unit: ManagedModel) -> None:
        """Evict a unit. If it is leased, evict the groups that do not run now, and the others when its last lease ends.

        A pinned unit stays.
        """
        with self._lock:
            if unit.leases and not unit.pinned:
                self.shrink(unit, unit.resident_bytes)
                self._residency.leaving.add(unit)
            else:
                self.evict(unit)

    def drop_unclaimed(self) -> None:
        """Drop copies in RAM that nobody refers to, as soon as no prompt runs.

        Returns at once, and may be called from any thread.
        """
        self._drop_request = _DropRequest.ASKED
        _watch.wake()

    def evict(self, unit: ManagedModel) -> None:
        """Evict a unit from the device, unless it is leased or pinned."""
        with self._lock:
            if not (unit.leases or unit.pinned):
                self._residency.evict(unit)

    def end_stage(self, units: Sequence[ManagedModel], keep: bool) -> None:
        """End a stage: evict its units. With `keep` they stay, as do pinned and leased ones."""
        with self._lock:
            for unit in units:
                if not (keep or unit.pinned or unit.leases):
                    self._residency.evict(unit)
                    self._residency.host_cache.keep_budget(unit)
                else:
                    self._residency.settle(unit)
        _watch.wake()

    def stop_reading(self, units: Sequence[ManagedModel] | None = None) -> None:
        """Cancel reads to RAM for these units, by default for all, except for units in place."""
        with self._lock:
            self._residency.host_cache.cancel_reads(units)

    def free(self, roles: Iterable[Role] | None = None, bytes: int | None = None) -> int:
        """Evict units that are neither leased nor pinned, least recently used first.

        Return the bytes of the device freed. `roles` restricts the units. With `bytes` it stops when that much is free.
        Without, cached copies are dropped from RAM too. Raises ValueError for unknown roles.
        """
        wanted = set(ROLES if roles is None else roles)
        if unknown := wanted - set(ROLES):
            raise ValueError(f"unknown roles {', '.join(sorted(unknown))}. Roles are {', '.join(ROLES)}.")
        with self._lock:
            freed = self._residency.free(wanted, bytes)
            if bytes is None:
                self._residency.host_cache.drop_cached(wanted)
            return freed

    def make_device_room(self) -> None:
        """Evict all units that may leave the device. Nothing is dropped from RAM."""
        with self._lock:
            self._residency.free(ROLES)

    def report(self) -> Report:
        """Return the units, tiers, bytes and budgets as they are now."""
        with self._lock:
            units = sorted(self.units(), key=lambda unit: (unit.label, unit.name))
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
                guests=host_model_reports(self.device),
                driver_bytes=self.accelerator.driver_bytes(),
                sampled=self.timeline.newest_sampling,
            )

    def _tell_host(self, unit: ManagedModel) -> None:
        """Put a unit that is on the host's device in the host's list."""
        if not (unit.resident_bytes and host.lists_units(self.device)):
            return
        # The end of a patcher changes the host's list, which must not happen while the host iterates over it. The units
        # that have a key are shared, and may die in any thread: `_kept_patchers` keeps their patchers until this line.
        self._kept_patchers = [patcher for patcher in self._kept_patchers if patcher.unit is not None]
        if (patcher := self._patchers.get(unit)) is None:
            patcher = self._patchers[unit] = HostPatcher(self, unit, host.device() or self.device)
            if unit.key is not None:
                self._kept_patchers.append(patcher)
        patcher.target_bytes = unit.resident_bytes
        host.list_unit(patcher, self.work.working_bytes(unit))
