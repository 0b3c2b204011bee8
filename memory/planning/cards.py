"""The share of each of several cards that draw one picture: of the computing, and of their machine's RAM."""

from __future__ import annotations

from dataclasses import replace

from .forecast import Forecast


def divided(forecast: Forecast, cards: int) -> Forecast:
    """Return the forecast of a stage for each of so many cards that share its work.

    Of the operations, and at most its bytes.
    Each of them is brought all weights.
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
    """Bytes of RAM for the own copies of each of so many processes of a machine, which all stream the same weights.

    What a process does not hold it reads in every step, from the page cache, which has it once for all of them. So
    where the budget has no room for a copy each, but for one and more, own copies take what that one leaves. Where it
    has not even room for one, own copies save more reading than the cache could. `least_bytes` a process needs to read
    weights through; it never has more than an even share.
    """
    even = budget_bytes // processes
    if processes == 1 or budget_bytes < weights_bytes:
        return even
    return min(even, max(least_bytes, (budget_bytes - weights_bytes) // (processes - 1)))
