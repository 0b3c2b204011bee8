"""A stage of a graph: its units are placed when their modules are called, and evicted when the stage ends."""

from __future__ import annotations

import gc
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .engine.event_timer import Pace
from .errors import DoesNotFitError, is_out_of_memory, release_frames
from .host import management as host
from .host.flags import host_flags
from .planning import learned
from .planning.fit import sizes_of
from .planning.forecast import Forecast
from .planning.oom_fallback import Fallback, describe, next_fallback, next_share
from .planning.runplan import StagePlan
from .probe import card_of, known_rates
from .ram import give_back_heap
from .reports.timeline import StageRecord
from .sizes import format_bytes
from .weights.batch import batch_of, in_parts, joined, shapes_of
from .weights.interpose import Forward, interpose
from .weights.unit import ManagedModel
from .workload import Workload

if TYPE_CHECKING:
    from .memory_manager import MemoryManager

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class StageRequest:
    """The arguments of `MemoryManager.stage`, except for its budgets and the units that follow."""

    name: str
    units: Sequence[ManagedModel]
    strategy: str
    work: Hashable
    forecast: Forecast | None
    planned: StagePlan | None
    alone: bool
    keep: bool


@contextmanager
def run_stage(manager: MemoryManager, stage: StageRequest) -> Iterator[None]:
    """Run a stage. See `MemoryManager.stage`, which holds the stage's lock and budget around this."""
    units, strategy, forecast, planned = stage.units, stage.strategy, stage.forecast, stage.planned
    flags = host_flags()
    keep, ended_well = flags.keeps(stage.keep), False
    least = learned.least_overhead(manager.accelerator)
    with ExitStack() as exits:
        for unit in units:
            manager.adopt(unit)
            exits.enter_context(_entered(manager, unit))
            found = forecast.units.get(unit.name) if forecast else None
            if found:
                unit.learn(found.call_order)
            attempt = Fallback(strategy, share=0.0 if flags.least or strategy == "leafwise" else 1.0)
            card = "" if manager.accelerator.is_cpu or strategy == "cpu" else card_of(manager.device)
            rates, pages = known_rates(manager.device, unit.disk), manager.accelerator.pages_silently
            doing = Workload(stage.work, found, attempt, rates, card=card, pages=pages, overhead=least)
            manager.work.begin(unit, doing)
            unit.runs_on(manager.execution_device(strategy))
            exits.callback(interpose(unit.module, _Calls(manager, unit, units, stage.alone).run))
        overhead = manager.work.overheads(units)
        exits.enter_context(manager.budget.reserving(overhead))
        exits.enter_context(manager.budget.keeping_in_ram(forecast.kept_in_ram if forecast else 0))
        exits.enter_context(manager.take_turns(units))
        manager.shrink_for_stage(units, strategy, forecast.idle_bytes if forecast else 0)
        record = manager.timeline.begin(stage.name, units, overhead.driver_bytes(manager.budget_bytes))
        # Exits run in reverse: the record is finished first, whatever happens as the units leave, then learned from.
        learn = exits.enter_context(ExitStack())
        exits.callback(manager.timeline.finish, record, units)
        kept_bytes = sum(unit.resident_bytes for unit in units)
        record.planned, record.strategy = planned and planned.beginning_with(kept_bytes), strategy
        try:
            with torch.inference_mode():
                yield
            learn.callback(_learn, manager, record, units)
            ended_well = True
        except BaseException as error:
            record.ended_by(error)
            release_frames(error)
            raise
        finally:
            manager.end_stage(units, keep and ended_well)
            if not ended_well:
                manager.stop_reading()
            manager.accelerator.empty_cache()
            give_back_heap()


@contextmanager
def _entered(manager: MemoryManager, unit: ManagedModel) -> Iterator[None]:
    """Count a stage of a unit. After a stage within another stage of the same unit, restore the outer stage's state.

    An `on_step` callback may run such an inner stage.
    """
    work, device = manager.work.of(unit), unit.reported_device
    unit.stages += 1
    try:
        yield
    finally:
        unit.stages -= 1
        if unit.stages:
            manager.evict(unit)  # it is placed for the inner stage's budget, device and forecast
            manager.work.resume(unit, work)
            unit.runs_on(device)


def _learn(manager: MemoryManager, record: StageRecord, units: Sequence[ManagedModel]) -> None:
    """Record what a stage took beyond tensors, unless models outside the pack took a part of it."""
    if not record.has_others:
        manager.work.took_in_all(units, record.overhead)


