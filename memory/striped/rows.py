"""Rows of maps in memory: in blocks, some on the device, the others in RAM; and how those come ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..planning.stripes import blocks

if TYPE_CHECKING:
    from .arena import Buffer, Room

_SPILLS = 16  # parts that a block goes to RAM in at least when memory has run out
_PART = 32  # the part of the budget, one in so many, that goes at once at most


@dataclass(frozen=True)
class RowBlock:
    """Rows from `start` to `stop` of a map. The tensor, of the map's dimensions, is all or a part of the buffer."""

    start: int
    stop: int
    tensor: torch.Tensor
    buffer: Buffer

    @property
    def on_device(self) -> bool:
        return self.buffer.on_device

    def part(self, start: int, stop: int, axis: int) -> torch.Tensor:
        """Rows of the map that are all in this block."""
        return self.tensor.narrow(axis, start - self.start, stop - start)


class Rows:
    """The rows of one map along `axis`, in blocks."""

    def __init__(self, axis: int, blocks: Iterable[RowBlock] = ()) -> None:
        self.axis = axis
        self.blocks = sorted(blocks, key=lambda block: block.start)

    @property
    def device_bytes(self) -> int:
        return sum(block.buffer.nbytes for block in self.blocks if block.on_device)

    @property
    def is_whole(self) -> bool:
        """Return whether they are one tensor on the device."""
        return len(self.blocks) == 1 and self.blocks[0].on_device

    def add(self, block: RowBlock) -> None:
        """Put a block in its place."""
        self.blocks = sorted([*self.blocks, block], key=lambda each: each.start)

    def release(self, start: int) -> None:
        """Free the rows on the device above a row: nobody will ask for them again."""
        self.blocks = [one for one in self.blocks if not one.on_device or one.stop > start]

    def spill(self, start: int, room: Room, short: bool = False) -> None:
        """Move what lies on the device above a row to RAM, in few parts unless memory is `short`.

        Each is copied on the device first, and what is computed from then on waits for the one before.
        """
        for index, one in enumerate(self.blocks):
            if one.on_device and one.stop <= start:
                buffer = room.buffer(one.tensor.shape, one.tensor.dtype, self.axis, False)
                count = one.stop - one.start
                parts = max(_SPILLS if short else 1, -(-buffer.nbytes * _PART // room.budget_bytes))
                for low, high in blocks(count, -(-count // parts)):
                    part, target = (each.narrow(self.axis, low, high - low) for each in (one.tensor, buffer.tensor))
                    buffer.stored = room.store(target, part, self.axis, spilled=True)
                self.blocks[index] = RowBlock(one.start, one.stop, buffer.tensor, buffer)

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """Return these rows, if they lie in one block on the device."""
        for block in self.blocks:
            if block.start <= start and stop <= block.stop:
                return block.part(start, stop, self.axis) if block.on_device else None
        return None

    def within(self, start: int, stop: int) -> Iterator[tuple[RowBlock, int, int]]:
        """Yield the blocks that hold these rows, and which of them each does.

        OutOfMemoryError for what was let go of.
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


class Kept(Protocol):
    """A map in memory."""

    room: Room
    axis: int

    @property
    def row_bytes(self) -> int: ...
    @property
    def memory(self) -> Rows | None: ...
    def empty_rows(self, count: int) -> torch.Tensor: ...
    def remember(self, start: int, stop: int, rows: torch.Tensor) -> None: ...


Wanted = dict[Kept, tuple[int, int]]  # rows of each map that a stripe is made from


class Ahead:
    """The rows of kept maps that a stripe is made from, on the device while it is made.

    Those that lie in RAM come while the stripe before is made, each once in a pass.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: dict[Kept, tuple[int, int, torch.Tensor]] = {}
        self._coming: dict[Kept, list[tuple[int, int, torch.Tensor]]] = {}

    def bring(self, wanted: Wanted) -> None:
        """Fetch the rows of a stripe from RAM, save those that the stripe at hand is made from too."""
        for one, (start, stop) in wanted.items():
            assert one.memory is not None
            for low, high in missing(start, stop, self._held.get(one)):
                for block, a, b in one.memory.within(low, high):
                    if not block.on_device:
                        rows = self._room.fetch(block.part(a, b, one.axis), one.axis, block.buffer.stored)
                        self._coming.setdefault(one, []).append((a, b, rows))

    def begin(self, wanted: Wanted) -> None:
        """Have the rows of a stripe, all of which have come, each map's in one tensor."""
        self._room.lanes.land()
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

    def alone(self, one: Kept, start: int, stop: int) -> torch.Tensor:
        """Rows that are waited for."""
        self.bring({one: (start, stop)})
        self.begin({one: (start, stop)})
        return self._held[one][2]

    def _together(self, one: Kept, start: int, stop: int, old: tuple[int, int, torch.Tensor] | None) -> torch.Tensor:
        made, axis = one.empty_rows(stop - start), one.axis

        def put(low: int, high: int, rows: torch.Tensor) -> None:
            if low < high and not self._room.skips:  # a dry run needs no values
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
    """Which of these rows are not among those that are held."""
    if held is None or held[1] <= start or stop <= held[0]:
        return [(start, stop)]
    return [(low, high) for low, high in ((start, held[0]), (held[1], stop)) if low < high]
