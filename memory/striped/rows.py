"""Rows of materialized tensors in blocks, on the device or in RAM, and the prefetch of those in RAM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..planning.stripes import blocks

if TYPE_CHECKING:
    from .arena import Buffer, StripeMemory

_SPILLS = 16  # parts, at least, in which a block is spilled when memory has run out
_PART = 32  # 1/32 of the budget is spilled at once at most


@dataclass(frozen=True)
class RowBlock:
    """Rows `start` to `stop` of a tensor. `tensor` has all of its dimensions, and lies in `buffer`."""

    start: int
    stop: int
    tensor: torch.Tensor
    buffer: Buffer

    @property
    def on_device(self) -> bool:
        return self.buffer.on_device

    def part(self, start: int, stop: int, axis: int) -> torch.Tensor:
        """Return a view of rows `start` to `stop`, all of which must be in this block."""
        return self.tensor.narrow(axis, start - self.start, stop - start)


class Rows:
    """The rows of one tensor along `axis`, in blocks sorted by their start."""

    def __init__(self, axis: int, blocks: Iterable[RowBlock] = ()) -> None:
        self.axis = axis
        self.blocks = sorted(blocks, key=lambda block: block.start)

    @property
    def device_bytes(self) -> int:
        return sum(block.buffer.nbytes for block in self.blocks if block.on_device)

    @property
    def is_whole(self) -> bool:
        """Return whether they are one block on the device."""
        return len(self.blocks) == 1 and self.blocks[0].on_device

    def add(self, block: RowBlock) -> None:
        """Insert a block."""
        self.blocks = sorted([*self.blocks, block], key=lambda each: each.start)

    def release(self, start: int) -> None:
        """Free the blocks on the device that end at or above row `start`, which nobody reads again."""
        self.blocks = [one for one in self.blocks if not one.on_device or one.stop > start]

    def spill(self, start: int, arena: StripeMemory, short: bool = False) -> None:
        """Move the blocks on the device that end at or above row `start` to RAM.

        Each goes in parts of at most 1/32 of the budget, in 16 or more if memory is `short`. A part is copied on the
        device first, and the compute stream waits for the part before it.
        """
        for index, one in enumerate(self.blocks):
            if one.on_device and one.stop <= start:
                buffer = arena.buffer(one.tensor.shape, one.tensor.dtype, self.axis, False)
                count = one.stop - one.start
                parts = max(_SPILLS if short else 1, -(-buffer.nbytes * _PART // arena.budget_bytes))
                for low, high in blocks(count, -(-count // parts)):
                    part, target = (each.narrow(self.axis, low, high - low) for each in (one.tensor, buffer.tensor))
                    buffer.stored = arena.store(target, part, self.axis, spilled=True)
                self.blocks[index] = RowBlock(one.start, one.stop, buffer.tensor, buffer)

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """Return a view of these rows if they lie in one block on the device, else None."""
        for block in self.blocks:
            if block.start <= start and stop <= block.stop:
                return block.part(start, stop, self.axis) if block.on_device else None
        return None

    def within(self, start: int, stop: int) -> Iterator[tuple[RowBlock, int, int]]:
        """Yield (block, low, high): the blocks that hold these rows, and the rows that each holds.

        Raises torch.OutOfMemoryError for rows that have been released, which a stripe made again would need.
        """
        at = start
        for block in self.blocks:
            low, high = max(at, block.start), min(stop, block.stop)
            if low < high:
                if low > at:
                    break
                yield block, low, high
                at = high
        if at < stop:
            raise torch.OutOfMemoryError("memory ran out in a stripe after the rows that it is made of had been let go")


class Materialized(Protocol):
    """A materialized `LazyTensor`, which imports this module."""

    arena: StripeMemory
    axis: int

    @property
    def row_bytes(self) -> int: ...
    @property
    def memory(self) -> Rows | None: ...
    def empty_rows(self, count: int) -> torch.Tensor: ...
    def remember(self, start: int, stop: int, rows: torch.Tensor) -> None: ...


Wanted = dict[Materialized, tuple[int, int]]  # the rows (start, stop) of each tensor that a stripe is made from


class RowPrefetch:
    """The rows of materialized tensors that a stripe is made from, on the device while it is made.

    Rows in RAM are fetched while the stripe before is made, each row once in a pass.
    """

    def __init__(self, arena: StripeMemory) -> None:
        self._arena = arena
        self._held: dict[Materialized, tuple[int, int, torch.Tensor]] = {}
        self._coming: dict[Materialized, list[tuple[int, int, torch.Tensor]]] = {}

    def bring(self, wanted: Wanted) -> None:
        """Begin to fetch the rows of a stripe from RAM, except rows that are held for the present stripe."""
        for one, (start, stop) in wanted.items():
            assert one.memory is not None
            for low, high in missing(start, stop, self._held.get(one)):
                for block, a, b in one.memory.within(low, high):
                    if not block.on_device:
                        rows = self._arena.fetch(block.part(a, b, one.axis), one.axis, block.buffer.stored)
                        self._coming.setdefault(one, []).append((a, b, rows))

    def begin(self, wanted: Wanted) -> None:
        """Put the fetched and held rows of a stripe together, one tensor for each source, which then serves reads."""
        self._arena.copy_streams.land()
        before, self._held = self._held, {}
        for one, (start, stop) in wanted.items():
            assert one.memory is not None
            if one.memory.view(start, stop) is not None:
                continue
            old = before.pop(one, None)
            if old is None or start < old[0] or old[1] < stop:
                old = start, stop, self._together(one, start, stop, old)
            self._held[one] = old
            one.remember(*old)
        self._coming.clear()

    def alone(self, one: Materialized, start: int, stop: int) -> torch.Tensor:
        """Fetch rows outside of a pass, and return them."""
        self.bring({one: (start, stop)})
        self.begin({one: (start, stop)})
        return self._held[one][2]

    def _together(
        self, one: Materialized, start: int, stop: int, old: tuple[int, int, torch.Tensor] | None
    ) -> torch.Tensor:
        made, axis = one.empty_rows(stop - start), one.axis

        def put(low: int, high: int, rows: torch.Tensor) -> None:
            if low < high and not self._arena.skips:  # a dry run needs no values
                made.narrow(axis, low - start, high - low).copy_(rows)

        assert one.memory is not None
        for low, high in missing(start, stop, old):
            for block, a, b in one.memory.within(low, high):
                if block.on_device:
                    put(a, b, block.part(a, b, axis))
        if old:
            low, high = max(start, old[0]), min(stop, old[1])
            put(low, high, old[2].narrow(axis, low - old[0], max(0, high - low)))
        for low, high, rows in self._coming.pop(one, ()):
            put(low, high, rows.movedim(0, axis))
        return made


def missing(start: int, stop: int, held: tuple[int, int, torch.Tensor] | None) -> list[tuple[int, int]]:
    """Return the spans of rows `start` to `stop` that are not among the rows `held`."""
    if held is None or held[1] <= start or stop <= held[0]:
        return [(start, stop)]
    return [(low, high) for low, high in ((start, held[0]), (held[1], stop)) if low < high]
