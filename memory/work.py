"""What units do in the stages of a graph, and what that was seen to take of the device beside their weights."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from .planning.fit import Demand, sizes_of
from .planning.forecast import UnitForecast
from .planning.ladder import Attempt
from .rates import ASSUMED, Rates
from .units.unit import ManagedModel


@dataclass(frozen=True)
class Work:
    """What a unit does in one stage.

    `kind` tells sizes of work apart, which differ in their working memory; `forecast` is what the stage was found to
    take beforehand, None where that is not known, at these `rates`; `attempt` how its calls are tried now.
    When it was last placed the stage held `live_bytes`, which may be more than before its first call.
    """

    kind: Hashable = None
    forecast: UnitForecast | None = None
    attempt: Attempt = field(default_factory=Attempt)
    rates: Rates = ASSUMED
    live_bytes: int = 0


@dataclass
class _Seen:
    """What calls of one unit took, in bytes, by kind of work."""

    most: dict[Hashable, int] = field(default_factory=dict)
    above: dict[Hashable, int] = field(default_factory=dict)  # how far the first call was above its forecast


class WorkBook:
    """The present work of each unit, or the last that it did, and what calls were seen to take."""

    def __init__(self) -> None:
        self._now: weakref.WeakKeyDictionary[ManagedModel, Work] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[ManagedModel, _Seen] = weakref.WeakKeyDictionary()

    def of(self, unit: ManagedModel) -> Work:
        """What a unit does."""
        return self._now.get(unit, Work())

    def begin(self, unit: ManagedModel, work: Work) -> None:
        """Note what a unit is going to do."""
        self._now[unit] = work

    def retry(self, unit: ManagedModel, attempt: Attempt) -> None:
        """Try the calls of a unit in another way from now on."""
        self._now[unit] = replace(self.of(unit), attempt=attempt)

    def placed(self, unit: ManagedModel, live_bytes: int) -> None:
        """Note that a unit is placed while its stage holds so many bytes beside weights."""
        self._now[unit] = replace(self.of(unit), live_bytes=live_bytes)

    def working_bytes(self, unit: ManagedModel) -> int:
        """Working memory that a unit's present work takes beside its weights; 0 if it is not known."""
        work, seen = self.of(unit), self._seen.get(unit, _Seen())
        if work.forecast is None:
            return seen.most.get(work.kind, 0)
        more_bytes = max(0, work.live_bytes - work.forecast.live_bytes)
        return max(0, work.forecast.working_bytes + seen.above.get(work.kind, 0) - more_bytes)

    def took(self, unit: ManagedModel, measured_bytes: int) -> None:
        """Note what one call took beside the weights. A call that was run in parts would have taken that many times."""
        work, seen = self.of(unit), self._seen.setdefault(unit, _Seen())
        measured_bytes *= work.attempt.parts
        if work.forecast and work.kind not in seen.most:
            # Less is no reason to take more than was planned: some forecasts are upper bounds, for any routing.
            seen.above[work.kind] = max(0, measured_bytes - work.forecast.first_bytes)
        seen.most[work.kind] = max(seen.most.get(work.kind, 0), measured_bytes)

    def demand(self, unit: ManagedModel) -> Demand:
        """What a unit wants of the device for its present work."""
        work, sizes = self.of(unit), sizes_of(unit)
        return Demand(
            unit.name,
            sizes,
            sizes.loads(work.forecast, work.rates),
            self.working_bytes(unit),
            work.attempt.share,
            work.forecast is not None,
        )
