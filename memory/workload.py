"""The workloads of units in the stages of a graph, and the memory that they were seen to take beside weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace

from .planning import learned
from .planning.fit import Demand, sizes_of
from .planning.forecast import UnitForecast
from .planning.measured import Measured, Overhead, differs, measured_loads, spread
from .planning.oom_fallback import Attempt, is_slow
from .planning.solver import Loads
from .rates import ASSUMED, Rates
from .weights.unit import ManagedModel


@dataclass(frozen=True)
class Workload:
    """The workload of a unit in one stage.

    `kind` tells sizes of work apart, which differ in their working memory; `forecast` is what the stage was found to
    take beforehand, None where that is not known, at these `rates`; `attempt` how its calls are tried now.

    On a `card` that tells what a call computes, that is `measured`: once in a stage, as long as it `learns`, if all
    its calls are of the same `shapes`. One that `pages` silently is believed only as far as it cannot be paging.
    `overhead` is what it is to take beyond the forecast.
    """

    kind: Hashable = None
    forecast: UnitForecast | None = None
    attempt: Attempt = field(default_factory=Attempt)
    rates: Rates = ASSUMED
    card: str = ""
    measured: Measured | None = None
    learns: bool = False
    shapes: Hashable = None
    pages: bool = False
    overhead: Overhead = field(default_factory=Overhead)


@dataclass
class _Seen:
    """The bytes that calls of one unit took, by kind of work."""

    most: dict[Hashable, int] = field(default_factory=dict)
    above: dict[Hashable, int] = field(default_factory=dict)  # how far the first call was above its forecast


class WorkloadStats:
    """The present work of each unit, or the last that it did, and what calls were seen to take."""

    def __init__(self) -> None:
        self._now: weakref.WeakKeyDictionary[ManagedModel, Workload] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[ManagedModel, _Seen] = weakref.WeakKeyDictionary()

    def of(self, unit: ManagedModel) -> Workload:
        """Return what a unit does."""
        return self._now.get(unit, Workload())

    def begin(self, unit: ManagedModel, work: Workload) -> None:
        """Note what a unit is going to do. What was measured of it before, in whatever process, is recalled."""
        if work.card and work.forecast:
            found = learned.recall(work.card, sizes_of(unit), work.forecast)
            overhead = learned.recall_overhead(work.card, sizes_of(unit), work.forecast, work.overhead.outside_bytes)
            work = replace(work, measured=found, learns=True, overhead=overhead)
        self._now[unit] = work

    def called(self, unit: ManagedModel, shapes: Hashable) -> None:
        """Note the shapes of the arguments of a call. Where they are not always the same, no call tells of others."""
        work = self.of(unit)
        if work.shapes is None:
            self._now[unit] = replace(work, shapes=shapes)
        elif work.shapes != shapes and (work.learns or work.measured):
            if work.measured and work.forecast:
                learned.keep(work.card, sizes_of(unit), work.forecast, None)
            self._now[unit] = replace(work, learns=False, measured=None)

    def resume(self, unit: ManagedModel, work: Workload) -> None:
        """Go on with what a unit did before other work came between."""
        self._now[unit] = work

    def retry(self, unit: ManagedModel, attempt: Attempt) -> None:
        """Try the calls of a unit in another way from now on."""
        self._now[unit] = replace(self.of(unit), attempt=attempt)

    def stays(self, unit: ManagedModel) -> None:
        """Note that the weights of a unit do not leave for those that it takes turns with."""
        work = self.of(unit)
        if work.forecast:
            self._now[unit] = replace(work, forecast=replace(work.forecast, turns=1))

    def working_bytes(self, unit: ManagedModel, held_bytes: int = 0) -> int:
        """Return what a unit's present work takes beside its weights, on top of what its stage holds there by now.

        0 if it is not known.
        """
        work, seen = self.of(unit), self._seen.get(unit, _Seen())
        if work.forecast is None:
            return seen.most.get(work.kind, 0)
        expected = work.forecast.with_decoding(sizes_of(unit).decoding_beside())
        peak_bytes = expected.peak_bytes + max(seen.above.get(work.kind, 0), work.overhead.workspace_bytes)
        return max(0, peak_bytes - held_bytes)

    def took(self, unit: ManagedModel, measured_bytes: int, held_bytes: int = 0, decoded: Collection[int] = ()) -> None:
        """Note what one call took beside the weights, on top of what its stage held there before.

        Of the groups these were `decoded` for good before it.
        A call that was run in parts would have taken that many times.
        """
        work, seen = self.of(unit), self._seen.setdefault(unit, _Seen())
        measured_bytes *= work.attempt.parts
        if work.forecast and work.kind not in seen.most:
            # Less is no reason to take more than was planned: some forecasts are upper bounds, for any routing.
            first = work.forecast.with_decoding(sizes_of(unit).decoding_beside(decoded))
            seen.above[work.kind] = max(0, held_bytes + measured_bytes - first.live_bytes - first.first_bytes)
        seen.most[work.kind] = max(seen.most.get(work.kind, 0), measured_bytes)

    def overheads(self, units: Iterable[ManagedModel]) -> Overhead:
        """Return what a stage of these units is to take beyond their forecasts."""
        return functools.reduce(Overhead.over, (self.of(unit).overhead for unit in units), Overhead())

    def took_in_all(self, units: Iterable[ManagedModel], seen: Overhead) -> None:
        """Note what a stage of these units took beyond tensors. What its calls took is known by now."""
        for unit in units:
            work, above = self.of(unit), self._seen.get(unit, _Seen()).above
            if work.card and work.forecast and work.kind in above and work.attempt.parts == 1:
                seen = replace(seen, workspace_bytes=above[work.kind])
                learned.keep_overhead(work.card, sizes_of(unit), work.forecast, seen)

    def computed(self, unit: ManagedModel, work: Workload, measured: Measured) -> None:
        """Note what the groups of a call computed, which was of this work. What is as expected changes nothing."""
        now = self.of(unit)
        if not work.forecast or now.forecast != work.forecast or not now.learns:
            return
        loads = self._loads(unit)
        if now.pages and is_slow(measured_loads(loads, measured).compute_seconds, loads.compute_seconds):
            pass  # it was not the computing that took so long
        elif differs(loads, measured):
            measured = learned.keep(work.card, sizes_of(unit), work.forecast, measured) or measured
            now = replace(now, measured=measured)
        self._now[unit] = replace(now, learns=False)

    def computed_whole(self, unit: ManagedModel, work: Workload, seconds: float, decoded: Iterable[int]) -> None:
        """Note what a call took of a unit of which all was on the device, these groups decoded for good."""
        groups, loads = sizes_of(unit).groups, self._loads(unit)
        spared = sum(groups[i].decode_seconds(work.rates) for i in decoded)
        if measured := spread(loads, seconds + spared):
            self.computed(unit, work, measured)

    def _loads(self, unit: ManagedModel) -> Loads:
        work = self.of(unit)
        return measured_loads(sizes_of(unit).loads(work.forecast, work.rates), work.measured)

    def call_seconds(self, unit: ManagedModel, kind: str, weights_bytes: int) -> float:
        """Return what a call is planned to take with so many bytes of weights on the device; 0 if that is not known."""
        work = self.of(unit)
        known = work.forecast is not None and work.rates.source != "assumed"
        return self.demand(unit).call_seconds(kind, weights_bytes) if known else 0.0

    def demand(self, unit: ManagedModel, held_bytes: int = 0) -> Demand:
        """Return the demand of a unit for its present work, on top of what its stage holds beside weights."""
        work, loads = self.of(unit), self._loads(unit)
        return Demand(
            unit.name,
            sizes_of(unit),
            replace(loads, spared_bytes=int(work.attempt.share * loads.spared_bytes)),
            self.working_bytes(unit, held_bytes),
            work.attempt.share,
            work.forecast is not None,
        )
