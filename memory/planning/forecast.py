"""What a stage will take beside its weights: bytes and operations, as plain data. `dry_run` finds them out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class UnitForecast:
    """One unit in a stage. Bytes are those on the device beside the unit's weights.

    `live_bytes` are held when it is first called: what the loop around it keeps there, its arguments included. The
    others come on top of these, from its first call until another unit's or the end: `working_bytes` at most,
    `first_bytes` in the first call alone, `leafwise_bytes` at most with each module's own weights brought for the time
    of its call.
    """

    live_bytes: int
    working_bytes: int
    first_bytes: int
    leafwise_bytes: int
    calls: int
    operations: float  # of all calls, in large products
    block_operations: tuple[float, ...] = ()  # of all calls, by block of the streaming engine

    @property
    def peak_bytes(self) -> int:
        """The most on the device beside the weights."""
        return self.live_bytes + self.working_bytes


@dataclass(frozen=True)
class Forecast:
    """One stage: its units by name, the most that it holds before any of them is called, and its sampling steps.

    `result` is the shape of what it makes, where another stage depends on that.
    """

    idle_bytes: int
    units: Mapping[str, UnitForecast] = field(default_factory=dict)
    steps: int = 1
    result: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Forecast:
        """What `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        units = {}
        for name, facts in data["units"].items():
            numbers = {key: value for key, value in facts.items() if key != "block_operations"}
            blocks = facts["block_operations"]
            if not all(type(n) in (int, float) and 0 <= n < math.inf for n in (*numbers.values(), *blocks)):
                raise ValueError(f"{name} has facts that are not numbers from 0 up")
            units[name] = UnitForecast(**numbers, block_operations=tuple(map(float, blocks)))
        return cls(int(data["idle_bytes"]), units, max(1, int(data["steps"])), tuple(map(int, data["result"])))
