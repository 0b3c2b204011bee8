"""The history of one device's memory: events, a record of each stage, and the table and picture made from them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from ..accelerator import Accelerator, PeakMeter
from ..charts.text_tables import format_table
from ..planning.measured import Overhead
from ..planning.runplan import seconds as in_seconds
from ..sizes import format_bytes
from ..vocabulary import Role, Tier
from ..weights.unit import ManagedModel

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..planning.runplan import StagePlan

log = logging.getLogger("ballast")

EventKind = Literal["read", "load", "place", "call", "ran", "evict", "drop", "stage", "done", "look"]
Activity = Literal["converting", "reading", "compile", "compiled"]

_MAX_EVENTS = 20_000
_MAX_STAGES = 64


@dataclass(frozen=True)
class OnDevice:
    """A model's weights on the device at one moment: `bytes`, of which torch's allocator misses `uncounted_bytes`."""

    name: str
    role: Role
    bytes: int
    uncounted_bytes: int = 0


@dataclass(frozen=True)
class Event:
    """The state of the device at one moment, and the bytes of what happened.

    `peak_bytes` is the highest allocation since the event before, `reserved_peak_bytes` that of the allocator's pool.
    `other_bytes` of `allocated_bytes` are not ours; `guests` are the host's models among these. While files are read,
    `bytes` of `total_bytes` have come so far.
    """

    seconds: float
    kind: EventKind | Activity
    unit: str
    bytes: int
    allocated_bytes: int
    peak_bytes: int
    residents: tuple[OnDevice, ...]
    other_bytes: int = 0
    reserved_peak_bytes: int = 0
    guests: tuple[OnDevice, ...] = ()
    total_bytes: int = 0

    def own_peak_bytes(self, before: Event) -> int:
        """Return the peak of our own bytes since the event `before`.

        The bytes of others then are subtracted: while a stage runs, these only leave.
        """
        return max(self.peak_bytes - before.other_bytes, self.allocated_bytes - self.other_bytes, 0)


Watcher = Callable[[Event, ManagedModel], None]


@dataclass(frozen=True)
class CallCount:
    """The calls of a unit in one stage, of which a step cache, such as "static:2", skipped some."""

    cache: str
    calls: int
    skipped: int

    @property
    def computed(self) -> int:
        """The calls that were not skipped."""
        return self.calls - self.skipped


@dataclass
class UnitRecord:
    """The record of one unit in one stage. `counted` are the calls that a step cache saw, None without one."""

    name: str
    tier_before: Tier
    tier_after: Tier = "disk"
    placement: str = "-"
    bytes_in: int = 0
    counted: CallCount | None = None


@dataclass
class StageRecord:
    """One stage: its units, peaks in bytes, seconds, and its plan if there was one.

    `own_peak_bytes` is the peak of its own units and their work, which its plan forecasts; `other_bytes` were held by
    other models then. The driver counted `driver_bytes` at most: the allocator's pool, `reserved_peak_bytes`, and
    `outside_bytes` beside it. `run` is equal for all stages of one run, such as a prompt of ComfyUI.
    """

    name: str
    started: float
    units: dict[str, UnitRecord]
    seconds: float = 0.0
    peak_bytes: int = 0
    own_peak_bytes: int = 0
    other_bytes: int = 0
    reserved_peak_bytes: int = 0
    outside_bytes: int = 0
    budget_bytes: int = 0
    run: str = ""
    note: str = ""  # how it ran, such as "in tiles"; empty where it is as usual
    outcome: str = ""  # "interrupted" or "failed"; empty for a stage that ended well
    planned: StagePlan | None = None
    ram_is_short: bool = False
    strategy: str = ""  # as requested
    cache_decibels: float | None = None  # PSNR against a run without a step cache, where that was measured
    events: list[Event] = field(default_factory=list)

    @property
    def overhead(self) -> Overhead:
        """The memory that the stage took beyond tensors."""
        spare = max(0, self.reserved_peak_bytes - self.peak_bytes)
        return Overhead(spare_bytes=spare, at_bytes=self.peak_bytes, outside_bytes=self.outside_bytes)

    @property
    def driver_bytes(self) -> int:
        """Peak bytes that the driver counted for this process; those of torch alone if the driver's are unknown."""
        return max(self.reserved_peak_bytes, self.peak_bytes) + self.outside_bytes

    @property
    def title(self) -> str:
        """The name, then how it ran, and how it ended if not well."""
        return ", ".join(filter(None, [self.name, self.note, self.outcome]))

    def ended_by(self, error: BaseException) -> None:
        """Set `outcome` from the error. ComfyUI's interrupt is a BaseException, in older versions an Exception."""
        is_stop = not isinstance(error, Exception) or type(error).__name__ == "InterruptProcessingException"
        self.outcome = "interrupted" if is_stop else "failed"

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the steps in which nothing but steps happened; None where there are none.

        The first step is left out, since it waits for weights. So are steps with a load, placement or eviction: a call
        was made again, a unit displaced another, or the layout changed once rates were measured.
        """
        steps = self.planned.steps if self.planned else 0
        calls = [i for i, event in enumerate(self.events) if event.kind == "ran"]
        if steps < 2 or not calls or len(calls) % steps:
            return None
        each = len(calls) // steps
        ends = calls[each - 1 :: each]
        steady = [
            self._done(end) - self._done(before)
            for before, end in pairwise(ends)
            if not any(event.kind in ("load", "place", "evict") for event in self.events[before:end])
        ]
        return sum(steady) / len(steady) if steady else None

    def _done(self, call: int) -> float:
        """Return when the device was done with a call: the time of the next event, as a call returns earlier."""
        return self.events[min(call + 1, len(self.events) - 1)].seconds

    @property
    def has_others(self) -> bool:
        """Return whether other models held more than the 1 % by which an allocator rounds."""
        return self.other_bytes * 100 > self.own_peak_bytes

    def summary(self) -> str:
        """Return one line: outcome, note, bytes brought in, peaks, step and total seconds, with planned values."""
        said = [*filter(None, [self.outcome, self.note])]
        came = [unit for unit in self.units.values() if unit.bytes_in]
        least = {"streamed": "leafwise"} if self.strategy == "leafwise" else {}
        named = [f"{unit.name} {least.get(unit.placement, unit.placement)}".strip() for unit in came]
        said += [f"{name}, {format_bytes(unit.bytes_in)} in" for name, unit in zip(named, came, strict=True)]
        counts = [unit.counted for unit in self.units.values() if unit.counted]
        said += [f"computed {count.computed} of {count.calls} calls, cache {count.cache}" for count in counts]
        if self.cache_decibels is not None:
            said.append(f"{self.cache_decibels:.1f} dB against a run without a cache")
        said += ["RAM is short: weights come from disk"] * self.ram_is_short
        planned, per_step = self.planned, self.step_seconds
        if self.peak_bytes:
            plan = f" (planned {format_bytes(planned.peak_vram_bytes)})" if planned else ""
            said.append(f"peak {format_bytes(self.own_peak_bytes)}{plan}")
            if self.driver_bytes > self.peak_bytes:
                plan = f" (planned {format_bytes(planned.driver_bytes)})" if planned else ""
                said.append(f"{format_bytes(self.driver_bytes)} by the driver{plan}")
            if self.has_others:
                said.append(f"{format_bytes(self.other_bytes)} of other models beside it")
        else:
            said.append("on the CPU")
        if planned and per_step is not None:
            # Seconds from assumed rates are no forecast, and simulated ones are of the virtual clock.
            measured = planned.rates.source == "measured"
            plan = f" (planned {in_seconds(planned.step_seconds)})" if measured else ""
            said.append(f"{in_seconds(per_step)} a step{plan}")
        return "; ".join([*said, f"{self.seconds:.1f} s"])


class Timeline:
    """The newest 20000 events and 64 stages of one device.

    `residents` returns our weights on the device now, `guests` those of the host.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        residents: Callable[[], tuple[OnDevice, ...]],
        guests: Callable[[], tuple[OnDevice, ...]] = tuple,
    ) -> None:
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self.stages: deque[StageRecord] = deque(maxlen=_MAX_STAGES)
        self._accelerator, self._peaks = accelerator, PeakMeter(accelerator)
        self._residents, self._guests = residents, guests
        self.target_bytes = 0  # own budget of the observed node, 0 if it has none
        self._stage: StageRecord | None = None
        self._units: Sequence[ManagedModel] = ()
        self._outer: list[tuple[StageRecord | None, Sequence[ManagedModel]]] = []  # stages around the present one
        self._last: Event | None = None
        self._kept = 0  # bytes of units that the present stage does not run, at the last event
        self.run = ""  # for stages that begin from now on
        self._watcher: Watcher | None = None

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Tell `watcher` of each event of a unit, as it happens, until the block ends."""
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before

    def record(self, kind: EventKind, unit: ManagedModel | None = None, bytes: int = 0) -> Event:
        """Record an event with the memory as it is now, and add it to the present stage."""
        residents, allocated = self._residents(), self._accelerator.allocated_bytes()
        others = max(0, allocated - sum(resident.bytes for resident in residents))
        if self._stage is not None and self._last is not None:
            others = min(others, self._last.other_bytes)  # bytes that came during a stage are our work
        peaks = self._peaks.take()
        event = Event(
            seconds=time.perf_counter(),
            kind=kind,
            unit=unit.name if unit else "",
            bytes=bytes,
            allocated_bytes=allocated,
            peak_bytes=peaks.allocated_bytes,
            reserved_peak_bytes=peaks.reserved_bytes,
            residents=residents,
            other_bytes=others,
            guests=self._guests(),
        )
        before, self._last = self._last or event, event
        self.events.append(event)
        if self._stage is not None:
            self._stage.events.append(event)
            self._stage.peak_bytes = max(self._stage.peak_bytes, event.peak_bytes)
            self._stage.reserved_peak_bytes = max(self._stage.reserved_peak_bytes, event.reserved_peak_bytes)
            now = sum(resident.bytes for resident in residents) - sum(unit.resident_bytes for unit in self._units)
            # Models of other pipelines are not in this plan, nor is one that left since the last event.
            kept, self._kept = max(now, self._kept), now
            peak = event.own_peak_bytes(before) - kept
            if peak > self._stage.own_peak_bytes:
                self._stage.own_peak_bytes, self._stage.other_bytes = peak, others + kept
            if kind in ("place", "ran") and unit is not None and unit.placement and unit.name in self._stage.units:
                mine = self._stage.units[unit.name]
                mine.bytes_in += bytes
                mine.placement = unit.placement.name
        if self._watcher is not None and unit is not None:
            self._watcher(event, unit)
        return event

    def ram_is_short(self, unit: ManagedModel) -> None:
        """Note that a unit comes from disk because RAM is short, with one warning a stage."""
        if self._stage is None or not self._stage.ram_is_short:
            log.warning("Ballast: RAM is short: weights of %s come from disk", unit.name)
        if self._stage is not None:
            self._stage.ram_is_short = True

    def count_calls(self, unit: ManagedModel, count: CallCount) -> None:
        """Add calls to the record of a unit in the present stage: a batch is drawn in parts."""
        if self._stage is not None and (mine := self._stage.units.get(unit.name)) is not None:
            before = mine.counted or CallCount(count.cache, 0, 0)
            mine.counted = CallCount(count.cache, before.calls + count.calls, before.skipped + count.skipped)

    @property
    def newest_sampling(self) -> StageRecord | None:
        """The newest record of a sampling stage."""
        return next((stage for stage in reversed(self.stages) if stage.name == "sample"), None)

    @property
    def is_in_stage(self) -> bool:
        """Return whether one of our stages is running."""
        return self._stage is not None

    def moment(self) -> Event:
        """Return an event of this moment for an observed node. It is not recorded, but the peak starts anew."""
        models = (*self._residents(), *self._guests())
        uncounted = sum(model.uncounted_bytes for model in models)
        allocated = self._accelerator.allocated_bytes() + uncounted
        peak = self._peaks.take().allocated_bytes + uncounted
        return Event(time.perf_counter(), "look", "", 0, allocated, peak, models)

    def tell(self, kind: Activity, unit: ManagedModel, bytes: int = 0, total_bytes: int = 0) -> None:
        """Send the watcher an event of progress. It is not recorded, and the peak counts for the next event."""
        if self._watcher is not None:
            allocated = self._accelerator.allocated_bytes()
            self._watcher(
                Event(time.perf_counter(), kind, unit.name, bytes, allocated, 0, (), total_bytes=total_bytes), unit
            )

    def note(self, text: str) -> None:
        """Set the note of the present stage: how it runs, such as "in tiles"."""
        if self._stage is not None:
            self._stage.note = text

    def begin(self, name: str, units: Sequence[ManagedModel], budget_bytes: int) -> StageRecord:
        """Open the record of a stage; events belong to it until `finish`."""
        self.record("done")
        records = {unit.name: UnitRecord(unit.name, unit.tier) for unit in units}
        self._outer.append((self._stage, self._units))
        self._stage = StageRecord(name, time.perf_counter(), records, budget_bytes=budget_bytes, run=self.run)
        self._units, self._kept = units, 0
        self.stages.append(self._stage)
        self.record("stage")
        return self._stage

    def finish(self, stage: StageRecord, units: Sequence[ManagedModel]) -> None:
        """Close the record of a stage."""
        self.record("done")
        self._accelerator.ask_driver()
        stage.outside_bytes = self._accelerator.outside_bytes()
        stage.seconds = time.perf_counter() - stage.started
        for unit in units:
            stage.units[unit.name].tier_after = unit.tier
        self._stage, self._units = self._outer.pop()
        self._kept = 0

    def clear(self) -> None:
        """Forget all events and stages."""
        self.events.clear()
        self.stages.clear()

    def newest(self, stages: int = _MAX_STAGES, runs: int | None = None) -> list[StageRecord]:
        """Return the newest `stages` stages, oldest first; with `runs`, only those of the newest `runs` runs."""
        found = list(self.stages)
        if runs:
            kept = list(dict.fromkeys(stage.run for stage in reversed(found)))[:runs]
            found = [stage for stage in found if stage.run in kept]
        return found[-stages:]

    def table(self, stages: int = _MAX_STAGES, runs: int | None = None) -> str:
        """Return a text table with a row for each unit of each of the newest stages.

        Columns: tiers, placement, bytes brought in, calls that a step cache let be computed, budget, peaks, planned
        peak and seconds.
        """
        found = self.newest(stages, runs)
        others = any(stage.has_others for stage in found)
        driver = any(stage.driver_bytes > stage.peak_bytes for stage in found)
        several = len({stage.run for stage in found}) > 1
        cached = any(unit.counted for stage in found for unit in stage.units.values())
        heading = ["stage", "unit", "tier before", "tier after", "placement", "bytes in", *["computed"] * cached]
        heading.append("budget")
        measured = any(stage.cache_decibels is not None for stage in found)
        heading += ["dB"] * measured
        rows = [
            ("run",) * several + (*heading, *("others",) * others, "peak", *("driver",) * driver, "planned", "seconds")
        ]
        for stage, run in zip(found, names_of_runs(found), strict=True):
            facts = [
                *["" if stage.cache_decibels is None else f"{stage.cache_decibels:.1f}"] * measured,
                *[format_bytes(stage.other_bytes)] * others,
                format_bytes(stage.own_peak_bytes),
                *[format_bytes(stage.driver_bytes)] * driver,
                format_bytes(stage.planned.peak_vram_bytes) if stage.planned else "-",
                f"{stage.seconds:.2f}",
            ]
            budget = format_bytes(stage.budget_bytes) if stage.peak_bytes else "-"
            for i, unit in enumerate(stage.units.values()):
                row = [unit.name, unit.tier_before, unit.tier_after, unit.placement, format_bytes(unit.bytes_in)]
                row += [f"{unit.counted.computed} of {unit.counted.calls}" if unit.counted else ""] * cached
                first = (run,) * several + (stage.title,)
                rows.append((*([""] * len(first) if i else first), *row, *("" if i else f for f in (budget, *facts))))
        return format_table(rows)

    def picture(
        self,
        width: int = 1200,
        height: int = 480,
        stages: int = _MAX_STAGES,
        runs: int | None = None,
        scale: float = 1.0,
    ) -> Image:
        """Return a picture of VRAM over time in the newest stages, by unit.

        It is RGB with `width` by `height` pixels, times `scale` each way. Without matplotlib it says so.
        """
        from ..charts import drawn

        found = self.newest(stages, runs)
        return drawn(lambda: _draw(found, width, height, scale), round(width * scale), round(height * scale))


def _draw(stages: Sequence[StageRecord], width: int, height: int, scale: float = 1.0) -> Image:
    from ..charts.timeline_chart import Span, Stage, draw_timeline

    def spans(stage: StageRecord) -> Iterator[Span]:
        for before, event in zip(stage.events, stage.events[1:], strict=False):
            # During a placement the peak is the arriving weights, not work.
            held = before.allocated_bytes - before.other_bytes
            peak = held if event.kind == "place" else event.own_peak_bytes(before)
            weights: dict[str, int] = {}
            # With "look" events, weights came at some time in between.
            for unit in (
                event if event.kind == "look" else before
            ).residents:  # units of two pipelines may have the same name
                weights[unit.name] = weights.get(unit.name, 0) + unit.bytes
            guests = {guest.name: guest.bytes for guest in before.guests}
            yield Span(before.seconds - stage.started, event.seconds - stage.started, weights, peak, guests)

    charted = []
    for stage, run in zip(stages, names_of_runs(stages), strict=True):
        found, planned = tuple(spans(stage)), 0
        if stage.planned:  # above models of other pipelines, which are not in it
            kept = max([stage.own_peak_bytes, *(span.peak_bytes for span in found)]) - stage.own_peak_bytes
            planned = stage.planned.peak_vram_bytes + kept
        drawn = max((sum(span.guests.values()) for span in found), default=0)
        others = max(0, stage.other_bytes - drawn) * stage.has_others
        others = others if others * 100 > stage.other_bytes else 0  # less than an allocator rounds
        facts = stage.budget_bytes, stage.own_peak_bytes
        charted.append(Stage(stage.title, stage.seconds, *facts, found, planned, others, run, bool(stage.outcome)))
    roles = {
        model.name: model.role
        for stage in stages
        for event in stage.events
        for model in (*event.residents, *event.guests)
    }
    return draw_timeline(charted, roles, width, height, scale)


def names_of_runs(stages: Sequence[StageRecord]) -> list[str]:
    """Return the name of each stage's run: "this" for the newest, "1 before" for the run before it, and so on."""
    runs = list(dict.fromkeys(stage.run for stage in reversed(stages)))
    return [f"{back} before" if (back := runs.index(stage.run)) else "this" for stage in stages]
