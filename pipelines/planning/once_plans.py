"""Plan a sampling stage in two parts: modules that see no latents once for all steps, and the loop without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...memory.lockstep.shared_work import in_lockstep
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
    """A way to run a sampling stage. With modules `once`, by the name of their unit, it has two parts.

    `first` and `other` are the forecasts of the parts. In the latter `passes` share each copy of weights.
    """

    once: Mapping[str, Once]
    first: Forecast
    other: Forecast
    passes: int = 1

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

    def in_lockstep(self, passes: int, thread_bytes: int) -> Split:
        """Return the same way with passes that share each copy."""
        units = {name: in_lockstep(work, passes, thread_bytes) for name, work in self.other.units.items()}
        return replace(self, other=replace(self.other, units=units), passes=passes)


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


def _knowing_calls(forecast: Forecast, steps: int) -> Split:
    """Return the plain way, with the arguments of all calls on the device."""
    schedule = Schedule.of(forecast, steps)
    known = sum(schedule.argument_bytes(work) for work in forecast.units.values())
    units = {name: replace(work, live_bytes=work.live_bytes + known) for name, work in forecast.units.items()}
    return Split({}, Forecast(0), replace(forecast, idle_bytes=forecast.idle_bytes + known, units=units))


def passes_in(forecast: Forecast) -> int:
    """Return how many calls each step makes of each unit, if that is the same number for all; else 1."""
    found = {divmod(work.calls, max(1, forecast.steps)) for work in forecast.units.values()}
    passes, rest = found.pop() if len(found) == 1 else (1, 0)
    return passes if not rest else 1


def best_of(
    forecast: Forecast,
    units: Sequence[ManagedModel],
    steps: int,
    place: Place,
    *,
    once: bool = True,
    lockstep: bool = False,
    thread_bytes: int = 0,
) -> tuple[Split | None, list[StagePlan]]:
    """Return the fastest way to run a sampling stage, with the plans of its stages; None for the plain one.

    `place(name, forecast, units, steps)` plans a stage. Modules may be computed `once`, passes run in `lockstep`, where
    libraries take `thread_bytes` of the device for each further thread.
    Another way than the plain one is taken only if it fits, and takes less time, that of the host included.
    """
    whole, ways = place("sample", forecast, units, steps), list[Split]()
    if once and (found := split(forecast, units, steps)):
        ways.append(found)
    if lockstep and (passes := passes_in(forecast)) > 1:
        ways += [way.in_lockstep(passes, thread_bytes) for way in (*ways, _knowing_calls(forecast, steps))]
    best, plans, least = None, [whole], _GAIN * whole.seconds
    for way in ways:
        with way.calling(units, computes_once=True):
            stages = [place(PRECOMPUTE, way.first, way.units(units), 1)] if way.once else []
        with way.calling(units, computes_once=False):
            stages.append(place("sample", way.other, units, steps))
        seconds = sum(stage.seconds for stage in stages) + sum(each.host_seconds for each in way.once.values())
        if all(plan.fits for stage in stages for plan in stage.units) and seconds < least:
            best, plans, least = way, stages, seconds
    if best is None:
        return None, [whole]
    return best, [*plans[:-1], _with_reasons(plans[-1], best, units)]


def _with_reasons(stage: StagePlan, way: Split, units: Sequence[ManagedModel]) -> StagePlan:
    """Say in the plan of the loop what it does otherwise."""
    said = {unit.name: f" {way.once[unit.name].reason(unit.size_bytes)}" for unit in way.units(units)}
    share = f" {way.passes} passes share each copy." if way.passes > 1 else ""
    plans = tuple(replace(plan, reason=plan.reason + said.get(plan.unit, "") + share) for plan in stage.units)
    return replace(stage, units=plans)