class _Calls:
    """The calls of one unit in a stage. Each runs under a lease, and is tried again in less memory when it runs out."""

    def __init__(self, manager: MemoryManager, unit: ManagedModel, stage: Sequence[ManagedModel], alone: bool) -> None:
        self.manager, self.unit, self.stage, self.alone = manager, unit, stage, alone
        self.depth = unit.stages  # number of stages of the unit that are open, each within the one before
        self.first = True
        self.placement: str | None = None  # chosen at the first call, and kept for the others
        self.pace = Pace(manager.device) if manager.accelerator.pages_silently else None
        self.slow: float | None = None  # seconds of the call for which the share was last lowered
        self.usual: Fallback | None = None  # the attempt before any share was lowered for slowness

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a call of the unit's module, in place of its `forward`.

        Raises DoesNotFitError when all fallbacks fail.
        """
        if self.unit.stages != self.depth:
            return forward(*args, **kwargs)  # an inner stage has wrapped this call, and placed the unit
        if self.first:
            self.first = False
            self.manager.strike(self.unit)
        while True:
            host.throw_if_interrupted()
            try:
                return self._run_once(forward, args, kwargs)
            except Exception as error:
                if not is_out_of_memory(error) or self.attempt.strategy == "cpu":
                    raise
                release_frames(error)
                self._step_down(args, kwargs, error)

    def _run_once(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a call once, as the present attempt says, under a lease."""
        failed = True
        self._keep_pace()
        strategy, anew = self.placement or self.attempt.strategy, self.placement is None
        self.manager.work.called(self.unit, shapes_of(args, kwargs))
        held = self.unit.resident_bytes
        self.manager.acquire(self.unit, strategy, instead_of=self._others(), anew=anew)
        self.placement = self.unit.placement.name if self.unit.placement else None
        if self.pace and not anew and self.unit.resident_bytes == held:  # time no call that brings weights
            self.pace.begin()
        try:
            if self.attempt.parts == 1:
                result = forward(*args, **kwargs)
            else:
                parts = in_parts(args, kwargs, self.unit.batch_dims, self.attempt.parts)
                result = joined([forward(*some, **named) for some, named in parts])
            failed = False
            if self.pace and self.unit.runs_partly:
                self.pace.forget()
            elif self.pace:
                self.pace.end()
            return result
        finally:
            self.manager.release(self.unit, failed=failed)

    def _keep_pace(self) -> None:
        """Hold less of a unit on the device if its calls are much slower than planned: the device may page silently.

        If that does not help, the unit gets its full share again, and its calls are not timed any more.
        """
        seconds = self.pace.seconds() if self.pace else None
        if seconds is None or self.unit.placement is None or not self.unit.in_ram:
            return
        planned = self.manager.work.call_seconds(self.unit, self.unit.placement.name, self.unit.resident_bytes)
        share = None
        if self.attempt.strategy != "resident":
            share = next_share(self.attempt.share, seconds, planned, self.slow)
        if share is None:
            self.slow = None
        elif share == 1.0:
            self._restore_share(seconds)
        else:
            self._lower_share(share, seconds, planned)

    def _restore_share(self, seconds: float) -> None:
        """Give a unit its full share again, since holding less did not help: calls are slow for another reason."""
        self.pace, self.slow = None, seconds
        self.manager.evict(self.unit)
        self._retry(self.usual or self.attempt)

    def _lower_share(self, share: float, seconds: float, planned: float) -> None:
        """Let a unit hold `share` of its weights on the device, after a call of `seconds` in place of `planned`."""
        if self.pace:
            self.pace.forget()
        if self.usual is None:
            log.warning(
                "Ballast: %s takes %.3g s a call on %s, not %.3g s as planned, as where memory is paged; from now "
                "on fewer of its weights stay there. Lower the vram budget to begin so.",
                self.unit.name, seconds, self.manager.device, planned,
            )  # fmt: skip
            self.usual = self.attempt
        self.slow = seconds
        self.manager.evict(self.unit)
        self._retry(replace(self.attempt, strategy="streamed", share=share))

    def _retry(self, attempt: Fallback) -> None:
        """Make `attempt` the way in which calls are tried from now on. The next call chooses the placement."""
        self.manager.work.retry(self.unit, attempt)
        self.placement = None

    @property
    def attempt(self) -> Fallback:
        """The way in which calls are tried now."""
        return self.manager.work.of(self.unit).attempt

    def _others(self) -> list[ManagedModel]:
        """Return the units that leave for a call: the stage's others, or all others."""
        others = self.manager.units() if self.alone or self.attempt.alone else self.stage
        return [unit for unit in others if unit is not self.unit]

    def _step_down(self, args: tuple, kwargs: dict, error: BaseException) -> None:
        """Set the next attempt after a call that ran out of memory, and free what may leave the device.

        Raises DoesNotFitError if there is none.
        """
        failed = self._failed_attempt()
        can_stream = (sizes := sizes_of(self.unit)).least_streamed_bytes < sizes.resident_bytes
        self.manager.evict(self.unit)
        if self.pace:
            self.pace.forget()
        lower = next_fallback(failed, can_stream, batch_of(args, kwargs, self.unit.batch_dims))
        if lower is None:
            raise self._no_fallback_left(failed, error) from None
        log.warning("Ballast: out of memory in %s; once more %s", self.unit.name, describe(lower))
        self._retry(lower)
        gc.collect()
        self.manager.make_device_room()
        self.manager.budget.ask_host(self.manager.accelerator.total_bytes())

    def _failed_attempt(self) -> Fallback:
        """Return the attempt that ran out of memory. Its share is 0 if the unit held the least that it can stream in.

        A lower share than the present one would then free nothing.
        """
        unit, placement = self.unit, self.unit.placement
        if placement and placement.name == "streamed" and unit.resident_bytes <= sizes_of(unit).least_streamed_bytes:
            return replace(self.attempt, share=0.0)
        return self.attempt

    def _no_fallback_left(self, failed: Fallback, error: BaseException) -> DoesNotFitError:
        """Return the error for a unit whose last attempt ran out of memory."""
        unit, manager = self.unit, self.manager
        how, activations = describe(failed), format_bytes(manager.work.working_bytes(unit))
        return DoesNotFitError(
            f"{unit.name} ran out of memory on {manager.device} even {how}: its activations take "
            f"{activations} beside its weights, of a budget of {format_bytes(manager.budget_bytes)}. Choose a "
            f"smaller size or fewer frames, or raise the vram budget. ({error})"
        )
