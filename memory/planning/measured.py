"""What the pieces of a call were measured to compute, in place of what was forecast. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .solver import Loads

_SAME = 0.05  # of the computing: less is no reason to plan again


@dataclass(frozen=True)
class Measured:
    """The seconds that each piece of one call computed, with its bytes, and those ahead of the first piece."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    before_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        seconds = [float(f"{each:.4g}") for each in (self.before_seconds, *self.seconds)]
        return {"sizes": list(self.sizes), "seconds": seconds}

    def scaled(self, times: int) -> Measured:
        """For so many pictures at once."""
        return replace(
            self, seconds=tuple(times * each for each in self.seconds), before_seconds=times * self.before_seconds
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measured:
        """What `to_dict` gave, to four digits. Raises KeyError, TypeError or ValueError for anything else."""
        before, *seconds = map(float, data["seconds"])
        return cls(tuple(map(int, data["sizes"])), tuple(seconds), before)


def measured_loads(loads: Loads, measured: Measured | None) -> Loads:
    """The loads with seconds that were measured in place of their own; as they are, if those cannot be theirs."""
    if measured is None or not _fits(loads, measured):
        return loads
    pairs = zip(loads.pieces, measured.seconds, strict=True)
    pieces = tuple(
        replace(piece, seconds=seconds, decode_seconds=min(seconds, piece.decode_seconds)) for piece, seconds in pairs
    )
    return replace(loads, pieces=pieces, before_seconds=measured.before_seconds)


def spread(loads: Loads, seconds: float) -> Measured | None:
    """The seconds of a whole call, over its pieces as the loads have them; None where these tell of none."""
    if not 0 < loads.compute_seconds < math.inf:
        return None
    times = seconds / loads.compute_seconds
    each = tuple(times * piece.seconds for piece in loads.pieces)
    return Measured(loads.sizes, each, times * loads.before_seconds)


def differs(loads: Loads, measured: Measured) -> bool:
    """Whether what was measured says something else than the loads: by 5 % of the computing, pieces taken apart.

    Of a device that computes in no time, as a simulated one does without a clock, there is nothing to learn.
    """
    found = measured_loads(loads, measured)
    pairs = zip(found.pieces, loads.pieces, strict=True)
    change = abs(found.before_seconds - loads.before_seconds) + sum(abs(a.seconds - b.seconds) for a, b in pairs)
    return change > _SAME * loads.compute_seconds > 0


def _fits(loads: Loads, measured: Measured) -> bool:
    every = (measured.before_seconds, *measured.seconds)
    same = measured.sizes == loads.sizes and len(measured.seconds) == len(loads.pieces)
    return same and all(math.isfinite(each) and each >= 0 for each in every) and sum(every) > 0
