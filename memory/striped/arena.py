"""The memory of one run in stripes: buffers on the device within a budget, buffers in RAM, and copies between them."""

from __future__ import annotations

import functools
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
from ..simulated.attention import Fuses
from ..simulated.card import current_card
from ..sizes import format_bytes
from .copy_streams import CopyStreams, Pool, view

log = logging.getLogger("ballast")

_SHAPES = torch.empty(0, device="meta")  # to compute shapes with; made outside of any dry run, so never counted
_SPARE = 16  # 1/16 of the budget stays free: allocators round up, and small tensors are not counted


class OutOfRamError(RuntimeError):
    """Feature maps do not fit in the RAM limit of the run."""


class StripeMemory:
    """The accounts of one run: a budget of device memory for feature maps and stripes, RAM for the excess.

    `host_peak_bytes` is the peak of feature maps in RAM. `h2d_bytes` and `d2h_bytes` count copies each way. In a dry
    run the device is `meta` (see `simulated.dry`), and buffers in RAM are `meta` tensors too.
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
        self.fuses = fuses  # which attention calls have a fused kernel there; None for all
        self.settle = settle  # `materialize.settle`, called with a lazy tensor once a second operator reads it
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
        self.copy_streams = CopyStreams(device, self._dry)
        self._pool = Pool(device, self.copy_streams.behind_reads, self.copy_streams.finish)

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no buffer on the device takes."""
        return max(0, self.budget_bytes - self.device_bytes)

    def ran_out(self, error: BaseException) -> None:
        """Lower the budget by a quarter of its free part after an out-of-memory error, whose frames are released."""
        release_frames(error)
        self.copy_streams.land()  # rows in flight: their memory may be reused next
        self.copy_streams.settle()
        self.budget_bytes -= -(-self.free_bytes // 4)
        if not self._was_short:
            log.warning("Ballast: memory ran out in a stripe; going on in smaller ones")
        self._was_short = True

    def finish(self) -> None:
        """Wait for copies in flight, and free spare RAM."""
        self.copy_streams.finish()
        self._pool.clear()

    def begin_stripe(self) -> None:
        """Call `on_stripe`. What it raises ends the run."""
        if self._on_stripe:
            self._on_stripe()

    def steps(self, count: int, kind: Callable[[int], Hashable]) -> Iterator[int]:
        """Yield the numbers of the blocks of a stripe, from 0 to `count` - 1.

        A dry run yields the first block and one of each `kind`, and counts the cost of the others from these.
        """
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
        """Return the counters (operations, device bytes) of a dry run, to be passed to `noted`."""
        if not self.skips:
            return 0.0, 0
        current_card().take_interval_peak()
        return self.operations(), current_card().allocated_bytes()

    def noted(self, operations: float, held_bytes: int) -> tuple[float, int]:
        """Return the operations since `begin_noting`, and the peak device bytes above those held then."""
        return self.operations() - operations, current_card().take_interval_peak() - held_bytes

    def note(self, operations: float, peak_bytes: int) -> None:
        """Count operations and a peak from `noted` once more, for a stripe that the dry run skips."""
        self._repeated_operations += operations
        current_card().allocate(peak_bytes)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Record a `Pass` until the block ends: operations and copies each way, which overlap.

        A pass within another is part of the outer one.
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
    exposed_bytes = 0  # copied in the present pass with nothing to overlap: before its first stripe, after its last

    def counted(self) -> tuple[float, int, int]:
        """Return operations, bytes to the device and bytes from it, so far."""
        return self.operations(), self.h2d_bytes, self.d2h_bytes

    def operations(self) -> float:
        """Return the operations of a dry run so far; 0 in a real run."""
        card = current_card()
        return card.stats().compute_seconds * (card.flops or 0.0) + self._repeated_operations if self._dry else 0.0

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, axis: int, on_device: bool) -> Buffer:
        """Return uninitialized memory for a feature map, or for rows of it, written stripe by stripe along `axis`.

        Raises OutOfRamError if it is to lie in RAM and exceeds the run's limit.
        """
        if on_device:
            return Buffer(self, torch.empty(shape, dtype=dtype, device=self.device), True)
        nbytes = nbytes_of(shape, dtype)
        wanted = self.host_bytes + nbytes
        if self._ram_bytes is not None and wanted > self._ram_bytes:
            spare = format_bytes(self._ram_bytes)
            raise OutOfRamError(f"feature maps take {format_bytes(wanted)} of RAM or more, and {spare} are spare")
        order = [
            shape[axis],
            *shape[:axis],
            *shape[axis + 1 :],
        ]  # rows first: then a stripe is contiguous, and one copy
        if self._dry:
            return Buffer(self, _SHAPES.new_empty(order, dtype=dtype).movedim(0, axis), False)
        piece = self._pool.take(nbytes)
        return Buffer(self, view(piece, order, dtype).movedim(0, axis), False, lambda: self._pool.give(piece))

    def fetch(self, piece: torch.Tensor, axis: int, after: Any = None) -> torch.Tensor:
        """Begin to copy rows from RAM. Return them on the device, `axis` first, valid after `copy_streams.land`."""
        self.h2d_bytes += piece.nbytes
        return self.copy_streams.fetch(piece.movedim(axis, 0), after)

    def store(self, target: torch.Tensor, stripe: torch.Tensor, axis: int, spilled: bool = False) -> Any:
        """Begin to copy a stripe into `target` in RAM. Return the event of its arrival, None without streams.

        `spilled` marks rows that were materialized on the device, whose bytes count until they have arrived.
        """
        self.d2h_bytes += stripe.nbytes
        rows = stripe.movedim(axis, 0).contiguous()
        held = Buffer(self, rows, True) if spilled else rows  # counted until they are in RAM
        return self.copy_streams.store(target.movedim(axis, 0), rows, spilled, held)


class Buffer:
    """The memory of one feature map, or of some of its rows, counted for as long as this object lives.

    `tensor` has the dimensions of the feature map. `stored` is the event that the last write to RAM has arrived.
    """

    stored: Any = None

    def __init__(
        self, arena: StripeMemory, tensor: torch.Tensor, on_device: bool, give: Callable[[], None] | None = None
    ) -> None:
        self.arena, self.tensor, self.on_device, self._give = arena, tensor, on_device, give
        self.nbytes = nbytes_of(tensor.shape, tensor.dtype)
        if on_device:
            arena.device_bytes += self.nbytes
        else:
            arena.host_bytes += self.nbytes
            arena.host_peak_bytes = max(arena.host_peak_bytes, arena.host_bytes)

    def __del__(self) -> None:
        if not hasattr(self, "nbytes"):
            return
        if self.on_device:
            self.arena.device_bytes -= self.nbytes
        else:
            self.arena.host_bytes -= self.nbytes
        if self._give:
            self._give()


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


@functools.lru_cache(maxsize=2**12)
def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a `meta` tensor of a shape and dtype, which a dry run does not count. Each call of them gives the same."""
    return _SHAPES.new_empty(shape, dtype=dtype)
