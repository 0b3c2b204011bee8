"""Feature maps that are made stripe by stripe: what is known of one, and how its rows come about.

A `Map` is a tensor that need not exist: it knows how to make any of its rows, from rows of the maps that it follows
from. It is kept, on the device or in RAM, where it would otherwise be made again too often.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .arena import Buffer, Room, nbytes_of
from .rows import Ahead, RowBlock, Rows
from .running_variance import Moments

# [Note: Stripe materialization]
# A VAE's code runs unchanged on tensors whose data need not exist. Each operator returns a `Map`, which knows its
# inputs and how to make any of its rows from rows of them. Rows are made when somebody reads them, such as the loop
# that copies the picture to the CPU stripe by stripe.
#
# Making rows on demand alone would repeat work: a 3 x 3 convolution reads one more row on each side, and ten of them
# in a chain ten. So a map that is read more than once is either kept (in memory on the device, the rest in RAM) or
# made again, whichever takes less time (`keeping.settle`, `planning.stripes.is_cheaper_made`). At most two
# convolutions in a row are made again. Kept maps bound the margin of a stripe, and the memory of a pass.
#
# Statistics over a whole map (group norm) need all rows before the first normalized row. They are summed while the
# map is kept (`Moments`), so that no pass is made for them alone.
#
# Convolutions run by the stock kernels on the same values as without stripes, so no seam can show.


class Map:
    """A tensor of `shape`, of which rows are made: slices along the dimension `axis`.

    See [Note: Stripe materialization].

    `inputs` are the maps it follows from. `operations` says how many multiplications and additions one element takes;
    `shares` that its rows are views of its input's. `grain`: rows come cheapest in multiples of so many. `memory` has
    the rows of a map that is kept.
    """

    grain = 1
    wholly: tuple[Map, ...] = ()  # inputs of which each row takes all rows

    def __init__(
        self,
        room: Room,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        inputs: Iterable[Map] = (),
        operations: int = 0,
        shares: bool = False,
    ) -> None:
        self.room, self.shape, self.dtype, self.axis = room, tuple(shape), dtype, axis
        self.inputs, self.operations, self.shares = tuple(inputs), operations, shares
        self.memory: Rows | None = None
        self.moments: Moments | None = None
        self.remade = False
        self.followers: weakref.WeakSet[Map] = weakref.WeakSet()
        self.made_from: weakref.WeakSet[Map] = weakref.WeakSet()  # kept maps, of one that is kept
        self.holders: list[weakref.ref[Any]] = []  # tensors that are this map, or were
        self._last: tuple[int, int, weakref.ref[torch.Tensor]] | None = None
        for source in self.inputs:
            source._follow(self)

    def _follow(self, follower: Map) -> None:
        more = len(self.followers) > 0
        self.followers.add(follower)
        if self.heavy and more:
            self.room.settle(self)

    @property
    def length(self) -> int:
        """Rows."""
        return self.shape[self.axis]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(1, self.length)

    @property
    def is_held(self) -> bool:
        """Return whether others than maps may ask for it."""
        return any((tensor := each()) is not None and tensor.node is self for each in self.holders)

    @property
    def kept(self) -> torch.Tensor | None:
        """All of a map that is kept, where that is one tensor: in RAM, or on the device."""
        return self.memory.blocks[0].tensor if self._is_one() else None  # type: ignore[union-attr]

    @property
    def buffer(self) -> Buffer | None:
        """Where `kept` lies."""
        return self.memory.blocks[0].buffer if self._is_one() else None  # type: ignore[union-attr]

    def _is_one(self) -> bool:
        blocks = self.memory.blocks if self.memory else []
        return len(blocks) == 1 and blocks[0].stop - blocks[0].start == self.length

    @property
    def heavy(self) -> bool:
        """Return whether making rows takes convolutions or products that are better not done twice."""
        if self.memory is not None or self.remade:
            return False
        return self.operations > 0 or any(source.heavy for source in self.inputs)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows on the device, never to be written to."""
        if self._last is not None and self._last[0] <= start and stop <= self._last[1]:
            again = self._last[2]()
            if again is not None:
                return again.narrow(self.axis, start - self._last[0], stop - start)
        made = self._make(start, stop) if self.memory is None else self._from_memory(self.memory, start, stop)
        self.remember(start, stop, made)
        return made

    def remember(self, start: int, stop: int, rows: torch.Tensor) -> None:
        """Give these rows to whoever asks for some of them, for as long as somebody holds them."""
        self._last = start, stop, weakref.ref(rows)

    def empty_rows(self, count: int) -> torch.Tensor:
        """Memory for so many rows on the device."""
        shape = [*self.shape[: self.axis], count, *self.shape[self.axis + 1 :]]
        return torch.empty(shape, dtype=self.dtype, device=self.room.device)

    def _from_memory(self, memory: Rows, start: int, stop: int) -> torch.Tensor:
        found = memory.view(start, stop)
        return Ahead(self.room).alone(self, start, stop) if found is None else found

    def fresh_bytes(self, rows: int) -> int:
        """Return what so many rows, once made, take on the device, beside rows of maps in RAM."""
        return 0 if self.memory is not None else self._fresh_bytes(rows)

    def peak_bytes(self, rows: int) -> int:
        """Return the most that making so many rows takes on the device, beside rows of maps in RAM."""
        return 0 if self.memory is not None else self._peak_bytes(rows)

    def passing_bytes(self, rows: int) -> int:
        """Return the most that so many rows take that are asked for on their own.

        From RAM they come, and are put together.
        """
        start = max(0, (self.length - rows) // 2)
        come = sum((high - low) * one.row_bytes for one, low, high in self.needed(start, start + rows))
        return 2 * come + self.peak_bytes(rows)

    def needed(self, start: int, stop: int) -> Iterator[tuple[Map, int, int]]:
        """Which rows of which maps that do not lie on the device as one it takes to make these rows."""
        if self.memory is None:
            for source, low, high in self._sources(start, stop):
                yield from source.needed(low, high)
        elif not self.memory.is_whole:
            yield self, start, stop

    def kind(self, start: int, stop: int) -> tuple:
        """Return what tells these rows from others to make: those of one kind take the same steps, in as many bytes."""
        if self.memory is not None:
            return (stop - start,)
        sources = (source.kind(low, high) for source, low, high in self._sources(start, stop))
        return (stop - start, *self._phase(start, stop), *sources)

    def keep_as(self, memory: Rows) -> None:
        """From now on take rows from memory, and let go of what they were made from."""
        for source in self.inputs:
            source.followers.discard(self)
        self.memory, self.inputs = memory, ()
        self._let_go()

    def _make(self, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("a map that is not kept can make its rows")

    def _sources(self, start: int, stop: int) -> list[tuple[Map, int, int]]:
        return [(source, start, stop) for source in self.inputs]

    def _phase(self, start: int, stop: int) -> tuple[int, ...]:
        """Return how rows lie in what they are made from, beside how many of that there are."""
        return ()

    def _fresh_bytes(self, rows: int) -> int:
        return rows * self.row_bytes

    def _peak_bytes(self, rows: int) -> int:
        raise AssertionError("a map that is not kept knows what its rows take")

    def _let_go(self) -> None:
        pass


def kept_map(room: Room, tensor: torch.Tensor, axis: int, buffer: Buffer) -> Map:
    """Return a map that lies in memory, all or a part of `buffer`."""
    made = Map(room, tensor.shape, tensor.dtype, axis)
    made.keep_as(Rows(axis, [RowBlock(0, made.length, tensor, buffer)]))
    return made


class Local(Map):
    """Rows that follow from the same rows of the inputs, by `make`; `ratio` (n, d): n rows from every d."""

    def __init__(
        self,
        room: Room,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        inputs: Iterable[Map],
        make: Callable[[list[torch.Tensor]], torch.Tensor],
        ratio: tuple[int, int] = (1, 1),
        operations: int = 0,
        shares: bool = False,
    ) -> None:
        super().__init__(room, shape, dtype, axis, inputs, operations, shares)
        self._function: Callable[[list[torch.Tensor]], torch.Tensor] | None = make
        self._ratio = ratio
        self.grain = max(1, max(source.grain for source in self.inputs) * ratio[0] // ratio[1])

    def _sources(self, start: int, stop: int) -> list[tuple[Map, int, int]]:
        more, each = self._ratio
        return [(source, start // more * each, -(-stop // more) * each) for source in self.inputs]

    def _make(self, start: int, stop: int) -> torch.Tensor:
        assert self._function is not None
        made = self._function([source.rows(low, high) for source, low, high in self._sources(start, stop)])
        above = start // self._ratio[0] * self._ratio[0]
        return made if made.shape[self.axis] == stop - start else made.narrow(self.axis, start - above, stop - start)

    def _phase(self, start: int, stop: int) -> tuple[int, ...]:
        return (start % self._ratio[0],)

    def _taken(self, rows: int) -> tuple[int, int]:
        """Rows of the inputs for so many, and rows that these make."""
        more, each = self._ratio
        blocks = -(-rows // more) + (1 if more > 1 and rows % more else 0)
        blocks = min(blocks, -(-self.length // more))
        return blocks * each, blocks * more

    def _fresh_bytes(self, rows: int) -> int:
        taken, made = self._taken(rows)
        if self.shares:
            return sum(source.fresh_bytes(taken) for source in self.inputs)
        return made * self.row_bytes

    def _peak_bytes(self, rows: int) -> int:
        taken, made = self._taken(rows)
        held = most = 0
        for source in self.inputs:
            most = max(most, held + source.peak_bytes(taken))
            held += source.fresh_bytes(taken)
        return max(most, held + (0 if self.shares else made * self.row_bytes))

    def _let_go(self) -> None:
        self._function = None


class Window(Map):
    """Rows that follow from a window of the input's: a convolution's, or those of a pooling.

    `reach` is the height of a window and `stride` the step to the next; `above` and `below` are rows of padding.
    `make` is called with rows of the input and how many rows of padding belong above and below these.
    """

    def __init__(
        self,
        room: Room,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        source: Map,
        make: Callable[[torch.Tensor, int, int], torch.Tensor],
        reach: int,
        stride: int = 1,
        above: int = 0,
        operations: int = 0,
    ) -> None:
        super().__init__(room, shape, dtype, axis, (source,), operations)
        self._function: Callable[[torch.Tensor, int, int], torch.Tensor] | None = make
        self._reach, self._stride, self._above = reach, stride, above

    def _reached(self, start: int, stop: int) -> tuple[int, int]:
        first = start * self._stride - self._above
        return first, first + (stop - 1 - start) * self._stride + self._reach

    def _sources(self, start: int, stop: int) -> list[tuple[Map, int, int]]:
        source, (first, last) = self.inputs[0], self._reached(start, stop)
        # At least one row of the input, also where there is nothing but padding: some paddings repeat it.
        low = min(max(first, 0), source.length - 1)
        return [(source, low, max(min(last, source.length), low + 1))]

    def _make(self, start: int, stop: int) -> torch.Tensor:
        assert self._function is not None
        first, last = self._reached(start, stop)
        ((source, low, high),) = self._sources(start, stop)
        made = self._function(source.rows(low, high), max(0, low - first), max(0, last - high))
        extra = max(0, first - low) // self._stride
        return made if made.shape[self.axis] == stop - start else made.narrow(self.axis, extra, stop - start)

    def _phase(self, start: int, stop: int) -> tuple[int, ...]:
        first, last = self._reached(start, stop)
        return first - max(0, first), last - min(last, self.inputs[0].length)

    def _peak_bytes(self, rows: int) -> int:
        source = self.inputs[0]
        taken = min(source.length, (rows - 1) * self._stride + self._reach)
        # The input; that once more, padded, or as the workspace of a GPU's kernel; the result.
        beside = source.fresh_bytes(taken) + taken * source.row_bytes
        return max(source.peak_bytes(taken), beside + rows * self.row_bytes)

    def _let_go(self) -> None:
        self._function = None
