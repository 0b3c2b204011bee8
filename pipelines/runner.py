"""Runner: runs one stage of one job within a budget, and refuses what does not fit."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ..memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ..memory.host import management as host
from ..memory.host.flags import host_flags
from ..memory.memory_manager import MemoryManager
from ..memory.planning import learned
from ..memory.planning.fit import reads_groups, sizes_of
from ..memory.planning.forecast import Forecast
from ..memory.planning.runplan import StagePlan
from ..memory.probe import card_of
from ..memory.probe import rates as measured_rates
from ..memory.sizes import format_bytes, parse_bytes
from ..memory.weights.unit import ManagedModel
from .lora.use import Lora, adapters_of
from .planning.once_plans import PRECOMPUTE, Split, best_of, first_strategy
from .planning.plans import SEEING, Machine, plan_stage

if TYPE_CHECKING:
    from .models.claims import Claims
    from .models.model import Modules

log = logging.getLogger("ballast")

_INSTEAD = {
    "encode": "or write a shorter prompt", "sample": "or choose a smaller size", SEEING: "or give a smaller picture",
    PRECOMPUTE: "or choose a smaller size", "decode sound": "or choose fewer frames",
}  # fmt: skip

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """The budgets of runs, and what stays when a stage ends.

    `then` are units that run after the next stage, None where that is not known.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    keep: bool = False
    keeps_vae: bool = False
    then: Sequence[ManagedModel] | None = None

    @classmethod
    def of(cls, vram: int | str | None, ram: int | str | None, keep: bool) -> Settings:
        """Return the settings of budgets in bytes or as "6GB"; None means what is free."""
        vram_bytes, ram_bytes = (None if size is None else parse_bytes(size) for size in (vram, ram))
        return cls(vram_bytes, ram_bytes, keep)


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """A stage to run: `run(device, modules)` on its units.

    With `again` it runs once more in less VRAM after an out-of-memory error.
    """

    name: str
    units: Sequence[ManagedModel]
    run: Callable[[torch.device, Modules], Result]
    strategy: str = "auto"
    work: Hashable = None
    forecast: Forecast | None = None
    planned: StagePlan | None = None
    keep: bool = False
    again: bool = True


