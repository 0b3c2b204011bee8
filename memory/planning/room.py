"""The questions that a plan answers: in which room, for which run, and with which weights already in RAM."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .measured import Overhead


@dataclass(frozen=True)
class Room:
    """The memory that the plan of a unit may count on, in bytes.

    - `vram_bytes` is the most that the driver may count, of which `overhead` goes to other than tensors.
    - `ram_bytes` is the most that weights may take in RAM. Without `ram_stated` nobody stated it, so RAM refuses
      nothing, and windows take what others would have.
    - `free_ram_bytes` can be had without taking any from other units. The unit keeps no more than that.
    """

    vram_bytes: int
    ram_bytes: int
    ram_stated: bool = True
    free_ram_bytes: int = sys.maxsize
    overhead: Overhead = Overhead()


@dataclass(frozen=True)
class PlanRequest:
    """The run that is planned.

    - `by_user` tells that the user named the `strategy`. The reason then says so.
    - `steps` are the sampling steps that the calls of the forecast belong to. The calls come `times` times in the
      stage, such as 7 times for a forecast of 4 steps out of 28.
    - `idle_bytes` is what the stage holds on the device before the first call.
    """

    strategy: str = "auto"
    by_user: bool = True
    steps: int = 1
    times: float = 1.0
    idle_bytes: int = 0


@dataclass(frozen=True)
class HeldWeights:
    """The groups of a unit that are `in_ram` and need not be read, None for all. Others may be streamed `from_disk`."""

    in_ram: frozenset[int] | None = frozenset()
    from_disk: bool = False
