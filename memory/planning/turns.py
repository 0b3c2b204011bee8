"""Units that take turns within each step: decide whether they stay on the device beside each other. Pure functions.

A unit that is evicted for another is copied whole at its next turn. If all units fit beside each other, none is
evicted. If they do not, the largest ones stream in the room that the others leave, if that copies fewer bytes than
taking turns.
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

    `least` maps each placement to the least bytes of weights on the device. `room_bytes` is what the budget leaves for
    the weights of all units while this one runs. The unit is called `calls` times in `turns` turns.
    """

    least: Mapping[str, int]
    room_bytes: int
    calls: int
    turns: int

    def bytes_in(self, weights_bytes: int) -> float:
        """Return the bytes copied in all turns if the unit has `weights_bytes` on the device and is evicted after each.

        The result is infinite if that is less than the least.
        """
        if min(self.least.values()) > weights_bytes:
            return math.inf
        if "resident" in self.least and self.least["resident"] <= weights_bytes:
            return self.least["resident"] * self.turns
        return self.bytes_beside(weights_bytes) + weights_bytes * self.turns

    def bytes_beside(self, weights_bytes: int) -> float:
        """Return the bytes copied in all calls if `weights_bytes` of weights stay between them."""
        return max(0, max(self.least.values()) - weights_bytes) * self.calls


def beside_each_other(units: Mapping[Key, Turns]) -> dict[Key, int]:
    """Return the least bytes of weights that each unit holds while others of these run.

    Empty if taking turns copies fewer bytes, if they do not fit, or if there is only one unit.
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
