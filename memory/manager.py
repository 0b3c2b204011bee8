"""MemoryManager: who holds the memory of one device.

There is one manager for each device of the process, and they are the only global state of the pack. A unit is known by
what it is: all who claim the same model get the same unit. One that nobody refers to any more stays as a cached copy
while there is room, and is the first to go. What a manager keeps on its device is bounded by the budget, what all of
them keep in RAM by the RAM budget.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

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
from .stage import run_stage
from .stage_lock import StageLock
from .vocabulary import ROLES, STRATEGIES, Role
from .watch import Watch
from .weights.branches import ActiveAdapters, keys_of
from .weights.unit import ManagedModel
from .workload import WorkloadStats

_managers: dict[torch.device, MemoryManager] = {}
_managers_lock = threading.Lock()
_lock = threading.RLock()  # of all managers: they share the RAM

_LOOK_SECONDS = 2.0  # between two looks at the RAM that others want
_PATIENCE_SECONDS = 1.0  # after which the watch does it
_SOON_SECONDS = 0.02  # where the host is about to unload, or a manager is at work


def manager(device: str | torch.device = "auto") -> MemoryManager:
    """Return the one manager of a device. Raises RuntimeError as `refuse_fork`."""
    refuse_fork()
    found = resolve_device(device)
    with _managers_lock:
        if found not in _managers:
            _managers[found] = MemoryManager(found)
        return _managers[found]


def refuse_fork() -> None:
    """Raise RuntimeError in a process forked from one with managers: their threads are not there, locks may be held."""
    if any(each.process != os.getpid() for each in _managers.values()):
        raise RuntimeError(
            "this process was forked from one that uses Ballast, whose threads and device it does not have. Start it "
            "with multiprocessing's 'spawn', and open the pipeline there."
        )


def managers() -> list[MemoryManager]:
    """All managers that exist by now."""
    return list(_managers.values())


def _tidy() -> float | None:
    """Drop copies that nobody asks for. Return the seconds until the next look, or None if nothing is left."""
    if not _lock.acquire(blocking=False):
        return _SOON_SECONDS  # somebody is at it
    try:
        for each in managers():
            each._tidy()
        if any(each._unloading == "asked" for each in managers()):
            return _SOON_SECONDS
        return _LOOK_SECONDS if any(unit.host_bytes and unit.reloadable for unit in Registry.everyone()) else None
    finally:
        _lock.release()


_watch = Watch(_tidy)


class MemoryManager:
    """Loads units onto one device within a budget, and takes them away again. Use `manager()` to get it."""

    def __init__(self, device: torch.device) -> None:
        self.process = os.getpid()  # that it belongs to
        self.accelerator = Accelerator(device)
        self.device = device
        self._registry = Registry()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._residency = Residency(self.accelerator, self._registry)
        self.budget, self.timeline = self._residency.budget, self._residency.timeline
        self._patchers: weakref.WeakKeyDictionary[ManagedModel, HostPatcher[ManagedModel]] = weakref.WeakKeyDictionary()
        self._told: list[HostPatcher[ManagedModel]] = []  # all that the host may still have in its list
        self._unloading: Literal["", "asked", "done"] = ""  # of copies in RAM, on the host's request
        self._unloaded_at = 0.0
        self._clock = itertools.count(1)
        self._lock = _lock
        self._stage_lock = StageLock()

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

    @property
    def disk_bytes_read(self) -> int:
        """Bytes of weights that have been read from files so far."""
        return self._residency.host_cache.disk_bytes

    @property
    def device_bytes_in(self) -> int:
        """Bytes of weights that have come to the device so far."""
        return self._residency.device_bytes_in

    def claim(self, key: Hashable, make: Callable[[], ManagedModel], owner: object) -> ManagedModel:
        """Return the unit of a model that is known by `key`; made where there is none, with that key.

        It is the owner's, among others, for as long as the owner lives, and a cached copy afterwards. A cached copy of
        the same model is taken over from the manager of another device.
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
        # Called by whoever deleted it, wherever that was, perhaps with a lock that the holder of this one waits for.
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                self._tidy()
            finally:
                self._lock.release()
        _watch.wake()

    def _tidy(self) -> None:
        self._residency.tidy()
        # The host obeys between two prompts, and then lets go of what it remembers; in a prompt that has other reasons.
        if self._unloading and not host.is_busy():
            self._residency.host_cache.drop_cached(ROLES)
            if self._unloading == "asked":
                self._unloading, self._unloaded_at = "done", time.monotonic()
        if self._unloading == "done" and (host.is_busy() or time.monotonic() > self._unloaded_at + _LOOK_SECONDS):
            self._unloading = ""

    def _give(self, key: Hashable) -> ManagedModel | None:
        """Hand a cached copy over to another manager."""
        unit = self._registry.find(key)
        if unit is None or not unit.is_cached or unit.leases or unit.pinned:
            return None
        self._residency.evict(unit)
        self._registry.remove(unit)
        return unit

    def adopt(self, unit: ManagedModel) -> ManagedModel:
        """Take a unit under management. One without a key lives as long as its maker keeps it."""
        with self._lock:
            self._registry.add(unit)
        return unit

    def pin(self, unit: ManagedModel, pinned: bool = True) -> None:
        """Keep a unit on the device, once it is there, until it is unpinned."""
        unit.pinned = pinned

    def set_adapters(self, unit: ManagedModel, adapters: ActiveAdapters) -> None:
        """Set the adapters that a unit runs with from now on. It leaves the device if they are new to it.

        RuntimeError while it is leased, unless only their strengths change.
        """
        with self._lock:
            if keys_of(adapters) != keys_of(unit.active_adapters) and not unit.leases:
                self._residency.evict(unit)
            unit.set_adapters(adapters)

    def keep_made(self, units: Iterable[ManagedModel]) -> None:
        """Encode the weights of units into the files that these are to have (`made_file`) and have not yet.

        A disk that cannot be written is a warning. A unit that is leased stays as it is.
        """
        with self._lock:
            for unit in units:
                self.adopt(unit)
                self._residency.keep_made(unit)

    def schedule(self, units: Sequence[ManagedModel] | None, host_roles: Sequence[Role] | None = None) -> None:
        """Return the units that will run, in order, as far as the graph tells; None when it is not known.

        `host_roles` are those of the host's own models that will run. Each `use` strikes its unit from the front.
        """
        with self._lock:
            self._residency.schedule.set(units)
            self.budget.host_roles = host_roles

    @contextmanager
    def use(self, unit: ManagedModel, strategy: str = "auto", *, alone: bool = False) -> Iterator[nn.Module]:
        """Yield a lease: the unit's module, in place and ready to run under inference mode, until the block ends.

        `strategy` names a placement, or leaves the choice to the manager; with `alone` every other unit that may leave
        does so first. The unit stays in place afterwards, free to be evicted; if the block raises, it leaves.
        Raises DoesNotFitError when no placement fits the budget.
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
                self._residency.bring(unit, strategy, instead_of, anew)
                self._tell_host(unit)
                self._residency.host_cache.read_ahead()
                self._residency.runs(unit)
            except BaseException:
                self.release(unit, evict=True, failed=True)
                raise

    def release(self, unit: ManagedModel, *, evict: bool = False, failed: bool = False) -> None:
        """End a lease; with `evict` the unit leaves the device when it was the last one.

        What a run that `failed` took tells nothing, and is not remembered.
        """
        with self._lock:
            unit.leases -= 1
            try:
                self._residency.ran(unit, failed)  # who is told of it may raise the user's interrupt
            finally:
                if unit.leases == 0 and (evict or self._residency.is_leaving(unit)):
                    self._residency.evict(unit)
                if unit.leases == 0 and unit.placement is None:
                    self._residency.host_cache.keep_budget(unit)
                if failed and evict:
                    self._residency.host_cache.stop()
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
        """Run a graph step: each unit comes when its module is called, and all are gone when the block ends.

        Stages run one at a time, whatever thread they are of (see `calling`). A call that runs out of memory is tried
        again in less (see `ladder`); DoesNotFitError when there are none left.
        `work` tells sizes of work apart, so that what was measured for one is not expected of another; `forecast` is
        what it will take, and `planned` goes into the record. Of the stage's units one is on the device at a time, with
        `alone` of all units; but units that take turns in each step stay beside each other where there is room.
        `vram` and `ram` are budgets in bytes for this stage. `then` are the units that run after it, before those that
        `schedule` was told; None where that is not known. With `keep` its units stay when the block ends well, to be
        evicted when others need the room. However the block ends, nothing that it leased stays leased.
        """
        run = run_stage(
            self, name, units, strategy, work=work, forecast=forecast, planned=planned, alone=alone, keep=keep
        )
        coming = self._residency.schedule.of_stage(units, then)
        with self._stage_lock, self.budget.narrowed(vram, ram, units), coming, run:
            yield

    def between_stages(self) -> AbstractContextManager[Any]:
        """Wait until the stages of other threads are done, and keep them waiting until the block ends."""
        return self._stage_lock

    def calling(self) -> AbstractContextManager[None]:
        """Until the block ends a stage is in its caller's code, such as `on_step`, which may wait for other threads.

        Stages that these begin are refused after a while (RuntimeError) where the code does not return.
        """
        return self._stage_lock.calling()

    def units(self) -> list[ManagedModel]:
        """All units under management."""
        with self._lock:
            self._registry.forget()
            return self._registry.units()

    def execution_device(self, strategy: str) -> torch.device:
        """Where a unit runs under a strategy."""
        return torch.device("cpu") if strategy == "cpu" else self.device

    def take_turns(self, units: Sequence[ManagedModel]) -> AbstractContextManager[None]:
        """Until the block ends let those of a stage's units that take turns in each step stay, where there is room."""
        return self._residency.take_turns(units)

    def fit(self, units: Sequence[ManagedModel], strategy: str, idle_bytes: int) -> None:
        """Make the weights on the device keep the present budget, for a stage of these units.

        Before it calls any of them the stage holds `idle_bytes`.
        """
        with self._lock:
            self._residency.fit(units, strategy, idle_bytes)

    @property
    def work(self) -> WorkloadStats:
        """The workload of the units, and the memory that it takes beside their weights."""
        return self._residency.work

    def strike(self, unit: ManagedModel) -> None:
        """Take the next use of a unit off the schedule."""
        with self._lock:
            self._residency.schedule.strike(unit)

    def ram_room(self) -> int:
        """RAM in bytes that could be had beside weights, if host copies that can be read again were dropped."""
        with self._lock:
            return self._residency.host_cache.room_bytes()

    def ram_state(self, ram_bytes: int | None = None) -> RamState:
        """Return what RAM holds now, for plans in a RAM budget, by default the present one."""
        with self._lock:
            return self._residency.host_cache.state(ram_bytes)

    def make_ram_room(self, wanted_bytes: int) -> int:
        """Drop host copies until so much RAM is free beside weights, or all that may go are gone. Returns what is."""
        with self._lock:
            return self._residency.host_cache.make_room(wanted_bytes)

    # What the host asks for, from any thread

    def shrink(self, unit: ManagedModel, bytes: int) -> int:
        """Evict groups of a unit that do not run. Return the bytes really freed, which may be fewer, or none."""
        with self._lock:
            return self._residency.shrink(unit, bytes)

    def grow(self, unit: ManagedModel, bytes: int) -> int:
        """Keep up to `bytes` more of a unit's groups. Return the bytes taken."""
        with self._lock:
            return unit.placement.grow(bytes) if unit.placement and bytes > 0 else 0

    def let_go(self, unit: ManagedModel) -> None:
        """Take a unit off the device: at once, or what does not run of it at once and the rest when its lease ends."""
        with self._lock:
            if unit.leases and not unit.pinned:
                self.shrink(unit, unit.resident_bytes)
                self._residency.leave_soon(unit)
            else:
                self.evict(unit)

    def unload(self) -> None:
        """Drop copies in RAM that nobody refers to, now and later, as soon as no prompt runs.

        Returns at once, and may be called from any thread.
        """
        self._unloading = "asked"
        _watch.wake()

    def evict(self, unit: ManagedModel) -> None:
        """Take a unit off the device, unless it is leased or pinned."""
        with self._lock:
            if not (unit.leases or unit.pinned):
                self._residency.evict(unit)

    def leave(self, units: Sequence[ManagedModel], keep: bool) -> None:
        """End of a stage: its units go, unless they are kept or pinned."""
        with self._lock:
            for unit in units:
                if not (keep or unit.pinned or unit.leases):
                    self._residency.evict(unit)
                    self._residency.host_cache.keep_budget(unit)
                else:
                    self._residency.settle(unit)
        _watch.wake()

    def stop_reading(self, units: Sequence[ManagedModel] | None = None) -> None:
        """Give up what is being read to RAM of these units, by default of all, but not of those in place."""
        with self._lock:
            self._residency.host_cache.stop(units)

    def free(self, roles: Iterable[Role] | None = None, bytes: int | None = None) -> int:
        """Evict units that are neither leased nor pinned, least recently used first.

        `roles` restricts them; with `bytes` it stops when so much is free, and without, cached copies leave RAM too.
        Returns the bytes of the device that were really freed.
        """
        wanted = set(ROLES if roles is None else roles)
        if unknown := wanted - set(ROLES):
            raise ValueError(f"unknown roles {', '.join(sorted(unknown))}. Roles are {', '.join(ROLES)}.")
        with self._lock:
            freed = self._residency.free(wanted, bytes)
            if bytes is None:
                self._residency.host_cache.drop_cached(wanted)
            return freed

    def make_room(self) -> None:
        """Evict all that may leave the device. Nothing leaves RAM."""
        with self._lock:
            self._residency.free(ROLES)

    def report(self) -> Report:
        """Units, tiers, bytes and budgets, as they are now."""
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
            )

    def _tell_host(self, unit: ManagedModel) -> None:
        """List a unit that is on the host's device with the host."""
        if not (unit.resident_bytes and host.lists_units(self.device)):
            return
        # Patchers of units that were shared end here and nowhere else: their end changes the host's list, which must
        # not happen while the host goes through it, in whatever thread.
        self._told = [patcher for patcher in self._told if patcher.unit is not None]
        if unit not in self._patchers:
            self._patchers[unit] = HostPatcher(self, unit, host.device() or self.device)
            if unit.key is not None:
                self._told.append(self._patchers[unit])
        self._patchers[unit].target_bytes = unit.resident_bytes
        host.list_unit(self._patchers[unit], self.work.working_bytes(unit))
