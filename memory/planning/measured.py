"""Measured seconds in place of forecast ones, and memory beyond the forecast. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .forecast import UnitForecast
from .solver import Loads

_OTHER = 0.1  # share by which a peak must differ for its spare bytes to replace the earlier ones
_SAME = 0.05  # share of the computing below which a measurement is no reason to plan again


@dataclass(frozen=True)
class Measured:
    """The measured seconds of each group of one call, with the packed bytes of the groups.

    `before_seconds` is the compute ahead of the first group.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    before_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain data, for a file. Seconds keep four digits."""
        seconds = [float(f"{each:.4g}") for each in (self.before_seconds, *self.seconds)]
        return {"sizes": list(self.sizes), "seconds": seconds}

    def scaled(self, times: int) -> Measured:
        """Return the measurement of one picture for `times` pictures at once."""
        return replace(
            self, seconds=tuple(times * each for each in self.seconds), before_seconds=times * self.before_seconds
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measured:
        """Return the measurement that `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        before, *seconds = map(float, data["seconds"])
        return cls(tuple(map(int, data["sizes"])), tuple(seconds), before)


def measured_loads(loads: Loads, measured: Measured | None) -> Loads:
    """Return the loads with measured seconds in place of their own.

    They are returned as they are if `measured` cannot be theirs: other group sizes, or seconds that are no finite
    numbers from 0 up.
    """
    if measured is None or not _fits(loads, measured):
        return loads
    pairs = zip(loads.groups, measured.seconds, strict=True)
    groups = tuple(
        replace(group, seconds=seconds, decode_seconds=min(seconds, group.decode_seconds)) for group, seconds in pairs
    )
    return replace(loads, groups=groups, before_seconds=measured.before_seconds)


def spread(loads: Loads, seconds: float) -> Measured | None:
    """Return the seconds of a whole call, divided among its groups in proportion to the loads.

    None if the loads have no finite seconds above 0.
    """
    if not 0 < loads.compute_seconds < math.inf:
        return None
    times = seconds / loads.compute_seconds
    each = tuple(times * group.seconds for group in loads.groups)
    return Measured(loads.sizes, each, times * loads.before_seconds)


def differs(loads: Loads, measured: Measured) -> bool:
    """Return whether a measurement differs from the loads by more than 5 % of the computing, summed over the groups.

    False for a device that computes in no time, such as a simulated card without a clock.
    """
    found = measured_loads(loads, measured)
    pairs = zip(found.groups, loads.groups, strict=True)
    change = abs(found.before_seconds - loads.before_seconds) + sum(abs(a.seconds - b.seconds) for a, b in pairs)
    return change > _SAME * loads.compute_seconds > 0


def _fits(loads: Loads, measured: Measured) -> bool:
    """Return whether a measurement can be one of these loads."""
    every = (measured.before_seconds, *measured.seconds)
    same = measured.sizes == loads.sizes and len(measured.seconds) == len(loads.groups)
    return same and all(math.isfinite(each) and each >= 0 for each in every) and sum(every) > 0


@dataclass(frozen=True)
class Overhead:
    """Bytes beyond the forecast tensors.

    - `workspace_bytes` are taken by kernels from the allocator while they run.
    - `spare_bytes` is what the allocator has from the driver beyond its tensors. It was measured at a peak of
      `at_bytes` in tensors.
    - `outside_bytes` is what the driver counts for this process beside the allocator: a context and libraries.
    """

    workspace_bytes: int = 0
    spare_bytes: int = 0
    at_bytes: int = 0
    outside_bytes: int = 0

    def driver_bytes(self, tensor_bytes: int) -> int:
        """Return the bytes that the driver counts for a peak of `tensor_bytes`, kernels' workspaces included."""
        return tensor_bytes + self._spare_at(tensor_bytes) + self.outside_bytes

    def tensors_within(self, budget_bytes: int) -> int:
        """Return the most bytes in tensors for which the driver counts at most `budget_bytes`; 0 if there are none.

        The inverse of `driver_bytes`.
        """
        room = max(0, budget_bytes - self.outside_bytes)
        if not self.spare_bytes or not self.at_bytes or room <= self.at_bytes + self.spare_bytes:
            return max(0, room - self.spare_bytes)
        return room * self.at_bytes // (self.at_bytes + self.spare_bytes)

    def _spare_at(self, tensor_bytes: int) -> int:
        """Return the spare bytes at a peak of `tensor_bytes`: in proportion above `at_bytes`, as measured below.

        At a lower peak an allocator may spare less, but not for certain.
        """
        if tensor_bytes <= self.at_bytes or not self.at_bytes:
            return self.spare_bytes
        return -(-self.spare_bytes * tensor_bytes // self.at_bytes)

    def on(self, work: UnitForecast) -> UnitForecast:
        """Return the forecast with the workspaces of kernels added."""
        more = self.workspace_bytes
        return replace(work, working_bytes=work.working_bytes + more, first_bytes=work.first_bytes + more)

    def scaled(self, pictures: int) -> Overhead:
        """Return the overhead of one picture for `pictures` at once. Only the workspaces grow."""
        return replace(self, workspace_bytes=self.workspace_bytes * pictures)

    def outside(self, outside_bytes: int) -> Overhead:
        """Return the same overhead with at least `outside_bytes` outside the allocator."""
        return replace(self, outside_bytes=max(self.outside_bytes, outside_bytes))

    def over(self, other: Overhead) -> Overhead:
        """Return the larger of each figure, for units that take turns."""
        spare = max(self, other, key=lambda each: each.spare_bytes)
        return Overhead(
            max(self.workspace_bytes, other.workspace_bytes),
            spare.spare_bytes,
            spare.at_bytes,
            max(self.outside_bytes, other.outside_bytes),
        )

    def seen_again(self, newer: Overhead) -> Overhead:
        """Return the overhead to expect after one more run.

        It is the larger of both, except for spare bytes that were measured at a clearly different peak: then the newer
        ones count.
        """
        found = self.over(newer)
        if abs(newer.at_bytes - self.at_bytes) > _OTHER * self.at_bytes:
            return replace(found, spare_bytes=newer.spare_bytes, at_bytes=newer.at_bytes)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the overhead as plain data, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Overhead:
        """Return the overhead that `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        numbers = {name: data[name] for name in cls.__dataclass_fields__}
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers.values()):
            raise ValueError("an overhead has bytes that are not numbers from 0 up")
        return cls(**numbers)
