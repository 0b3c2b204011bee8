"""Where feature maps lie: on the device while they fit in the budget, else in RAM; and what is moved between these."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import release_frames
from ..planning.stripes import Pass
from ..rates import ASSUMED
from ..simulated import card as state
from ..simulated.attention import Fuses
from ..sizes import format_bytes
from .copy_streams import Lanes, Pool, view

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
        operations_per_byte: float = ASSUMED.operations_per_byte,
        every: bool = False,
        fuses: Fuses | None = None,
    ) -> None:
        self.device = device
        self.fuses = fuses  # which attention is one kernel there; None for all
        self.settle = settle  # see `keeping`: called with a map once several others follow from it
        self._ram_bytes = ram_bytes
        self._on_stripe = on_stripe
        self.operations_per_byte = operations_per_byte
        self.budget_bytes = budget_bytes - budget_bytes // _SPARE
        self.device_bytes = self.host_bytes = self.host_peak_bytes = 0
        self.h2d_bytes = self.d2h_bytes = 0
        self.passes: list[Pass] = []
        self._repeated_operations = 0.0
        self._dry = device.type == "meta"
        self.skips = self._dry and not every
        self._was_short = False
        self.lanes = Lanes(device, self._dry)
        self._pool = Pool(device, self.lanes.behind_reads, self.lanes.finish)

    @property
    def free_bytes(self) -> int:
        """Bytes that the budget leaves beside the maps on the device."""
        return max(0, self.budget_bytes - self.device_bytes)

    def ran_out(self, error: BaseException) -> None:
        """Take less from now on, since the device has run out of memory. What the error's frames hold is let go."""
        release_frames(error)
        self.lanes.land()  # rows under way, whose memory may be given to what is made next
        self.lanes.settle()
        self.budget_bytes -= -(-self.free_bytes // 4)
        if not self._was_short:
            log.warning("Ballast: memory ran out in a stripe; going on in smaller ones")
        self._was_short = True

    def finish(self) -> None:
        """Wait for copies under way, and let spare RAM go."""
        self.lanes.finish()
        self._pool.clear()

    def begin_stripe(self) -> None:
        """Call who wants to know of each stripe; what is raised then ends the run."""
        if self._on_stripe:
            self._on_stripe()

    def steps(self, count: int, kind: Callable[[int], Hashable]) -> Iterator[int]:
        """Yield the blocks of a stripe, by number. A dry run does the first, one of each `kind`, and counts all."""
        kinds = [(index == 0, kind(index)) for index in range(count)] if self.skips else []
        times = Counter(kinds)
        for index in range(count):
            self.begin_stripe()
            if not self.skips:
                yield index
            elif more := times.pop(kinds[index], 0):
                before = self.counted()
                yield index
                now = self.counted()
                self._repeated_operations += (more - 1) * (now[0] - before[0])
                self.h2d_bytes += (more - 1) * (now[1] - before[1])
                self.d2h_bytes += (more - 1) * (now[2] - before[2])

    def begin_noting(self) -> tuple[float, int]:
        """Return the counters of a dry run for `noted`."""
        if not self.skips:
            return 0.0, 0
        state.card.take_interval_peak()
        return self.operations(), state.card.allocated_bytes()

    def noted(self, operations: float, held_bytes: int) -> tuple[float, int]:
        """Operations since then, and the most bytes that these took on the device."""
        return self.operations() - operations, state.card.take_interval_peak() - held_bytes

    def note(self, operations: float, peak_bytes: int) -> None:
        """Count what was noted once more."""
        self._repeated_operations += operations
        state.card.allocate(peak_bytes)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Overlap operations and copies each way until the block ends.

        Passes within one are part of it.
        """
        outer, self._in_pass = self._in_pass, True
        before = self.counted()
        if not outer:
            self.exposed_bytes = 0
        try:
            yield
        finally:
            self._in_pass = outer
            if not outer:
                operations, come, gone = (now - then for now, then in zip(self.counted(), before, strict=True))
                self.passes.append(Pass(operations, come, gone, self.exposed_bytes))

    _in_pass = False
    exposed_bytes = 0  # of the pass at hand

    def counted(self) -> tuple[float, int, int]:
        """Operations, bytes to the device and bytes from it, so far."""
        return self.operations(), self.h2d_bytes, self.d2h_bytes

    def operations(self) -> float:
        """Return the operations of a dry run so far."""
        card = state.card
        return card.stats().compute_seconds * (card.flops or 0.0) + self._repeated_operations if self._dry else 0.0

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, axis: int, on_device: bool) -> Buffer:
        """Memory for a map, or for some rows of it, that is written stripe by stripe along `axis`."""
        if on_device:
            return Buffer(self, torch.empty(shape, dtype=dtype, device=self.device), True)
        nbytes = nbytes_of(shape, dtype)
        wanted = self.host_bytes + nbytes
        if self._ram_bytes is not None and wanted > self._ram_bytes:
            spare = format_bytes(self._ram_bytes)
            raise OutOfRamError(f"feature maps take {format_bytes(wanted)} of RAM or more, and {spare} are spare")
        order = [shape[axis], *shape[:axis], *shape[axis + 1 :]]  # a stripe is one piece of memory, for one copy
        if self._dry:
            return Buffer(self, _SHAPES.new_empty(order, dtype=dtype).movedim(0, axis), False)
        piece = self._pool.take(nbytes)
        return Buffer(self, view(piece, order, dtype).movedim(0, axis), False, lambda: self._pool.give(piece))

    def fetch(self, piece: torch.Tensor, axis: int, after: Any = None) -> torch.Tensor:
        """Rows of a map in RAM, as they lie there, `axis` first; on the device once `lanes.land` was called."""
        self.h2d_bytes += piece.nbytes
        return self.lanes.fetch(piece.movedim(axis, 0), after)

    def store(self, target: torch.Tensor, stripe: torch.Tensor, axis: int, spilled: bool = False) -> Any:
        """Write a stripe to its place in RAM, `spilled` if it was kept before. Returns the event that it is there."""
        self.d2h_bytes += stripe.nbytes
        rows = stripe.movedim(axis, 0).contiguous()
        held = Buffer(self, rows, True) if spilled else rows  # of the map's own bytes, until they are in RAM
        return self.lanes.store(target.movedim(axis, 0), rows, spilled, held)


class Buffer:
    """The memory of one map, or a part of one, counted for as long as this object lives.

    `tensor` has the map's own shape; `stored` is the event that what was last written to RAM is there.
    """

    stored: Any = None

    def __init__(
        self, room: Room, tensor: torch.Tensor, on_device: bool, give: Callable[[], None] | None = None
    ) -> None:
        self.room, self.tensor, self.on_device, self._give = room, tensor, on_device, give
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
        if self._give:
            self._give()


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that has a shape and nothing else, in a dry run too."""
    return _SHAPES.new_empty(tuple(shape), dtype=dtype)
