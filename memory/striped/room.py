"""Where feature maps lie: on the device while they fit in the budget, else in RAM; and what is moved between these."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from ..errors import release_frames
from ..simulated import card as state
from ..sizes import format_bytes

log = logging.getLogger("ballast")

_SHAPES = torch.empty(0, device="meta")  # what shapes are worked out with; made outside of any dry run
_SPARE = 16  # one part in so many stays unspoken for: allocators round up, and small tensors are not counted


class OutOfRamError(RuntimeError):
    """Feature maps do not fit in the RAM that there is for them."""


class Room:
    """The bytes of one run: a budget on the device for maps and stripes, and RAM for what exceeds it.

    `host_peak_bytes` is the most RAM that maps took, `h2d_bytes` and `d2h_bytes` what crossed. In a dry run the
    device is `meta` (see `simulated.dry`), and maps in RAM are shapes that take none.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        settle: Callable[[Any], None],
        ram_bytes: int | None = None,
        on_stripe: Callable[[], None] | None = None,
    ) -> None:
        self.device = device
        self.settle = settle  # see `keeping`: called with a map once several others follow from it
        self._ram_bytes = ram_bytes
        self._on_stripe = on_stripe
        self.budget_bytes = budget_bytes - budget_bytes // _SPARE
        self.device_bytes = self.host_bytes = self.host_peak_bytes = 0
        self.h2d_bytes = self.d2h_bytes = 0
        self._repeated_operations = 0.0
        self._dry = device.type == "meta"
        self._was_short = False

    @property
    def free_bytes(self) -> int:
        """What the budget leaves beside the maps that lie on the device."""
        return max(0, self.budget_bytes - self.device_bytes)

    def ran_out(self, error: BaseException) -> None:
        """Take less from now on, since the device has run out of memory. What the error's frames hold is let go."""
        release_frames(error)
        self.budget_bytes -= -(-self.free_bytes // 4)
        if not self._was_short:
            log.warning("Ballast: memory ran out in a stripe; going on in smaller ones")
        self._was_short = True

    def steps(
        self, spans: Sequence[tuple[int, int]], kind: Callable[[int, int], Hashable]
    ) -> Iterator[tuple[int, int]]:
        """The stripes of a pass, or the blocks of one. A dry run does the first, one of each `kind`, and counts all."""
        kinds = [(index == 0, kind(*span)) for index, span in enumerate(spans)] if self._dry else []
        times = Counter(kinds)
        for index, span in enumerate(spans):
            if self._on_stripe:
                self._on_stripe()
            if not self._dry:
                yield span
            elif more := times.pop(kinds[index], 0):
                before = self.h2d_bytes, self.d2h_bytes, self.operations()
                yield span
                self.h2d_bytes += (more - 1) * (self.h2d_bytes - before[0])
                self.d2h_bytes += (more - 1) * (self.d2h_bytes - before[1])
                self._repeated_operations += (more - 1) * (self.operations() - before[2])

    def operations(self) -> float:
        """Of a dry run, so far: its card does one a second."""
        return state.card.stats().compute_seconds + self._repeated_operations

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, axis: int, on_device: bool) -> Buffer:
        """Memory for a map that is written stripe by stripe along `axis`."""
        if on_device:
            return Buffer(self, torch.empty(shape, dtype=dtype, device=self.device), True)
        wanted = self.host_bytes + nbytes_of(shape, dtype)
        if self._ram_bytes is not None and wanted > self._ram_bytes:
            spare = format_bytes(self._ram_bytes)
            raise OutOfRamError(f"feature maps take {format_bytes(wanted)} of RAM or more, and {spare} are spare")
        order = [shape[axis], *shape[:axis], *shape[axis + 1 :]]  # a stripe is one piece of memory, for one copy
        rows = _SHAPES.new_empty(order, dtype=dtype) if self._dry else torch.empty(order, dtype=dtype)
        return Buffer(self, rows.movedim(0, axis), False)

    def fetch(self, piece: torch.Tensor, axis: int) -> torch.Tensor:
        """A stripe of a map in RAM, on the device."""
        self.h2d_bytes += piece.nbytes
        rows = piece.movedim(axis, 0)
        moved = torch.empty(rows.shape, dtype=rows.dtype, device=self.device) if self._dry else rows.to(self.device)
        return moved.movedim(0, axis).contiguous()

    def store(self, target: torch.Tensor, stripe: torch.Tensor, axis: int) -> None:
        """Write a stripe to its place in a map, which may be in RAM."""
        if target.device == stripe.device and not self._is_shape(target):
            target.copy_(stripe)
            return
        self.d2h_bytes += stripe.nbytes
        rows = stripe.movedim(axis, 0).contiguous()
        if not self._is_shape(target):
            target.movedim(axis, 0).copy_(rows)

    def _is_shape(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor and tensor.is_meta


class Buffer:
    """The memory of one map, counted for as long as this object lives. `tensor` has the map's own shape."""

    def __init__(self, room: Room, tensor: torch.Tensor, on_device: bool) -> None:
        self.room, self.tensor, self.on_device = room, tensor, on_device
        self.nbytes = nbytes_of(tensor.shape, tensor.dtype)
        if on_device:
            room.device_bytes += self.nbytes
        else:
            room.host_bytes += self.nbytes
            room.host_peak_bytes = max(room.host_peak_bytes, room.host_bytes)

    def __del__(self) -> None:
        if not hasattr(self, "nbytes"):
            return
        if self.on_device:
            self.room.device_bytes -= self.nbytes
        else:
            self.room.host_bytes -= self.nbytes


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that has a shape and nothing else, in a dry run too."""
    return _SHAPES.new_empty(tuple(shape), dtype=dtype)
