"""The units on one device: how they come, sit, shrink and leave. Mechanism, without leases and without a lock.

`planning.eviction` and `planning.fit` decide what leaves for what. `MemoryManager` decides when, and holds its lock
around all of this.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from .accelerator import Accelerator
from .budget import Budget
from .engine.engine import Engine
from .engine.placement import Cpu, Placement
from .errors import DoesNotFitError, is_out_of_memory, release_frames
from .host_cache import HostCache, InRam
from .planning.eviction import Use, choose_shrinks
from .planning.fit import Demand, fitting_placements, ram_groups, sizes_of, turns_of, why_nothing_fits
from .planning.planner import meant_by, weights_on_cpu, window_bytes
from .planning.solver import Layout
from .planning.turns import beside_each_other
from .registry import Registry
from .reports.host_models import host_models_on
from .reports.timeline import OnDevice, Timeline
from .schedule import Schedule
from .sizes import format_bytes
from .vocabulary import ROLES, Role
from .weights.made_file import trim_made
from .weights.unit import ManagedModel
from .workload import Workload, WorkloadStats

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class _Before:
    """The device as it was when a call began."""

    allocated_bytes: int
    beside_bytes: int  # of these, that its stage held beside weights
    weights_bytes: int  # that the unit had there
    dequantized: frozenset[int]  # its groups that were kept so


@dataclass
class _Seat:
    """What is known of one unit that is in place, or was."""

    is_leaving: bool = False  # as soon as it does not run
    fitted_for: Hashable = None  # the working memory and the seconds that its placement was made for
    before: _Before | None = None  # the call that is under way, while what it takes can be told
    timed: Workload | None = None  # the work of the call that is timed


class Residency:
    """The units of one manager that are on its device, or are to be."""

    def __init__(self, accelerator: Accelerator, registry: Registry) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.registry, self.units = registry, registry.units
        self.budget = Budget(accelerator, registry)
        self.schedule = Schedule()
        self.timeline = Timeline(accelerator, self._on_device, lambda: host_models_on(accelerator.device))
        self.device_bytes_in = 0
        self.work = WorkloadStats()
        self.host_cache = HostCache(accelerator, registry, self.budget, self.timeline, self.schedule, self.work)
        self._seats: weakref.WeakKeyDictionary[ManagedModel, _Seat] = weakref.WeakKeyDictionary()
        # The units of the present stage that take turns in each step and stay meanwhile, with the least that they hold.
        self._beside: dict[ManagedModel, int] = {}

    @contextmanager
    def take_turns(self, units: Collection[ManagedModel]) -> Iterator[None]:
        """Until the block ends let those of the units that take turns in each step stay, if that brings less."""
        if self.accelerator.is_cpu:
            yield
            return
        doing = {unit: self.work.of(unit) for unit in units}
        works = {unit: each.forecast for unit, each in doing.items() if each.forecast and each.forecast.turns > 1}
        before, self._beside = self._beside, {}
        if len(works) > 1 and not any(doing[u].attempt.strategy == "cpu" or not doing[u].attempt.share for u in works):
            working = {unit: self.work.working_bytes(unit) for unit in works}
            wanted = sum(sizes_of(unit).resident_bytes for unit in works) + max(working.values())
            self.budget.ask_host(min(wanted, self.budget.vram_limit or sys.maxsize) - self._held_bytes(works))
            self._beside = beside_each_other(
                {
                    unit: turns_of(
                        sizes_of(unit), work, doing[unit].attempt.strategy, self._free_room() - working[unit]
                    )
                    for unit, work in works.items()
                }
            )
        for unit in self._beside:
            self.work.stays(unit)
        try:
            yield
        finally:
            self._beside = before

    def bring(self, unit: ManagedModel, strategy: str, instead_of: Collection[ManagedModel], anew: bool) -> None:
        """Put a unit in place for a call; of `instead_of` leaves what may. See `MemoryManager.acquire`."""
        alone = unit.leases == 1
        self._learn(unit)
        seat = self._seat(unit)
        refit = anew or seat.fitted_for != self._fit_of(unit)
        if alone and self._must_move(unit, strategy, with_ram=anew):
            self.evict(unit)
        if self.work.of(unit).attempt.alone:
            self._beside = {}
        for other in self.evictable(unit):
            if other in instead_of and other not in self._partners(unit):
                self.evict(other)
        if unit.placement is None:
            self._place(unit, strategy)
        else:
            if alone and refit:
                self._make_room(unit, unit.placement.name)
                self._resize(unit)
            self._complete(unit, alone)
        seat.fitted_for = self._fit_of(unit)

    def fit(self, units: Collection[ManagedModel], strategy: str, idle_bytes: int) -> None:
        """Make room for a stage of these units to begin within its budget, whatever earlier runs have left.

        Before it calls any of them it holds `idle_bytes`.
        """
        for unit in units:
            if unit.placement is None or unit.leases:
                continue
            if self._must_move(unit, strategy):
                self.evict(unit)
            else:
                self._resize(unit, grow=False)
        self._shrink_for(Use(None, 0, idle_bytes), [Use(unit, 0) for unit in units])

    def runs(self, unit: ManagedModel) -> None:
        """Note that a unit is about to run."""
        allocated = self.timeline.record("call", unit).allocated_bytes
        work, placement = self.work.of(unit), unit.placement
        dequantized: frozenset[int] = placement.dequantized if placement else frozenset()
        seat = self._seat(unit)
        seat.before = _Before(allocated, self.budget.brought_by_stage_bytes, unit.resident_bytes, dequantized)
        if placement and work.learns and work.attempt.parts == 1 and unit.leases == 1 and placement.time_call():
            seat.timed = work

    def ran(self, unit: ManagedModel, failed: bool) -> None:
        """Note what its run took. What one that `failed` took tells nothing."""
        seat = self._seat(unit)
        if before := seat.before:
            seat.before = None
            peak = self.timeline.record("ran", unit, self._came(unit)).peak_bytes
            if not failed:  # nor do weights count that were dequantized meanwhile
                measured = peak - before.allocated_bytes - max(0, unit.resident_bytes - before.weights_bytes)
                self.work.took(unit, measured, before.beside_bytes, before.dequantized)
        if unit.placement is not None:
            unit.placement.rest(failed)
            self._learn(unit)
        self.host_cache.ran(unit)

    def shrink(self, unit: ManagedModel, bytes: int) -> int:
        """Evict groups of a unit that do not run. Return the bytes really freed."""
        if unit.placement is None or unit.pinned or (unit.leases and unit.placement.name != "streamed"):
            return 0
        freed = unit.placement.shrink(bytes)
        if freed:
            self._seat(unit).before = None  # what the call under way takes cannot be told any more
            self.timeline.record("evict", unit, freed)
        return freed

    def evict(self, unit: ManagedModel) -> None:
        """Take a unit off the device, leased or not."""
        if unit.placement is None:
            return
        self._seat(unit).is_leaving = False
        self._learn(unit)
        with self.budget.evicting_unit():
            left = unit.resident_bytes
            placement, unit.placement = unit.placement, None
            placement.remove()
        self.timeline.record("evict", unit, left)

    def settle(self, unit: ManagedModel) -> None:
        """Wait for what is still coming of a unit that stays on the device."""
        if unit.placement is not None:
            unit.placement.settle()
            self._came(unit)

    def leave_soon(self, unit: ManagedModel) -> None:
        """Evict a unit as soon as it does not run."""
        self._seat(unit).is_leaving = True

    def is_leaving(self, unit: ManagedModel) -> bool:
        """Return whether a unit is to leave as soon as it does not run."""
        return self._seat(unit).is_leaving

    def free(self, roles: Collection[Role], bytes: int | None = None) -> int:
        """Evict what may leave, in order, until so many bytes are free. Returns those really freed."""
        before = self.accelerator.allocated_bytes()
        for unit in self.evictable():
            if bytes is not None and before - self.accelerator.allocated_bytes() >= bytes:
                break
            if unit.role in roles:
                self.evict(unit)
        gc.collect()
        self.accelerator.empty_cache()
        return max(0, before - self.accelerator.allocated_bytes())

    def evictable(self, wanted: ManagedModel | None = None) -> list[ManagedModel]:
        """Units that may leave the device, least recently used first."""
        free = [u for u in self.units() if u.placement and u is not wanted and not u.leases and not u.pinned]
        return sorted(free, key=lambda unit: unit.last_use)

    def tidy(self) -> None:
        """Evict cached units from the device, and drop copies from RAM that others want by now."""
        for unit in self.registry.cached():
            if unit.placement and not (unit.leases or unit.pinned):
                self.evict(unit)
            unit.clear_adapters()
        self.registry.forget()
        self.host_cache.keep_budget()

    def _must_move(self, unit: ManagedModel, strategy: str, with_ram: bool = True) -> bool:
        """Return whether a unit in place must be placed anew: its weights, or their order, belong elsewhere by now.

        It is divided by other calls than are known by now, or a placement is wanted, or better, that it is not in; or,
        `with_ram`, it has less in RAM than there could be, or more, or its files changed. Where no RAM budget was
        stated, what is in RAM already stays there.
        """
        placement = unit.placement
        if placement is None:
            return False
        if not self.accelerator.is_cpu:
            kinds = [meant_by(strategy, sizes_of(unit))] if strategy != "auto" else self._fitting_placements(unit)[:1]
            if placement.calls != unit.calls or (kinds and kinds[0] != placement.name):
                return True
        if not (with_ram and unit.reloadable):
            return False
        fits = unit.size_bytes <= self.host_cache.left_for(unit, placement.name)
        stated = self.budget.ram_limit is not None or self.accelerator.is_unified
        if unit.in_ram:
            return stated and not fits
        room, held_in = self.host_cache.ram_for(unit, placement.name)[0], self.host_cache.held_in(unit) or 0
        return unit.is_stale() or fits or (stated and held_in != room)

    # How a unit comes

    def _fit_of(self, unit: ManagedModel) -> Hashable:
        return self.work.working_bytes(unit), self.work.of(unit).measured

    def _learn(self, unit: ManagedModel) -> None:
        """Note what the call that was timed computed, if the device is done with it."""
        if unit.placement and (measured := unit.placement.take_seconds()):
            timed_work = self._seat(unit).timed
            assert timed_work is not None
            self.work.computed(unit, timed_work, measured)

    def _place(self, unit: ManagedModel, strategy: str) -> None:
        kinds = ["cpu"] if self.accelerator.is_cpu else [meant_by(strategy, sizes_of(unit))]
        if kinds == ["auto"]:
            partners = self._partners(unit)
            ours = self._held_bytes(u for u in self.evictable(unit) if u not in partners)
            wanted = min(self._wants(unit).need_bytes("resident"), self.budget.vram_limit or sys.maxsize)
            self.budget.ask_host(wanted - ours)
            kinds = self._fitting_placements(unit)
            if not kinds and self.evictable(unit):
                self._beside = {}
                self.free(ROLES)  # they may hold more than their weights
                kinds = self._fitting_placements(unit)
            if not kinds:
                pinned = [u for u in self.units() if u.placement and u.pinned and u is not unit]
                why = why_nothing_fits(
                    self._wants(unit), pinned, str(self.device), self.budget.vram_bytes, self._room_bytes(unit)
                )
                raise DoesNotFitError(why)
        for attempt, kind in enumerate(kinds):
            try:
                self._bring_to_ram(unit, kind)
                self._make_room(unit, kind)
                placement = self._new_placement(unit, kind)
                placement.place()
            except Exception as error:
                short = is_out_of_memory(error) or isinstance(error, DoesNotFitError)
                if not short or attempt + 1 == len(kinds):
                    raise
                release_frames(error)
                self.free(ROLES)
            else:
                unit.placement = placement
                placement.goes_with(unit)
                self._placed(unit)
                return

    def _new_placement(self, unit: ManagedModel, kind: str) -> Placement:
        """Return how a unit is to sit; nothing is moved yet."""
        source, device = None if unit.in_ram else unit.source(), self.device
        if kind == "cpu":
            device = torch.device("cpu")
            if source is None:
                return Cpu(unit.module, device, unit.calls)
        incoming = self.host_cache.incoming(unit)
        return Engine(unit.module, device, self._layout(unit, kind), source, unit.calls, incoming=incoming)

    def _layout(self, unit: ManagedModel, kind: str) -> Layout:
        """Return how the weights of a unit lie best in the room that there is now."""
        demand, weights_bytes = self._demand(unit), self._weights(unit, kind)
        if kind == "cpu":  # all comes through the windows
            loads = replace(demand.loads, ram_bytes=window_bytes(demand.sizes, "streamed"))
            demand = replace(demand, loads=loads)
        return demand.layout(kind, weights_bytes)

    def _bring_to_ram(self, unit: ManagedModel, kind: str) -> None:
        """Bring a unit to RAM for a placement, as far as it belongs there; copies of others go for it.

        Units on the device are evicted last, so that their copies may be dropped.
        """
        wanted, groups, nbytes = self.host_cache.wanted(unit, kind), None, unit.size_bytes
        if wanted is InRam.AS_THEY_ARE:
            self.host_cache.keep_budget(unit)
            if kind == "cpu":
                unit.load()
            return
        if wanted is InRam.GROUPS:
            groups, nbytes = self._ram_groups(unit, kind, self.host_cache.room_for_groups(unit, kind))
            self.host_cache.keep_groups(unit, groups)
        missing_bytes = self.host_cache.missing_bytes(max(0, nbytes - unit.host_bytes))
        for other in [u for u in self.evictable(unit) if u.host_bytes and u.reloadable]:
            if missing_bytes > 0:
                missing_bytes -= other.host_bytes
                self.evict(other)
        self.host_cache.load(unit, kind, nbytes, groups)

    def keep_made(self, unit: ManagedModel) -> None:
        """Encode a unit's weights into their file, if it is to have one and there is none, or it is gone by now.

        Where it cannot be written the weights are encoded in RAM, until the pipeline is opened again.
        """
        if unit.made_file is None or unit.leases:
            return
        if unit.is_stale():
            self.evict(unit)
        unit.check_made()
        if not (unmade := unit.unmade_bytes):
            return
        self.evict(unit)
        takes = format_bytes(unit.size_bytes)
        log.warning("Ballast: encoding %s once, into a file of about %s: %s", unit.name, takes, unit.made_file)
        try:
            unit.keep_made(self.host_cache.looking(unit, unmade, "encoding"))
        except OSError as error:
            release_frames(error)
            log.warning("Ballast: %s is encoded in RAM: %s", unit.name, error)
            unit.made_file = None
            return
        trim_made(unit.made_file.parent, {other.made_file for other in self.units() if other.made_file})

    def _room_bytes(self, unit: ManagedModel) -> int:
        """Return what a unit could have once everything that may leave has left."""
        partners = self._partners(unit)
        return self._free_room(unit, *partners) - self._held_bytes(partners) - self._left_to_partners(unit)

    def _free_room(self, *besides: ManagedModel) -> int:
        """Return what the weights of some units could have together once everything that may leave has left."""
        fixed = (u for u in self.units() if u.placement and u not in besides and (u.leases or u.pinned))
        return self.budget.vram_bytes - self._held_bytes(fixed)

    def _held_bytes(self, units: Iterable[ManagedModel]) -> int:
        return sum(unit.resident_bytes for unit in units)

    def _partners(self, unit: ManagedModel | None) -> list[ManagedModel]:
        """Return the units that take turns with one and do not leave for it."""
        return [other for other in self._beside if other is not unit] if unit in self._beside else []

    def _left_to_partners(self, unit: ManagedModel) -> int:
        """Return the bytes left to the units that take turns with one: weights still to come, and the most work."""
        partners = self._partners(unit)
        weights = sum(max(0, self._beside[other] - other.resident_bytes) for other in partners)
        working = [self.work.working_bytes(each, self.budget.brought_by_stage_bytes) for each in (unit, *partners)]
        return weights + max(working) - working[0]

    def _fitting_placements(self, unit: ManagedModel) -> list[str]:
        """Placements that a unit has room for, best first."""
        room, free = self._room_bytes(unit), self.accelerator.free_bytes()
        return fitting_placements(self._wants(unit), room, free, stated=self.budget.vram_limit is not None)

    def _weights(self, unit: ManagedModel, kind: str) -> int:
        if kind == "cpu":
            return weights_on_cpu(sizes_of(unit), self.host_cache.held_in(unit) or 0)
        room = self._room_bytes(unit)
        if kind == "resident":  # to decode some for good nothing has to go
            room = self.budget.vram_bytes - self._held_bytes(u for u in self.units() if u is not unit)
            room -= self._left_to_partners(unit)
        return self._wants(unit).weights_to_hold(kind, room)

    def _wants(self, unit: ManagedModel) -> Demand:
        return self.work.demand(unit, self.budget.brought_by_stage_bytes)

    def _demand(self, unit: ManagedModel, short: bool = False) -> Demand:
        """Return the demand of a unit where its weights are: in RAM, or as far as it holds them, if it is `short`."""
        demand = self._wants(unit)
        if unit.in_ram and not short:
            return demand
        on_disk = frozenset(range(len(demand.sizes.groups))) - unit.held if not short else frozenset()
        return replace(demand, loads=replace(demand.loads, ram_bytes=self.host_cache.held_in(unit), on_disk=on_disk))

    def _ram_groups(self, unit: ManagedModel, kind: str, spare_bytes: int) -> tuple[frozenset[int], int]:
        if kind == "cpu":  # where what stays is in RAM
            return frozenset(), self._weights(unit, kind) + window_bytes(sizes_of(unit), "streamed")
        return ram_groups(self._demand(unit, short=True), kind, self._weights(unit, kind), spare_bytes)

    def _make_room(self, unit: ManagedModel, kind: str) -> None:
        """Evict what must leave, of ours by the policy and of the host's by its own."""
        if kind == "cpu":
            return
        need = self._weights(unit, kind) if kind == "streamed" else self._wants(unit).least_weights(kind)
        working = self.work.working_bytes(unit, self.budget.brought_by_stage_bytes)
        self._shrink_for(Use(unit, need, working))
        self.budget.ask_host(need - unit.resident_bytes + working)

    def _shrink_for(self, use: Use, coming: list[Use] | None = None) -> None:
        """Shrink units by the policy until a use fits the budget, last those that take turns with its unit.

        `coming` is what runs next where nothing else is known.
        """
        partners = [unit for unit in self._beside if unit is not use.unit]
        for turn in (False, True):
            leaves = [u for u in self.evictable() if u is not use.unit and (u in partners) == turn]
            evictable = {unit: unit.resident_bytes for unit in leaves}
            others = self._held_bytes(u for u in self.units() if u not in evictable and u is not use.unit)
            leaving = choose_shrinks(
                evictable, self.budget.vram_bytes - others, use, self.schedule.uses(self.work.working_bytes) or coming
            )
            for other, missing in leaving.items():
                if missing == evictable[other] or self.shrink(other, missing) < missing:
                    self.evict(other)

    def _resize(self, unit: ManagedModel, grow: bool = True) -> None:
        """Keep more or fewer of a unit's groups, or of them dequantized, as the room and the work now want it."""
        placement = unit.placement
        if placement is None or placement.name == "cpu":
            return
        weights_bytes = self._weights(unit, placement.name)
        if placement.name == "streamed":
            if weights_bytes > unit.resident_bytes and grow:
                # Else groups settle in the gaps that the last call left, and the next one finds none.
                self.accelerator.empty_cache()
            if weights_bytes >= unit.resident_bytes and not grow:
                return
        placement.apply(self._demand(unit).layout(placement.name, weights_bytes))

    def _complete(self, unit: ManagedModel, alone: bool) -> None:
        """Make a unit ready for a call, which may have to be whole, and given others the room of some groups."""
        if unit.placement is None:
            return
        if is_short := unit.placement.name == "resident" and not unit.placement.is_whole:
            self._make_room(unit, "resident")
            if alone:
                self._resize(unit)
        unit.placement.complete(alone)
        if is_short:
            self._placed(unit)

    # What is told

    def _on_device(self) -> tuple[OnDevice, ...]:
        placed = sorted((u for u in self.units() if u.resident_bytes), key=lambda unit: (unit.role, unit.name))
        return tuple(OnDevice(unit.name, unit.role, unit.resident_bytes) for unit in placed)

    def _placed(self, unit: ManagedModel) -> None:
        self.timeline.record("place", unit, self._came(unit))

    def _came(self, unit: ManagedModel) -> int:
        """Count what a unit has brought to the device since this was last asked. Returns the bytes."""
        came = unit.placement.take_bytes_in() if unit.placement else 0
        self.device_bytes_in += came
        self.host_cache.disk_bytes += unit.placement.take_bytes_read() if unit.placement else 0
        return came

    def _seat(self, unit: ManagedModel) -> _Seat:
        return self._seats.setdefault(unit, _Seat())
