"""The workloads of units in the stages of a graph, and the memory and time that their calls were seen to take."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace

from .planning import learned
from .planning.fit import Demand, sizes_of
from .planning.forecast import UnitForecast
from .planning.measured import Measured, Overhead, differs, measured_loads
from .planning.oom_fallback import Fallback, is_slow
from .planning.solver import Loads
from .rates import ASSUMED, Rates
from .weights.unit import ManagedModel


@dataclass(frozen=True)
class Workload:
    """The workload of a unit in one stage.

    - `kind` tells workloads of different size apart, which differ in their working memory.
    - `forecast` is the result of the dry run, None if there is none. `rates` are the speeds that go with it.
    - `attempt` is the way in which calls are tried now, see `oom_fallback`.
    - `card` is the key of the device's measurements, "" if nothing is measured there. `measured` are the seconds of the
      groups. They are measured once in a stage, while `learns` is true, if all calls have the same `shapes`.
    - On a device that pages silently (`pages`) a slow measurement is not believed: it may be the paging.
    - `overhead` are the bytes expected beyond the forecast.
    """

    kind: Hashable = None
    forecast: UnitForecast | None = None
    attempt: Fallback = field(default_factory=Fallback)
    rates: Rates = ASSUMED
    card: str = ""
    measured: Measured | None = None
    learns: bool = False
    shapes: Hashable = None
    pages: bool = False
    overhead: Overhead = field(default_factory=Overhead)


@dataclass
class _Seen:
    """The bytes that calls of one unit took, by kind of workload."""

    most: dict[Hashable, int] = field(default_factory=dict)  # the most working memory of any call
    above: dict[Hashable, int] = field(default_factory=dict)  # the excess of the first call over its forecast


class WorkloadStats:
    """The present or last workload of each unit, and the bytes and seconds that its calls were seen to take."""

    def __init__(self) -> None:
        self._now: weakref.WeakKeyDictionary[ManagedModel, Workload] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[ManagedModel, _Seen] = weakref.WeakKeyDictionary()

    def of(self, unit: ManagedModel) -> Workload:
        """Return the workload of a unit, an empty one if it has none."""
        return self._now.get(unit, Workload())

    def begin(self, unit: ManagedModel, work: Workload) -> None:
        """Set the workload of a unit when a stage begins.

        Earlier measurements of it, from any process, are recalled.
        """
        if work.card and work.forecast:
            found = learned.recall(work.card, sizes_of(unit), work.forecast)
            overhead = learned.recall_overhead(work.card, sizes_of(unit), work.forecast).over(work.overhead)
            work = replace(work, measured=found, learns=True, overhead=overhead)
        self._now[unit] = work

    def called(self, unit: ManagedModel, shapes: Hashable) -> None:
        """Note the shapes of a call's arguments. If they change within a stage, no call stands for the others.

        Then measured seconds are forgotten, and nothing is measured any more.
        """
        work = self.of(unit)
        if work.shapes is None:
            self._now[unit] = replace(work, shapes=shapes)
        elif work.shapes != shapes and (work.learns or work.measured):
            if work.measured and work.forecast:
                learned.keep(work.card, sizes_of(unit), work.forecast, None)
            self._now[unit] = replace(work, learns=False, measured=None)

    def resume(self, unit: ManagedModel, work: Workload) -> None:
        """Set the workload of a unit back to that of an outer stage, after an inner one."""
        self._now[unit] = work

    def retry(self, unit: ManagedModel, attempt: Fallback) -> None:
        """Try the calls of a unit in another way from now on."""
        self._now[unit] = replace(self.of(unit), attempt=attempt)

    def stays(self, unit: ManagedModel) -> None:
        """Note that a unit's weights stay while others take their turns."""
        work = self.of(unit)
        if work.forecast:
            self._now[unit] = replace(work, forecast=replace(work.forecast, turns=1))

    def working_bytes(self, unit: ManagedModel, held_bytes: int = 0) -> int:
        """Return the bytes that a unit's present workload takes beside its weights; 0 if they are not known.

        `held_bytes` is what its stage holds already, which is subtracted from a forecast.
        """
        work, seen = self.of(unit), self._seen.get(unit, _Seen())
        if work.forecast is None:
            return seen.most.get(work.kind, 0)
        expected = work.forecast.with_dequantizing(sizes_of(unit).dequantizing_beside())
        peak_bytes = expected.peak_bytes + max(seen.above.get(work.kind, 0), work.overhead.workspace_bytes)
        return max(0, peak_bytes - held_bytes)

    def took(self, unit: ManagedModel, measured_bytes: int, held_bytes: int = 0, decoded: Collection[int] = ()) -> None:
        """Note the bytes that one call took beside the weights.

        `held_bytes` is what the stage held before the call. `decoded` names the groups that were kept dequantized by
        then. A call whose batch ran in parts is counted as if it had run whole.
        """
        work, seen = self.of(unit), self._seen.setdefault(unit, _Seen())
        measured_bytes *= work.attempt.parts
        if work.forecast and work.kind not in seen.most:
            # A call below its forecast must not lower it: some forecasts are upper bounds, such as those for any
            # routing of a mixture of experts.
            first = work.forecast.with_dequantizing(sizes_of(unit).dequantizing_beside(decoded))
            seen.above[work.kind] = max(0, held_bytes + measured_bytes - first.live_bytes - first.first_bytes)
        seen.most[work.kind] = max(seen.most.get(work.kind, 0), measured_bytes)

    def overheads(self, units: Iterable[ManagedModel]) -> Overhead:
        """Return the bytes that a stage of these units is expected to take beyond their forecasts."""
        return functools.reduce(Overhead.over, (self.of(unit).overhead for unit in units), Overhead())

    def took_in_all(self, units: Iterable[ManagedModel], seen: Overhead) -> None:
        """Note the bytes that a stage of these units took beyond tensors. `took` has been called for its calls."""
        for unit in units:
            work, above = self.of(unit), self._seen.get(unit, _Seen()).above
            if work.card and work.forecast and work.kind in above and work.attempt.parts == 1:
                seen = replace(seen, workspace_bytes=above[work.kind])
                learned.keep_overhead(work.card, sizes_of(unit), work.forecast, seen)

    def computed(self, unit: ManagedModel, work: Workload, measured: Measured) -> None:
        """Note the measured seconds of a call's groups. `work` is the workload that the call belonged to.

        Measurements that differ from the loads by less than 5 % change nothing.
        """
        now = self.of(unit)
        if not work.forecast or now.forecast != work.forecast or not now.learns:
            return
        loads = self._loads(unit)
        if now.pages and is_slow(measured_loads(loads, measured).compute_seconds, loads.compute_seconds):
            pass  # paging may have taken the time, not computing
        elif differs(loads, measured):
            measured = learned.keep(work.card, sizes_of(unit), work.forecast, measured) or measured
            now = replace(now, measured=measured)
        self._now[unit] = replace(now, learns=False)

    def _loads(self, unit: ManagedModel) -> Loads:
        """Return the groups with their seconds, measured ones first."""
        work = self.of(unit)
        return measured_loads(sizes_of(unit).loads(work.forecast, work.rates), work.measured)

    def call_seconds(self, unit: ManagedModel, kind: str, weights_bytes: int) -> float:
        """Return the planned seconds of a call with `weights_bytes` of weights on the device.

        0 without a forecast, or if the rates are only assumed.
        """
        work = self.of(unit)
        known = work.forecast is not None and work.rates.source != "assumed"
        return self.demand(unit).call_seconds(kind, weights_bytes) if known else 0.0

    def demand(self, unit: ManagedModel, held_bytes: int = 0) -> Demand:
        """Return the demand of a unit for its present workload. `held_bytes` is what its stage holds beside weights."""
        work, loads = self.of(unit), self._loads(unit)
        return Demand(
            unit.name,
            sizes_of(unit),
            replace(loads, spared_bytes=int(work.attempt.share * loads.spared_bytes)),
            self.working_bytes(unit, held_bytes),
            work.attempt.share,
            work.forecast is not None,
        )
