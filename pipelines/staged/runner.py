"""StageRunner: an open pipeline with its budgets, and how it runs one stage."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...memory.codecs.converters import converter_of
from ...memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ...memory.host import management as host
from ...memory.host.flags import host_flags
from ...memory.manager import MemoryManager, manager, refuse_fork
from ...memory.planning.fit import reads_groups, sizes_of
from ...memory.planning.forecast import Forecast
from ...memory.planning.runplan import StagePlan
from ...memory.probe import card_of
from ...memory.probe import rates as measured_rates
from ...memory.sizes import format_bytes, parse_bytes
from ...memory.weights.conversion import Conversion
from ...memory.weights.unit import ManagedModel
from ..encoding.embedding_cache import EmbeddingCache, shared_cache
from ..files.keys import key_text
from ..files.recognition import title_of
from ..lora.use import Lora, adapters_of, named
from ..planning.forecasts import Forecaster
from ..planning.plans import SEEING, plan_stage
from .family import ModelFamily, Modules, Part, StageName

log = logging.getLogger("ballast")

_INSTEAD = {
    "encode": "or write a shorter prompt", "sample": "or choose a smaller size", SEEING: "or give a smaller picture",
}  # fmt: skip

_CONVERTED = ("text_encoder", "transformer")  # whose weights may be converted; decoders run as they are

Result = TypeVar("Result")
Opened = TypeVar("Opened", bound="StageRunner")


class _Owner:
    """Owns the models of a pipeline and its copies: they stay claimed while one of these lives."""


class StageRunner(ModelFamily):
    """An open pipeline: its models, the manager of its device, and its budgets."""

    _loras: tuple[Lora, ...] = ()
    _then: Sequence[ManagedModel] | None = None  # what runs after the next stage; None where that is not known

    def __init__(
        self,
        folder: Path,
        device: str | torch.device,
        vram: int | str | None,
        ram: int | str | None,
        keep: bool,
        cache: EmbeddingCache | None,
        weights: str = "auto",
    ) -> None:
        self.folder = folder
        self.weights = weights
        self._converter = converter_of(weights)
        self.title = title_of(folder)
        self._manager = manager(device)
        self.vram_bytes = None if vram is None else parse_bytes(vram)
        self.ram_bytes = None if ram is None else parse_bytes(ram)
        self.keep = keep
        self.cache = cache or shared_cache()
        self.forecasts = self.cache.directory / "forecasts"
        self.encoders = []
        self.denoisers = []
        self._owner = _Owner()

    @property
    def manager(self) -> MemoryManager:
        """The manager of its device. Raises RuntimeError in a forked process, before a stage begins to wait there."""
        refuse_fork()
        return self._manager

    def within(self: Opened, vram: int | str | None = None, ram: int | str | None = None, keep: bool = False) -> Opened:
        """Return the same pipeline with other budgets, as in `open_pipeline`. Both share all that they load."""
        other = copy.copy(self)
        other.vram_bytes = None if vram is None else parse_bytes(vram)
        other.ram_bytes = None if ram is None else parse_bytes(ram)
        other.keep = keep
        return other

    def followed_by(self: Opened, *stages: StageName) -> Opened:
        """Return the same pipeline for a stage that `stages` follow. Their models are read ahead, if RAM has room.

        ValueError for a stage that there is not.
        """
        other = copy.copy(self)
        other._then = [unit for stage in stages for unit in self.units_of(stage)]
        return other

    def units_of(self, stage: StageName) -> list[ManagedModel]:
        """Return the units that a stage will run, to read them ahead. Raises ValueError for an unknown stage."""
        runs = {"encode": self.encoders, "sample": self.denoisers, "decode": [self.decoder]}
        if stage not in runs:
            raise ValueError(f"unknown stage {stage!r}. Use {', '.join(runs)}.")
        if stage == "sample":
            self._forecaster.learn_calls(stage, self.denoisers)  # or what is read would be laid out anew
        return runs[stage]

    def digest(self) -> str:
        """Tells what this pipeline makes from what any other does: by its files, LoRAs, forms and libraries."""
        adapters = named(self._loras, [*self.encoders, *self.denoisers])
        facts = [self.facts(), self._files(), self.weights, adapters]
        return hashlib.sha256(key_text(facts).encode()).hexdigest()

    def _claim(self, part: Part, label: str) -> ManagedModel:
        """Return the managed model of a part. Every pipeline of this device with the same part shares it."""
        folder = self.cache.directory / "encoded"

        def make() -> ManagedModel:
            unit = part.unit(label)
            if unit.role in _CONVERTED and self._converter:
                digest = sha256(repr((part.key, self.weights)).encode()).hexdigest()
                path = folder / f"{unit.name}-{self.weights}-{digest[:32]}.safetensors"
                unit.conversion = Conversion(self._converter, path)
            return unit

        key = (part.key, self.weights, folder) if self._converter else part.key
        return self.manager.claim(key, make, self._owner)

    @contextlib.contextmanager
    def _wearing(self, units: Sequence[ManagedModel]) -> Iterator[None]:
        """Set this pipeline's LoRAs on the units; no other stage runs meanwhile.

        Within a stage of theirs, as `on_step` may run another, they are afterwards as that one had them.
        """
        with self.manager.between_stages():
            around = [(unit, unit.active_adapters, unit.calls) for unit in units if unit.stages]
            if any(unit.leases for unit, *_ in around):
                raise RuntimeError(f"{self.title} is in the middle of a step. Run it again from on_step, or after.")
            try:
                for unit in units:
                    self.manager.set_adapters(unit, adapters_of(self._loras, unit))
                yield
            finally:
                for unit, adapters, calls in around:
                    self.manager.set_adapters(unit, adapters)
                    unit.calls = calls

    @property
    def _forecaster(self) -> Forecaster:
        accelerator = self.manager.accelerator
        return Forecaster(
            self.name,
            self.facts,
            self.forecasts,
            self.manager.between_stages,
            self.stand_ins,
            accelerator.fuses,
            accelerator.attention,
        )

    def _vram_budget(self) -> int:
        """Bytes that a run here may take: the stated budget, for which other models make room, or what is free now."""
        if self.vram_bytes is None:
            return self._free_vram()
        return self.vram_bytes if self.manager.accelerator.is_cpu else min(self.vram_bytes, self._free_vram())

    def _free_vram(self) -> int:
        """Return the bytes that the driver could count for this process."""
        manager = self.manager
        return manager.budget_bytes + host.movable_bytes(manager.device) + manager.accelerator.outside_bytes()

    def _ram_budget(self, ram: int | str | None) -> int:
        limit = self.ram_bytes if ram is None else parse_bytes(ram)
        return self.manager.ram_budget_bytes if limit is None else limit

    def _expected(
        self,
        stage: str,
        units: Sequence[ManagedModel],
        forecast: Callable[[], Forecast | None],
        strategy: str,
        steps: int = 1,
        parts: bool = False,
    ) -> dict[str, Any]:
        """Return the forecast and the plan of a stage that is about to run here, as arguments of `_run_stage`.

        Neither on the CPU where RAM holds all of each. Raises DoesNotFitError where it exceeds a stated budget, or
        wants too much of the disk; where it could run in `parts`, also for one that nobody stated. Before, weights that
        are to be converted are.
        """
        self.manager.convert(units)
        on_cpu, ram_bytes = strategy == "cpu" or self.manager.accelerator.is_cpu, self._ram_budget(None)
        if on_cpu and all(unit.size_bytes <= ram_bytes or not reads_groups(unit) for unit in units):
            return {}
        if (found := forecast()) is None:
            return {}
        ram_bytes = self._ram_budget(None)
        place = functools.partial(
            plan_stage,
            stage,
            found,
            units,
            ram_bytes=ram_bytes,
            ram_stated=self.ram_bytes is not None,
            rates=measured_rates(self.manager.device, units[0].disk),
            strategy="cpu" if on_cpu else strategy,
            steps=steps,
            card=card_of(self.manager.device),
            unified=self.manager.accelerator.is_unified,
            outside_bytes=self.manager.accelerator.outside_bytes(),
            ram=self.manager.ram_state(ram_bytes),
        )
        if on_cpu:
            here = place(budget_bytes=0)
            self._refuse_short_ram(here)
            return {"forecast": found, "planned": here}
        if self.vram_bytes is not None:
            self._refuse_misfit(place(budget_bytes=self.vram_bytes), strategy)
        here = place(budget_bytes=self._vram_budget())
        if parts:
            self._refuse_misfit(here, strategy)
        self._refuse_short_ram(here)
        # Other models may stay on the device, which no plan knows of.
        alone = not any(unit.placement for unit in self.manager.units() if unit not in units)
        return {"forecast": found, "planned": here if alone else None}

    def _refuse_misfit(self, plan: StagePlan, strategy: str) -> None:
        if not (missing := [unit for unit in plan.units if unit.driver_bytes > unit.budget_bytes]):
            return
        names = "; ".join(f"{self.titles.get(unit.unit, unit.unit)}: {unit.reason}" for unit in missing)
        least = format_bytes(max(unit.driver_bytes for unit in missing), up=True)
        instead = _INSTEAD[plan.name] if strategy == "auto" else "or use strategy auto"
        raise DoesNotFitError(f"{names} Raise the vram budget to {least}, {instead}.")

    def _refuse_short_ram(self, plan: StagePlan) -> None:
        """Where the RAM budget does not even hold windows, or the disk is too slow for what it does not hold."""
        budget = self._ram_budget(None)
        for unit in plan.units:
            if unit.fits or unit.driver_bytes > unit.budget_bytes:
                continue
            named = f"{self.titles.get(unit.unit, unit.unit)}: {unit.reason} Raise the ram budget to"
            if unit.ram_bytes > budget and self.ram_bytes is not None:
                raise DoesNotFitError(f"{named} {format_bytes(unit.ram_bytes, up=True)}.")
            if unit.ram_bytes <= budget or self.ram_bytes is None:
                enough = format_bytes(unit.ram_bytes + unit.read_bytes, up=True)
                raise DoesNotFitError(f"{named} {enough}, or put the model on an SSD.")

    def _run_stage(
        self,
        name: str,
        units: list[ManagedModel],
        run: Callable[[torch.device, Modules], Result],
        strategy: str = "auto",
        *,
        work: Hashable = None,
        forecast: Forecast | None = None,
        planned: StagePlan | None = None,
        keep: bool = False,
        again: bool = True,
    ) -> Result:
        """Run a stage. After an out-of-memory error evict all else and run it `again`: streamed, then in the least."""
        strategy = host_flags().strategy(strategy, units[0].role if units else "other")
        if strategy == "auto" and forecast is None:
            strategy = self._unforecast(units)
        stage: dict[str, Any] = {
            "work": work,
            "forecast": forecast,
            "planned": planned,
            "alone": not self.keep,
            "keep": keep,
            "vram": self.vram_bytes,
            "ram": self.ram_bytes,
            "then": self._then,
        }
        ladder = ("auto", "resident", "streamed", "leafwise")
        less = ladder[max(2, ladder.index(strategy) + 1) :] if strategy in ladder else ()
        for attempt in (strategy, *less):
            device = torch.device("cpu") if attempt == "cpu" else self.manager.device
            try:
                with self.manager.stage(name, units, attempt, **stage):
                    return run(device, {unit.name: unit.module for unit in units})
            except BaseException as error:
                release_frames(error)
                if not is_out_of_memory(error):
                    raise
                self.manager.make_device_room()
                if not again:
                    raise
                if attempt == "leafwise" or strategy == attempt == "cpu":
                    raise self._out_of_memory(name, units, error) from None
                log.warning("Ballast: out of memory in %s; trying again in less", name)
        raise AssertionError("unreachable")

    def _unforecast(self, units: Sequence[ManagedModel]) -> str:
        """Return the strategy for work without a forecast: one that leaves it half of a stated budget, if any."""
        if self.vram_bytes is None or self.manager.accelerator.is_cpu:
            return "auto"
        room, sizes = self.vram_bytes // 2, [sizes_of(unit) for unit in units]
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
