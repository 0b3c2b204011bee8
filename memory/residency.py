"""The units on one device: how they are placed, shrunk and evicted. Mechanism, without leases and without a lock.

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
from .weights.conversion import trim
from .weights.reader import Look
from .weights.unit import ManagedModel
from .workload import Workload, WorkloadStats

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class _Before:
    """The state of the device when a call of a unit began."""

    allocated_bytes: int
    beside_bytes: int  # allocated by the stage beside weights
    weights_bytes: int  # of the unit
    dequantized: frozenset[int]  # groups of the unit that were kept dequantized


@dataclass
class _Seat:
    """The record of one unit that is in place, or was."""

    fitted_for: Hashable = None  # the `_workload_key` that its placement was made for
    before: _Before | None = None  # the call under way; None if what it takes cannot be measured
    timed: Workload | None = None  # the workload of the call that is timed


@dataclass(frozen=True)
class _Room:
    """The VRAM that the weights of one unit may take.

        room = budget - other weights - weights to come - extra working memory

    Partners are the units that take turns with it. Example: a budget of 10 GB for weights; a partner holds 2 GB of the
    3 GB that it is to hold, and its calls take 1 GB more than the unit's. The room is 10 - 2 - 1 - 1 = 6 GB.
    """

    budget_bytes: int  # for the weights of all units
    other_weights_bytes: int  # of the units that stay on the device, partners included
    weights_to_come_bytes: int  # that partners have still to bring
    extra_working_bytes: int  # by which the largest working memory among the partners exceeds the unit's own

    @property
    def nbytes(self) -> int:
        """Bytes for weights. Negative if the others alone take more than the budget."""
        taken = self.other_weights_bytes + self.weights_to_come_bytes + self.extra_working_bytes
        return self.budget_bytes - taken


class Residency:
    """The units of one manager: their placements on its device, and the room for them."""

    def __init__(self, accelerator: Accelerator, registry: Registry) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.registry, self.units = registry, registry.units
        self.budget = Budget(accelerator, registry)
        self.schedule = Schedule()
        self.timeline = Timeline(accelerator, self._on_device, lambda: host_models_on(accelerator.device))
        self.device_bytes_in = 0
        self.work = WorkloadStats()
        self.host_cache = HostCache(accelerator, registry, self.budget, self.timeline, self.schedule, self.work)
        self.leaving: weakref.WeakSet[ManagedModel] = weakref.WeakSet()  # to be evicted as their last lease ends
        self._seats: weakref.WeakKeyDictionary[ManagedModel, _Seat] = weakref.WeakKeyDictionary()
        # The units of the present stage that stay beside each other in each step, with the least bytes that each holds.
        self._taking_turns: dict[ManagedModel, int] = {}

    @contextmanager
    def take_turns(self, units: Collection[ManagedModel]) -> Iterator[None]:
        """Let units that take turns in each step stay beside each other until the block ends.

        Example: two denoisers that run in every step. They stay if that copies fewer bytes than evicting one for the
        other. See `planning.turns`.
        """
        if self.accelerator.is_cpu:
            yield
            return
        before, self._taking_turns = self._taking_turns, {}
        self._taking_turns = self._choose_turns(units)
        for unit in self._taking_turns:
            self.work.stays(unit)
        try:
            yield
        finally:
            self._taking_turns = before

    def _choose_turns(self, units: Collection[ManagedModel]) -> dict[ManagedModel, int]:
        """Return the units that stay beside each other, with the least bytes of weights that each holds."""
        doing = {unit: self.work.of(unit) for unit in units}
        works = {unit: each.forecast for unit, each in doing.items() if each.forecast and each.forecast.turns > 1}
        if len(works) < 2 or any(doing[u].attempt.strategy == "cpu" or not doing[u].attempt.share for u in works):
            return {}
        working = {unit: self.work.working_bytes(unit) for unit in works}
        wanted = sum(sizes_of(unit).resident_bytes for unit in works) + max(working.values())
        self.budget.ask_host(min(wanted, self.budget.vram_limit or sys.maxsize) - _weights_bytes(works))
        return beside_each_other(
            {
                unit: turns_of(
                    sizes_of(unit), work, doing[unit].attempt.strategy, self._vram_after_evicting() - working[unit]
                )
                for unit, work in works.items()
            }
        )

    def _end_turns(self) -> None:
        """Let no unit stay beside another for the rest of the stage: they hold more than there is.

        The end of `take_turns` restores the turns of an outer stage.
        """
        self._taking_turns = {}

    def ensure_resident(
        self, unit: ManagedModel, strategy: str, instead_of: Collection[ManagedModel], anew: bool
    ) -> None:
        """Put a unit in place for a call, which has its lease already. See `MemoryManager.acquire`.

        - A unit that is placed wrong is evicted first, unless another lease holds it too.
        - Units of `instead_of` are evicted if they may leave, except for those that take turns with it.
        - A unit that is not in place is placed.
        - A unit in place is resized if `anew` is set or its workload changed, and made ready for the call.
        """
        has_one_lease = unit.leases == 1
        self._learn(unit)
        seat = self._seat(unit)
        refit = anew or seat.fitted_for != self._workload_key(unit)
        if has_one_lease and self._is_misplaced(unit, strategy, check_ram=anew):
            self.evict(unit)
        if self.work.of(unit).attempt.alone:
            self._end_turns()
        for other in self.evictable(unit):
            if other in instead_of and other not in self._partners(unit):
                self.evict(other)
        if unit.placement is None:
            self._place(unit, strategy)
        else:
            if has_one_lease and refit:
                self._make_vram_room(unit, unit.placement.name)
                self._resize(unit)
            self._prepare_call(unit, has_one_lease)
        seat.fitted_for = self._workload_key(unit)

    def shrink_for_stage(self, units: Collection[ManagedModel], strategy: str, idle_bytes: int) -> None:
        """Shrink or evict the weights that earlier runs left, until a stage of `units` can begin within its budget.

        `idle_bytes` is what the stage holds before it calls any of them.
        """
        for unit in units:
            if unit.placement is None or unit.leases:
                continue
            if self._is_misplaced(unit, strategy):
                self.evict(unit)
            else:
                self._resize(unit, grow=False)
        self._shrink_others(Use(None, 0, idle_bytes), [Use(unit, 0) for unit in units])

    def before_call(self, unit: ManagedModel) -> None:
        """Begin to measure a call of a unit that is in place."""
        allocated = self.timeline.record("call", unit).allocated_bytes
        work, placement = self.work.of(unit), unit.placement
        dequantized: frozenset[int] = placement.dequantized if placement else frozenset()
        seat = self._seat(unit)
        seat.before = _Before(allocated, self.budget.beside_weights_bytes, unit.resident_bytes, dequantized)
        whole = work.attempt.parts == 1 and not unit.runs_partly
        if placement and work.learns and whole and unit.leases == 1 and placement.time_call():
            seat.timed = work

    def after_call(self, unit: ManagedModel, failed: bool) -> None:
        """Record what a call took. The peak of a call that `failed` or ran partly is not learned from."""
        seat = self._seat(unit)
        if before := seat.before:
            seat.before = None
            peak = self.timeline.record("ran", unit, self._record_transfer(unit)).peak_bytes
            if not (failed or unit.runs_partly):
                # Weights that the call dequantized and kept are no working memory.
                more_weights = max(0, unit.resident_bytes - before.weights_bytes)
                measured = peak - before.allocated_bytes - more_weights
                self.work.took(unit, measured, before.beside_bytes, before.dequantized)
        if unit.placement is not None:
            unit.placement.end_call(failed, measured=not unit.runs_partly)
            self._learn(unit)
        self.host_cache.after_call(unit)

    def shrink(self, unit: ManagedModel, bytes: int) -> int:
        """Evict groups of a unit that do not run. Return the bytes really freed."""
        if unit.placement is None or unit.pinned or (unit.leases and unit.placement.name != "streamed"):
            return 0
        freed = unit.placement.shrink(bytes)
        if freed:
            self._seat(unit).before = None  # the call under way cannot be measured any more
            self.timeline.record("evict", unit, freed)
        return freed

    def evict(self, unit: ManagedModel) -> None:
        """Take a unit off the device, leased or not."""
        if unit.placement is None:
            return
        self.leaving.discard(unit)
        self._learn(unit)
        left = unit.resident_bytes
        placement, unit.placement = unit.placement, None
        placement.remove()
        self.timeline.record("evict", unit, left)

    def clear_cached_tensors(self) -> None:
        """Take off the device what runs cached there beside the weights of units, such as rotary tables.

        A stage's plan counts what its first call caches, but not what earlier stages left.
        """
        for unit in self.units():
            if unit.placement is not None and not (unit.leases or unit.stages):
                unit.placement.clear_cached_tensors()

    def settle(self, unit: ManagedModel) -> None:
        """Wait until a unit that stays on the device has all its weights there."""
        if unit.placement is not None:
            unit.placement.wait_for_copies()
            self._record_transfer(unit)

    def free(self, roles: Collection[Role], bytes: int | None = None) -> int:
        """Evict units that may leave, in order, until `bytes` are freed, by default all.

        Return the bytes really freed.
        """
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
        """Return the units that may leave the device, except for `wanted`, least recently used first."""
        free = [u for u in self.units() if u.placement and u is not wanted and not u.leases and not u.pinned]
        return sorted(free, key=lambda unit: unit.last_use)

    def tidy(self) -> None:
        """Evict units that nobody refers to, and drop copies from RAM until the RAM budget is kept."""
        for unit in self.registry.cached():
            if unit.placement and not (unit.leases or unit.pinned):
                self.evict(unit)
            unit.clear_adapters()
        self.registry.forget()
        self.host_cache.keep_budget()

    def _is_misplaced(self, unit: ManagedModel, strategy: str, check_ram: bool = True) -> bool:
        """Return whether a unit in place must be evicted and placed anew.

        That is so if one of these holds:
        - The strategy wants another placement, or another one is the best now.
        - The weights were divided into groups by other calls than those known now.
        - With `check_ram`: the copy in RAM is not as it would be made now.
        """
        placement = unit.placement
        if placement is None:
            return False
        if not self.accelerator.is_cpu:
            best = self._best_placement(unit, strategy)
            if placement.calls != unit.calls or best not in (None, placement.name):
                return True
        return check_ram and unit.reloadable and self._lies_otherwise_in_ram(unit, placement.name)

    def _best_placement(self, unit: ManagedModel, strategy: str) -> str | None:
        """Return the placement that a unit would get now. None if none fits."""
        if strategy != "auto":
            return meant_by(strategy, sizes_of(unit))
        return next(iter(self._fitting_placements(unit)), None)

    def _lies_otherwise_in_ram(self, unit: ManagedModel, kind: str) -> bool:
        """Return whether a unit in the placement `kind` has more or less in RAM than it would be given now.

        - A unit that is whole in RAM, and is too large for a stated budget: more. Without one, it stays there.
        - A unit of which groups are in RAM, and that has room for all by now: less.
        - A unit of which groups are in RAM, and that has other room for them in a stated budget: either.
        - A unit of which groups are in RAM, and whose files changed: they are read anew.
        """
        fits = unit.size_bytes <= self.host_cache.left_for(unit, kind)
        is_limited = self.budget.ram_limit is not None or self.accelerator.is_unified
        if unit.in_ram:
            return is_limited and not fits
        room, held_in = self.host_cache.room_for_groups(unit, kind), self.host_cache.held_in(unit) or 0
        return unit.is_stale() or fits or (is_limited and held_in != room)

    # How a unit comes

    def _workload_key(self, unit: ManagedModel) -> Hashable:
        """Return the measured facts on which the layout of a unit depends."""
        return self.work.working_bytes(unit), self.work.of(unit).measured

    def _learn(self, unit: ManagedModel) -> None:
        """Record the seconds of the call that was timed, if the device is done with it."""
        if unit.placement and (measured := unit.placement.take_seconds()):
            timed_work = self._seat(unit).timed
            assert timed_work is not None
            self.work.computed(unit, timed_work, measured)

    def _place(self, unit: ManagedModel, strategy: str) -> None:
        """Place a unit in the best placement that works out.

        If memory runs out on the way, all units that may leave are evicted, and the next placement is tried. Raises
        the error of the last one.
        """
        kinds = self._placements_to_try(unit, strategy)
        for attempt, kind in enumerate(kinds):
            try:
                self._bring_to_ram(unit, kind)
                self._make_vram_room(unit, kind)
                if not self._partners(unit):
                    # Weights of a unit that left were of other sizes: their blocks fit this one's only in part.
                    self.accelerator.empty_cache()
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
                self._record_placed(unit)
                return

    def _placements_to_try(self, unit: ManagedModel, strategy: str) -> list[str]:
        """Return the placements of a unit that is not in place, best first. Raises DoesNotFitError if none fits."""
        if self.accelerator.is_cpu:
            return ["cpu"]
        if (kind := meant_by(strategy, sizes_of(unit))) != "auto":
            return [kind]
        partners = self._partners(unit)
        ours = _weights_bytes(u for u in self.evictable(unit) if u not in partners)
        wanted = min(self._demand_in_ram(unit).need_bytes("resident"), self.budget.vram_limit or sys.maxsize)
        self.budget.ask_host(wanted - ours)
        kinds = self._fitting_placements(unit)
        if not kinds and self.evictable(unit):
            self._end_turns()
            self.free(ROLES)  # they may hold more than their weights
            kinds = self._fitting_placements(unit)
        if not kinds:
            raise self._no_placement_fits(unit)
        return kinds

    def _no_placement_fits(self, unit: ManagedModel) -> DoesNotFitError:
        """Return the error for a unit that no placement has room for."""
        pinned = [u for u in self.units() if u.placement and u.pinned and u is not unit]
        demand, room = self._demand_in_ram(unit), self._room(unit).nbytes
        return DoesNotFitError(why_nothing_fits(demand, pinned, str(self.device), self.budget.vram_bytes, room))

    def _new_placement(self, unit: ManagedModel, kind: str) -> Placement:
        """Return the placement `kind` of a unit. Nothing is moved yet."""
        source, device = None if unit.in_ram else unit.source(), self.device
        if kind == "cpu":
            device = torch.device("cpu")
            if source is None:
                return Cpu(unit.module, device, unit.calls)
        incoming = self.host_cache.incoming(unit)
        return Engine(unit.module, device, self._layout(unit, kind), source, unit.calls, incoming=incoming)

    def _layout(self, unit: ManagedModel, kind: str) -> Layout:
        """Return the best layout of a unit's weights in the present room."""
        demand, weights_bytes = self._demand_as_held(unit), self._weights_to_hold(unit, kind)
        if kind == "cpu":  # all weights come through the windows
            loads = replace(demand.loads, ram_bytes=window_bytes(demand.sizes, "streamed"))
            demand = replace(demand, loads=loads)
        return demand.layout(kind, weights_bytes)

    def _bring_to_ram(self, unit: ManagedModel, kind: str) -> None:
        """Bring the weights of a unit to RAM, all or some groups of them, for the placement `kind`.

        Copies of other units are dropped for it. If that is not enough, units are evicted from the device too, so that
        their copies may be dropped.
        """
        self.host_cache.cancel_failed_read(unit)
        form, groups, nbytes = self.host_cache.choose_form(unit, kind), None, unit.size_bytes
        if form is InRam.NO_ROOM:
            raise self.host_cache.refuse(unit, kind)
        if form is InRam.AS_THEY_ARE:
            self.host_cache.keep_budget(unit)
            if kind == "cpu":
                unit.load()
            return
        if form is InRam.GROUPS:
            self.host_cache.set_room_for_groups(unit, kind)
            groups, nbytes = self._ram_groups(unit, kind, self.host_cache.spare_for_groups(unit))
            self.host_cache.keep_groups(unit, groups)
        missing_bytes = self.host_cache.missing_bytes(max(0, nbytes - unit.host_bytes))
        for other in [u for u in self.evictable(unit) if u.host_bytes and u.reloadable]:
            if missing_bytes > 0:
                missing_bytes -= other.host_bytes
                self.evict(other)
        self.host_cache.load(unit, kind, nbytes, groups)

    def convert(self, unit: ManagedModel) -> None:
        """Convert a unit's weights into the file of its conversion, if it has one whose file is missing.

        Raises OSError, in one line, if the file cannot be written.
        """
        if unit.conversion is None or unit.leases or unit.is_converted():
            return
        self.evict(unit)
        path = unit.conversion.path

        def begin(plain_bytes: int, wanted_bytes: int) -> Look:
            takes = format_bytes(wanted_bytes, up=True)
            log.warning("Ballast: converting %s once, into a file of about %s: %s", unit.name, takes, path)
            return self.host_cache.read_callback(unit, plain_bytes, "converting")

        unit.convert(begin)
        trim(path.parent, {other.conversion.path for other in self.units() if other.conversion})

    def _room(self, unit: ManagedModel, evicting: bool = True) -> _Room:
        """Return the room for the weights of a unit.

        With `evicting`, units that may leave are taken to have left. Without, every unit is taken to stay.
        """
        partners = self._partners(unit)
        others = [other for other in self.units() if other is not unit]
        if evicting:
            others = [u for u in others if u in partners or u.leases or u.pinned]
        working = [self.work.working_bytes(each, self.budget.beside_weights_bytes) for each in (unit, *partners)]
        return _Room(
            budget_bytes=self.budget.vram_bytes,
            other_weights_bytes=_weights_bytes(others),
            weights_to_come_bytes=sum(max(0, self._taking_turns[u] - u.resident_bytes) for u in partners),
            extra_working_bytes=max(working) - working[0],
        )

    def _vram_after_evicting(self) -> int:
        """Return the VRAM for weights once all units that may leave have left."""
        return self.budget.vram_bytes - _weights_bytes(u for u in self.units() if u.leases or u.pinned)

    def _partners(self, unit: ManagedModel) -> list[ManagedModel]:
        """Return the units that take turns with `unit` and are not evicted for its calls."""
        if unit not in self._taking_turns:
            return []
        return [other for other in self._taking_turns if other is not unit]

    def _fitting_placements(self, unit: ManagedModel) -> list[str]:
        """Return the placements that a unit has room for, best first."""
        room, free = self._room(unit).nbytes, self.accelerator.free_bytes()
        return fitting_placements(self._demand_in_ram(unit), room, free, stated=self.budget.vram_limit is not None)

    def _weights_to_hold(self, unit: ManagedModel, kind: str) -> int:
        """Return the most bytes of weights that a unit is to hold in a placement.

        They are in RAM for "cpu", else on the device.
        """
        if kind == "cpu":
            return weights_on_cpu(sizes_of(unit), self.host_cache.held_in(unit) or 0)
        # A resident unit beyond its least keeps weights dequantized, for which no other unit is evicted.
        room = self._room(unit, evicting=kind != "resident")
        return self._demand_in_ram(unit).weights_to_hold(kind, room.nbytes)

    def _demand_in_ram(self, unit: ManagedModel) -> Demand:
        """Return the demand of a unit as if all its weights were in RAM."""
        return self.work.demand(unit, self.budget.beside_weights_bytes)

    def _demand_as_held(self, unit: ManagedModel) -> Demand:
        """Return the demand of a unit that reads from disk the groups that RAM does not hold now."""
        demand = self._demand_in_ram(unit)
        if unit.in_ram:
            return demand
        on_disk = frozenset(range(len(demand.sizes.groups))) - unit.held
        return replace(demand, loads=replace(demand.loads, ram_bytes=self.host_cache.held_in(unit), on_disk=on_disk))

    def _demand_before_held(self, unit: ManagedModel) -> Demand:
        """Return the demand of a unit of which RAM is to hold some groups. The solver is free to choose which."""
        demand = self._demand_in_ram(unit)
        loads = replace(demand.loads, ram_bytes=self.host_cache.held_in(unit), on_disk=frozenset())
        return replace(demand, loads=loads)

    def _ram_groups(self, unit: ManagedModel, kind: str, spare_bytes: int) -> tuple[frozenset[int], int]:
        """Return the groups of a unit that RAM is to hold, and the bytes that it takes there. See `fit.ram_groups`."""
        weights_bytes = self._weights_to_hold(unit, kind)
        if kind == "cpu":  # no groups: the placement itself keeps weights in RAM
            return frozenset(), weights_bytes + window_bytes(sizes_of(unit), "streamed")
        return ram_groups(self._demand_before_held(unit), kind, weights_bytes, spare_bytes)

    def _make_vram_room(self, unit: ManagedModel, kind: str) -> None:
        """Make room for a unit in a placement: evict units of ours by the policy, and ask the host for the rest."""
        if kind == "cpu":
            return
        if kind == "streamed":
            need = self._weights_to_hold(unit, kind)
        else:
            need = self._demand_in_ram(unit).least_weights(kind)
        working = self.work.working_bytes(unit, self.budget.beside_weights_bytes)
        self._shrink_others(Use(unit, need, working))
        self.budget.ask_host(need - unit.resident_bytes + working)

    def _shrink_others(self, use: Use, coming: list[Use] | None = None) -> None:
        """Shrink or evict units by the policy until `use` fits the budget.

        Units that take turns with its unit come last. `coming` are the next uses if nothing is scheduled.
        """
        partners = [unit for unit in self._taking_turns if unit is not use.unit]
        for are_partners in (False, True):
            leaves = [u for u in self.evictable() if u is not use.unit and (u in partners) == are_partners]
            evictable = {unit: unit.resident_bytes for unit in leaves}
            others = _weights_bytes(u for u in self.units() if u not in evictable and u is not use.unit)
            leaving = choose_shrinks(
                evictable, self.budget.vram_bytes - others, use, self.schedule.uses(self.work.working_bytes) or coming
            )
            for other, missing in leaving.items():
                if missing == evictable[other] or self.shrink(other, missing) < missing:
                    self.evict(other)

    def _resize(self, unit: ManagedModel, grow: bool = True) -> None:
        """Fit a unit in place to the present room and workload: more or fewer groups stay, or stay dequantized.

        Without `grow` a streamed unit only shrinks.
        """
        placement = unit.placement
        if placement is None or placement.name == "cpu":
            return
        weights_bytes = self._weights_to_hold(unit, placement.name)
        if placement.name == "streamed":
            if weights_bytes > unit.resident_bytes and grow:
                # Else groups settle in the gaps that the last call left, and the next one finds none.
                self.accelerator.empty_cache()
            if weights_bytes >= unit.resident_bytes and not grow:
                return
        placement.apply(self._demand_as_held(unit).layout(placement.name, weights_bytes))

    def _prepare_call(self, unit: ManagedModel, has_one_lease: bool) -> None:
        """Make a unit in place ready for a call. A resident unit gets back the groups that were evicted from it."""
        if unit.placement is None:
            return
        if is_short := unit.placement.name == "resident" and not unit.placement.is_whole:
            self._make_vram_room(unit, "resident")
            if has_one_lease:
                self._resize(unit)
        unit.placement.complete(has_one_lease)
        if is_short:
            self._record_placed(unit)

    # What is told

    def _on_device(self) -> tuple[OnDevice, ...]:
        placed = sorted((u for u in self.units() if u.resident_bytes), key=lambda unit: (unit.role, unit.name))
        return tuple(OnDevice(unit.name, unit.role, unit.resident_bytes) for unit in placed)

    def _record_placed(self, unit: ManagedModel) -> None:
        self.timeline.record("place", unit, self._record_transfer(unit))

    def _record_transfer(self, unit: ManagedModel) -> int:
        """Add the bytes that a unit moved since the last such call to the totals. Return those to the device."""
        if unit.placement is None:
            return 0
        bytes_in = unit.placement.take_bytes_in()
        self.device_bytes_in += bytes_in
        self.host_cache.count_read(unit.placement.take_bytes_read())
        return bytes_in

    def _seat(self, unit: ManagedModel) -> _Seat:
        return self._seats.setdefault(unit, _Seat())


def _weights_bytes(units: Iterable[ManagedModel]) -> int:
    """Return the bytes of weights that units have on the device."""
    return sum(unit.resident_bytes for unit in units)
