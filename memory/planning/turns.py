"""Units that take turns within each step, and whether they stay on the device beside each other. Pure functions.

A unit that leaves for another comes back whole at its next turn. Where all of them fit beside each other none leaves;
where they do not, the largest stream in what the others leave, if that brings fewer bytes than taking turns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Turns:
    """One unit that takes turns with others.

    `least` are the least weights on the device by placement, `room_bytes` what the budget leaves for the weights of
    all while this one runs. It is called `calls` times in so many `turns`.
    """

    least: Mapping[str, int]
    room_bytes: int
    calls: int
    turns: int

    def bytes_in(self, weights_bytes: int) -> float:
        """Bytes that come in all turns where it leaves after each, with so many bytes of weights meanwhile."""
        if min(self.least.values()) > weights_bytes:
            return math.inf
        if "resident" in self.least and self.least["resident"] <= weights_bytes:
            return self.least["resident"] * self.turns
        return self.bytes_beside(weights_bytes) + weights_bytes * self.turns

    def bytes_beside(self, weights_bytes: int) -> float:
        """Bytes that come in all calls where so many bytes of weights stay between them."""
        return max(0, max(self.least.values()) - weights_bytes) * self.calls


def beside_each_other(units: Mapping[Key, Turns]) -> dict[Key, int]:
    """Return the weights that each unit holds at least while others of these run.

    Empty where they had better take turns.
    """
    if len(units) < 2:
        return {}
    room = min(unit.room_bytes for unit in units.values())
    held = {key: unit.least.get("resident", max(unit.least.values())) for key, unit in units.items()}
    for key in sorted(units, key=lambda key: held[key], reverse=True):
        if sum(held.values()) <= room:
            break
        held[key] = min(units[key].least.values())
    spare = room - sum(held.values())
    if spare < 0:
        return {}
    beside = 0.0
    for key, unit in units.items():
        more = min(spare, max(unit.least.values()) - held[key])
        spare -= more
        beside += unit.bytes_beside(held[key] + more)
    return held if beside <= sum(unit.bytes_in(unit.room_bytes) for unit in units.values()) else {}
