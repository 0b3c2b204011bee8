"""Plan a sampling stage in two parts: modules that see no latents once for all steps, and the loop without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...memory.once.choice import Once, Schedule, called_paths, choose_once, first_part, other_part
from ...memory.planning.fit import sizes_of
from ...memory.planning.forecast import Forecast, UnitForecast
from ...memory.planning.runplan import StagePlan
from ...memory.weights.unit import ManagedModel

PRECOMPUTE = "precompute"  # the name of the first part's stage
_GAIN = 0.98  # of the seconds of the whole stage: two parts that save less are not worth it

Place = Callable[[str, Forecast, Sequence[ManagedModel], int], StagePlan]


def first_strategy(strategy: str) -> str:
    """Return the strategy of the first part: weights that the loop alone needs do not come."""
    return strategy if strategy == "leafwise" else "streamed"


@dataclass(frozen=True)
class Split:
    """A sampling stage in two parts: the modules `once` of each unit by its name, and the forecasts of both parts."""

    once: Mapping[str, Once]
    first: Forecast
    other: Forecast

    def units(self, units: Sequence[ManagedModel]) -> list[ManagedModel]:
        """Return those of the units that have modules to compute once."""
        return [unit for unit in units if unit.name in self.once]

    @contextmanager
    def calling(self, units: Sequence[ManagedModel], computes_once: bool) -> Iterator[None]:
        """Let the units call only their modules of `once`, or all but these, until the block ends."""
        before = {unit: unit.calls for unit in self.units(units)}
        for unit, calls in before.items():
            unit.calls = replace(calls, once=self.once[unit.name].paths, computes_once=computes_once)
        try:
            yield
        finally:
            for unit, calls in before.items():
                unit.calls = calls


def split(forecast: Forecast, units: Sequence[ManagedModel], steps: int) -> Split | None:
    """Return the two parts of a sampling stage of `steps`; None if no module is worth computing once."""
    schedule, once = Schedule.of(forecast, steps), dict[str, Once]()
    first: dict[str, UnitForecast] = {}
    for unit in units:
        work = forecast.units.get(unit.name)
        if work is None or not work.once:
            continue
        unit.learn(work.call_order)
        found = choose_once(work, called_paths([group.paths for group in sizes_of(unit).groups]), schedule)
        if found.paths:
            once[unit.name] = found
            first[unit.name] = first_part(work, found, schedule, forecast.steps)
    if not once:
        return None
    tables = sum(each.held_bytes for each in once.values())
    other = {}
    for name, work in forecast.units.items():
        held = replace(work, live_bytes=work.live_bytes + tables)
        other[name] = other_part(work, once[name], tables) if name in once else held
    whole = replace(forecast, idle_bytes=forecast.idle_bytes + tables, units=other)
    return Split(once, Forecast(sum(each.argument_bytes for each in once.values()), first), whole)


def best_of(
    forecast: Forecast, units: Sequence[ManagedModel], steps: int, place: Place
) -> tuple[Split | None, list[StagePlan]]:
    """Return the faster of two ways to run a sampling stage, with the plans of its stages.

    `place(name, forecast, units, steps)` plans a stage. The two parts are taken only if both fit, and take less time,
    that of the host included.
    """
    whole = place("sample", forecast, units, steps)
    if (found := split(forecast, units, steps)) is None:
        return None, [whole]
    with found.calling(units, computes_once=True):
        first = place(PRECOMPUTE, found.first, found.units(units), 1)
    with found.calling(units, computes_once=False):
        other = place("sample", found.other, units, steps)
    fit = all(plan.fits for stage in (first, other) for plan in stage.units)
    host_seconds = sum(each.host_seconds for each in found.once.values())
    if not fit or first.seconds + other.seconds + host_seconds >= _GAIN * whole.seconds:
        return None, [whole]
    said = {unit.name: f" {found.once[unit.name].reason(unit.size_bytes)}" for unit in found.units(units)}
    plans = tuple(replace(plan, reason=plan.reason + said.get(plan.unit, "")) for plan in other.units)
    return found, [first, replace(other, units=plans)]
