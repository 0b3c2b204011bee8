"""A stage of a graph: its units come when their modules are called, and are gone when it ends."""

from __future__ import annotations

import gc
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .batch import batch_of, in_parts, joined
from .errors import DoesNotFitError, is_out_of_memory, release_frames
from .host import management as host
from .host.flags import host_flags
from .planning.fit import sizes_of
from .planning.forecast import Forecast
from .planning.ladder import Terms, describe, next_terms
from .sizes import format_bytes
from .units.calls import Forward, interpose
from .units.unit import ManagedModel

if TYPE_CHECKING:
    from .manager import MemoryManager
    from .planning.runplan import StagePlan

log = logging.getLogger("ballast")


@contextmanager
def run_stage(
    manager: MemoryManager,
    name: str,
    units: Sequence[ManagedModel],
    strategy: str,
    *,
    work: Hashable,
    forecast: Forecast | None,
    planned: StagePlan | None,
    alone: bool,
    keep: bool,
) -> Iterator[None]:
    """See `MemoryManager.stage`."""
    flags = host_flags()
    keep = flags.keeps(keep)
    with ExitStack() as exits:
        for unit in units:
            manager.adopt(unit)
            unit.work = work
            unit.forecast = forecast.units.get(unit.name) if forecast else None
            unit.terms = Terms(strategy, share=0.0 if flags.least else 1.0)
            unit.runs_on(manager.execution_device(strategy))
            exits.callback(interpose(unit.module, _Calls(manager, unit, units, alone).run))
        manager.fit(units, strategy)
        record = manager.timeline.begin(name, units, manager.budget_bytes)
        record.planned = planned
        try:
            with torch.inference_mode():
                yield
        except BaseException as error:
            keep = False
            record.ended_by(error)
            release_frames(error)
            raise
        finally:
            manager.leave(units, keep)
            manager.accelerator.empty_cache()
            manager.timeline.finish(record, units)


class _Calls:
    """The calls of one unit in a stage: each under a lease, made again on lower terms when memory runs out."""

    def __init__(self, manager: MemoryManager, unit: ManagedModel, stage: Sequence[ManagedModel], alone: bool) -> None:
        self.manager, self.unit, self.stage, self.alone = manager, unit, stage, alone
        self.first = True
        self.placement: str | None = None  # chosen at the first call, and kept for the others

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.first:
            self.first = False
            self.manager.strike(self.unit)
        while True:
            host.throw_if_interrupted()
            try:
                return self._run_once(forward, args, kwargs)
            except Exception as error:
                if not is_out_of_memory(error) or self.unit.terms.strategy == "cpu":
                    raise
                release_frames(error)
                self._step_down(args, kwargs, error)

    def _run_once(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        failed = True
        strategy, anew = self.placement or self.unit.terms.strategy, self.placement is None
        self.manager.acquire(self.unit, strategy, instead_of=self._others(), anew=anew)
        self.placement = self.unit.placement.name if self.unit.placement else None
        try:
            if self.unit.terms.parts == 1:
                result = forward(*args, **kwargs)
            else:
                parts = in_parts(args, kwargs, self.unit.batch_dims, self.unit.terms.parts)
                result = joined([forward(*some, **named) for some, named in parts])
            failed = False
            return result
        finally:
            self.manager.release(self.unit, failed=failed)

    def _others(self) -> list[ManagedModel]:
        others = self.manager.units() if self.alone or self.unit.terms.alone else self.stage
        return [unit for unit in others if unit is not self.unit]

    def _step_down(self, args: tuple, kwargs: dict, error: BaseException) -> None:
        unit, manager = self.unit, self.manager
        placement = unit.placement.name if unit.placement else None
        if placement == "streamed" and unit.resident_bytes <= sizes_of(unit).least_streamed_bytes:
            unit.terms = replace(unit.terms, share=0.0)  # there is nothing left to give up there
        manager.evict(unit)
        lower = next_terms(
            unit.terms, placement, len(sizes_of(unit).blocks) > 0, batch_of(args, kwargs, unit.batch_dims)
        )
        if lower is None:
            how, works_in = describe(unit.terms, placement), format_bytes(unit.working_bytes)
            raise DoesNotFitError(
                f"{unit.name} ran out of memory on {manager.device} even {how}: it works in {works_in} "
                f"beside its weights, of a budget of {format_bytes(manager.budget_bytes)}. Choose a smaller size or "
                f"fewer frames, or raise the vram budget. ({error})"
            ) from None
        log.warning("Ballast: out of memory in %s; once more %s", unit.name, describe(lower))
        unit.terms, self.placement = lower, None
        gc.collect()
        manager.make_room()
        manager.budget.ask_host(manager.accelerator.total_bytes())
