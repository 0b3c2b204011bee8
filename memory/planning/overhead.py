"""What a run takes on a device beyond what its dry run tells. Pure functions and plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .forecast import UnitForecast

_OTHER = 0.1  # of a peak: so far from it what an allocator spared is another figure, and the newer one counts


@dataclass(frozen=True)
class Overhead:
    """Bytes beyond the forecast tensors.

    `workspace_bytes` kernels take of the allocator while they run. The allocator has `spare_bytes` more of the driver
    than its tensors, of which there were `at_bytes` then. The driver counts `outside_bytes` besides, for a context and
    libraries.
    """

    workspace_bytes: int = 0
    spare_bytes: int = 0
    at_bytes: int = 0
    outside_bytes: int = 0

    def driver_bytes(self, tensor_bytes: int) -> int:
        """What the driver counts where at most so many bytes are in tensors, workspaces included."""
        return tensor_bytes + self._spare_at(tensor_bytes) + self.outside_bytes

    def tensors_within(self, budget_bytes: int) -> int:
        """The most in tensors for which the driver counts no more than so many bytes; 0 if there is none."""
        room = max(0, budget_bytes - self.outside_bytes)
        if not self.spare_bytes or room <= self.at_bytes + self.spare_bytes:
            return max(0, room - self.spare_bytes)
        return room * self.at_bytes // (self.at_bytes + self.spare_bytes)

    def _spare_at(self, tensor_bytes: int) -> int:
        """Less is spared of less, but not for certain; of more, more."""
        if tensor_bytes <= self.at_bytes or not self.at_bytes:
            return self.spare_bytes
        return -(-self.spare_bytes * tensor_bytes // self.at_bytes)

    def on(self, work: UnitForecast) -> UnitForecast:
        """The forecast with the workspaces of its kernels."""
        more = self.workspace_bytes
        return replace(work, working_bytes=work.working_bytes + more, first_bytes=work.first_bytes + more)

    def scaled(self, pictures: int) -> Overhead:
        """For so many pictures at once."""
        return replace(self, workspace_bytes=self.workspace_bytes * pictures)

    def outside(self, outside_bytes: int) -> Overhead:
        """The same where the driver counts at least so much besides."""
        return replace(self, outside_bytes=max(self.outside_bytes, outside_bytes))

    def over(self, other: Overhead) -> Overhead:
        """The more of both, for units that take turns."""
        spare = max(self, other, key=lambda each: each.spare_bytes)
        return Overhead(
            max(self.workspace_bytes, other.workspace_bytes),
            spare.spare_bytes,
            spare.at_bytes,
            max(self.outside_bytes, other.outside_bytes),
        )

    def seen_again(self, newer: Overhead) -> Overhead:
        """What to expect after one run more."""
        found = self.over(newer)
        if abs(newer.at_bytes - self.at_bytes) > _OTHER * self.at_bytes:
            return replace(found, spare_bytes=newer.spare_bytes, at_bytes=newer.at_bytes)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Overhead:
        """What `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        numbers = {name: data[name] for name in cls.__dataclass_fields__}
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers.values()):
            raise ValueError("an overhead has bytes that are not numbers from 0 up")
        return cls(**numbers)
