"""The share of each of several cards that sample one picture together: its computing, and its part of the RAM."""

from __future__ import annotations

from dataclasses import replace

from .planning.forecast import Forecast


def divided(forecast: Forecast, cards: int) -> Forecast:
    """Return the forecast of a stage for each of `cards` cards that share its work.

    Operations are divided by `cards`. Bytes are not, so they are an upper bound. Each card is brought all weights.
    """
    units = {
        name: replace(
            work,
            operations=work.operations * (1 / cards),
            modules=tuple((path, done * (1 / cards)) for path, done in work.modules),
        )
        for name, work in forecast.units.items()
    }
    return replace(forecast, units=units)


def ram_share(budget_bytes: int, weights_bytes: int, least_bytes: int, processes: int) -> int:
    """Return the bytes of RAM for the own copies of each of `processes` that stream the same weights on one machine.

    Weights that a process does not hold it reads in every step, from the page cache, which holds them once for all
    processes.

    - If `budget_bytes` is less than `weights_bytes`, each gets an even share: own copies save more reading than the
      cache could.
    - Otherwise the cache gets `weights_bytes`, and the rest is divided among all processes but one.

    A process gets at least `least_bytes`, which it reads weights through, and never more than an even share.
    """
    even = budget_bytes // processes
    if processes == 1 or budget_bytes < weights_bytes:
        return even
    return min(even, max(least_bytes, (budget_bytes - weights_bytes) // (processes - 1)))