@dataclass(frozen=True)
class Runner:
    """Runs stages of one model on its device. `titles` are what people call its units."""

    title: str
    titles: Mapping[str, str]
    claims: Claims
    settings: Settings = field(default_factory=Settings)
    loras: tuple[Lora, ...] = ()

    @property
    def manager(self) -> MemoryManager:
        """The manager of its device. Raises RuntimeError in a forked process."""
        return self.claims.manager

    def set(self, **settings: Any) -> Runner:
        """Return a runner with other settings."""
        return replace(self, settings=replace(self.settings, **settings))

    @contextlib.contextmanager
    def adapters(self, units: Sequence[ManagedModel]) -> Iterator[None]:
        """Set this pipeline's LoRAs on the units; no other stage runs meanwhile.

        Within a stage of theirs, as `on_step` may run another, they are afterwards as that one had them.
        """
        with self.manager.between_stages():
            around = [(unit, unit.active_adapters, unit.calls) for unit in units if unit.stages]
            if any(unit.leases for unit, *_ in around):
                raise RuntimeError(f"{self.title} is in the middle of a step. Run it again from on_step, or after.")
            try:
                for unit in units:
                    self.manager.set_adapters(unit, adapters_of(self.loras, unit))
                yield
            finally:
                for unit, adapters, calls in around:
                    self.manager.set_adapters(unit, adapters)
                    unit.calls = calls

    def vram_budget(self) -> int:
        """Bytes that a run here may take: the stated budget, for which other models make room, or what is free now."""
        if self.settings.vram_bytes is None:
            return self.free_vram()
        return (
            self.settings.vram_bytes
            if self.manager.accelerator.is_cpu
            else min(self.settings.vram_bytes, self.free_vram())
        )

    def free_vram(self) -> int:
        """Return the bytes that the driver could count for this process."""
        manager = self.manager
        return manager.budget_bytes + host.movable_bytes(manager.device) + manager.accelerator.outside_bytes()

    def ram_budget(self, ram: int | str | None) -> int:
        limit = self.settings.ram_bytes if ram is None else parse_bytes(ram)
        return self.manager.ram_budget_bytes if limit is None else limit

    def expected(
        self,
        stage: str,
        units: Sequence[ManagedModel],
        forecast: Callable[[], Forecast | None],
        strategy: str,
        steps: int = 1,
        parts: bool = False,
    ) -> dict[str, Any]:
        """Return the forecast and the plan of a stage that is about to run here, as fields of `Stage`.

        Neither on the CPU where RAM holds all of each. Raises DoesNotFitError where it exceeds a stated budget, or
        wants too much of the disk; where it could run in `parts`, also for one that nobody stated. Before, weights that
        are to be converted are.
        """
        self.manager.convert(units)
        on_cpu, ram_bytes = strategy == "cpu" or self.manager.accelerator.is_cpu, self.ram_budget(None)
        if on_cpu and all(unit.size_bytes <= ram_bytes or not reads_groups(unit) for unit in units):
            return {}
        if (found := forecast()) is None:
            return {}
        machine, strategy = self._machine(units, on_cpu), "cpu" if on_cpu else strategy
        ram = self.manager.ram_state(machine.ram_bytes)
        place = functools.partial(plan_stage, stage, found, units, strategy=strategy, steps=steps, ram=ram)
        if on_cpu:
            here = place(machine)
            self._refuse_short_ram(here)
            return {"forecast": found, "planned": here}
        if self.settings.vram_bytes is not None:
            self._refuse_misfit(place(replace(machine, vram_bytes=self.settings.vram_bytes)), strategy)
        here = place(machine)
        if parts:
            self._refuse_misfit(here, strategy)
        self._refuse_short_ram(here)
        # Other models may stay on the device, which no plan knows of.
        alone = not any(unit.placement for unit in self.manager.units() if unit not in units)
        return {"forecast": found, "planned": here if alone else None}

    def split(
        self, forecast: Forecast, units: Sequence[ManagedModel], strategy: str, steps: int, **ways: bool
    ) -> Split | None:
        """Return the way in which a sampling stage takes less time here; None where it is to run as it is.

        `ways` may be `once` and `lockstep`, as in `best_of`.
        """
        if strategy == "cpu" or self.manager.accelerator.is_cpu:
            return None
        self.manager.convert(units)
        machine = self._machine(units)
        ram = self.manager.ram_state(machine.ram_bytes)

        def place(name: str, forecast: Forecast, some: Sequence[ManagedModel], steps: int) -> StagePlan:
            how = first_strategy(strategy) if name == PRECOMPUTE else strategy
            return plan_stage(
                name, forecast, some, machine, strategy=how, by_user=how == strategy, steps=steps, ram=ram
            )

        return best_of(forecast, units, steps, place, **ways, thread_bytes=machine.least.workspace_bytes)[0]

    def _machine(self, units: Sequence[ManagedModel], on_cpu: bool = False) -> Machine:
        """Return the machine as a stage of these units finds it."""
        return Machine(
            0 if on_cpu else self.vram_budget(),
            self.ram_budget(None),
            measured_rates(self.manager.device, units[0].disk),
            self.settings.ram_bytes is not None,
            self.manager.accelerator.is_unified,
            card_of(self.manager.device),
            learned.least_overhead(self.manager.accelerator),
        )

    def _refuse_misfit(self, plan: StagePlan, strategy: str) -> None:
        if not (missing := [unit for unit in plan.units if unit.driver_bytes > unit.budget_bytes]):
            return
        names = "; ".join(f"{self.titles.get(unit.unit, unit.unit)}: {unit.reason}" for unit in missing)
        least = format_bytes(max(unit.driver_bytes for unit in missing), up=True)
        instead = _INSTEAD[plan.name] if strategy == "auto" else "or use strategy auto"
        raise DoesNotFitError(f"{names} Raise the vram budget to {least}, {instead}.")

    def _refuse_short_ram(self, plan: StagePlan) -> None:
        """Where the RAM budget does not even hold windows, or the disk is too slow for what it does not hold."""
        budget = self.ram_budget(None)
        for unit in plan.units:
            if unit.fits or unit.driver_bytes > unit.budget_bytes:
                continue
            named = f"{self.titles.get(unit.unit, unit.unit)}: {unit.reason} Raise the ram budget to"
            if unit.ram_bytes > budget and self.settings.ram_bytes is not None:
                raise DoesNotFitError(f"{named} {format_bytes(unit.ram_bytes, up=True)}.")
            if unit.ram_bytes <= budget or self.settings.ram_bytes is None:
                enough = format_bytes(unit.ram_bytes + unit.read_bytes, up=True)
                raise DoesNotFitError(f"{named} {enough}, or put the model on an SSD.")

    def run(self, stage: Stage[Result]) -> Result:
        """Run a stage. After an out-of-memory error evict all else and run it `again`: streamed, then in the least."""
        units, settings = list(stage.units), self.settings
        strategy = host_flags().strategy(stage.strategy, units[0].role if units else "other")
        if strategy == "auto" and stage.forecast is None:
            strategy = self._unforecast(units)
        given: dict[str, Any] = {
            "work": stage.work,
            "forecast": stage.forecast,
            "planned": stage.planned,
            "alone": not settings.keep,
            "keep": stage.keep,
            "vram": settings.vram_bytes,
            "ram": settings.ram_bytes,
            "then": settings.then,
        }
        ladder = ("auto", "resident", "streamed", "leafwise")
        less = ladder[max(2, ladder.index(strategy) + 1) :] if strategy in ladder else ()
        for attempt in (strategy, *less):
            device = torch.device("cpu") if attempt == "cpu" else self.manager.device
            try:
                with self.manager.stage(stage.name, units, attempt, **given):
                    return stage.run(device, {unit.name: unit.module for unit in units})
            except BaseException as error:
                release_frames(error)
                if not is_out_of_memory(error):
                    raise
                self.manager.make_device_room()
                if not stage.again:
                    raise
                if attempt == "leafwise" or strategy == attempt == "cpu":
                    raise self._out_of_memory(stage.name, units, error) from None
                log.warning("Ballast: out of memory in %s; trying again in less", stage.name)
        raise AssertionError("unreachable")

    def _unforecast(self, units: Sequence[ManagedModel]) -> str:
        """Return the strategy for work without a forecast: one that leaves it half of a stated budget, if any."""
        if self.settings.vram_bytes is None or self.manager.accelerator.is_cpu:
            return "auto"
        room, sizes = self.settings.vram_bytes // 2, [sizes_of(unit) for unit in units]
        if all(each.resident_bytes <= room for each in sizes):
            return "auto"
        return "streamed" if all(each.least_streamed_bytes <= room for each in sizes) else "leafwise"

    def _out_of_memory(self, stage: str, units: list[ManagedModel], error: BaseException) -> DoesNotFitError:
        working = max((self.manager.work.working_bytes(unit) for unit in units), default=0)
        return DoesNotFitError(
            f"{stage} ran out of memory on {self.manager.device} even with no weights staying: its activations take "
            f"{format_bytes(working)} beside its weights, of a budget of {format_bytes(self.manager.budget_bytes)}. "
            f"Choose a smaller size or fewer frames, or raise the vram budget. ({error})"
        )
