"""Find the best batch for a budget: pictures sampled at once share the copies of weights, and take room from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from .forecast import Forecast, UnitForecast
from .runplan import BestBatch, StagePlan

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # batches to try, in pictures
_GAIN = 1.05  # a batch that takes up to 1.05 times the least seconds is as good: a smaller one is finished sooner


def best_batch(stage_of: Callable[[int], StagePlan]) -> BestBatch | None:
    """Return the smallest batch whose seconds for each picture are within 5 % of the least; None if no batch fits.

    `stage_of` takes a number of pictures and returns the plan of sampling them at once, which takes the solver a while.
    Larger batches than the first that does not fit are not tried. Nor are those that cannot change the result: no batch
    takes less time for a picture than one picture alone computes.
    """
    each: dict[int, float] = {}
    least = math.inf
    for pictures in _SIZES:
        stage = stage_of(pictures)
        if not all(plan.fits for plan in stage.units):
            break
        each[pictures] = stage.seconds / pictures
        least = min(least, stage.computing_seconds / pictures)
        if _smallest(each, min(each.values())) == _smallest(each, least):
            break
    if not each:
        return None
    found = _smallest(each, min(each.values()))
    assert found is not None
    return BestBatch(found, each[found])


def _smallest(each: Mapping[int, float], least: float) -> int | None:
    """Return the first batch of `each` that takes hardly longer than `least` seconds a picture; None if none does."""
    return next((pictures for pictures, seconds in each.items() if seconds <= _GAIN * least), None)


def scaled(forecast: Forecast, pictures: int) -> Forecast:
    """Return the forecast of `pictures` at once, from that of one.

    Operations grow in proportion. Bytes grow at most so: the result is an upper bound.
    """
    units = {name: _work(work, pictures) for name, work in forecast.units.items()}
    idle_bytes, kept_in_ram = forecast.idle_bytes * pictures, forecast.kept_in_ram * pictures
    return replace(forecast, idle_bytes=idle_bytes, units=units, kept_in_ram=kept_in_ram)


@functools.lru_cache(maxsize=64)  # plans of several budgets ask for the same forecasts
def _work(work: UnitForecast, pictures: int) -> UnitForecast:
    """Return the forecast of one unit for `pictures` at once."""
    return replace(
        work,
        live_bytes=work.live_bytes * pictures,
        working_bytes=work.working_bytes * pictures,
        first_bytes=work.first_bytes * pictures,
        operations=work.operations * pictures,
        modules=tuple((path, done * pictures) for path, done in work.modules),
        held=tuple((path, nbytes * pictures) for path, nbytes in work.held),
        step_bytes=work.step_bytes * pictures,
        argument_bytes=work.argument_bytes * pictures,
        side_bytes=work.side_bytes * pictures,
        once=tuple(replace(module, row_bytes=module.row_bytes * pictures) for module in work.once),
    )
