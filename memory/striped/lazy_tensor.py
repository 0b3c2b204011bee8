"""Lazy tensors: feature maps of a VAE whose rows are made on demand, stripe by stripe.

A `LazyTensor` is a node of a graph. It can make any of its rows from rows of its inputs. It is materialized, on the
device or in RAM, if its rows would otherwise be made too often.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .arena import Buffer, StripeMemory, nbytes_of
from .rows import RowBlock, RowPrefetch, Rows
from .running_variance import MeanVariance

# [Note: Stripe materialization]
# A VAE's code runs unchanged on tensors whose data need not exist. Each operator returns a `LazyTensor`, which has its
# inputs and can make any of its rows from rows of them. Rows are made when somebody reads them, such as the loop that
# copies the picture to the CPU stripe by stripe (`materialize.to_host`).
#
# Making rows on demand alone would repeat work: a 3 x 3 convolution reads one more row on each side, and a chain of ten
# reads ten. So a tensor that is read more than once is either materialized (rows on the device, the others in RAM) or
# made again, whichever takes less time (`materialize.settle`, `planning.stripes.is_cheaper_made`). At most two
# convolutions in a row are made again. So materialized tensors bound the halo of a stripe, and the memory of a pass.
#
# Group norm needs mean and variance of all rows before its first normalized row. They are accumulated while its input
# is materialized (`RunningVariance`), so that no pass is made for them alone.
#
# [Note: Stripe exactness]
# There are no seams: each stripe is made with its whole halo, from the same values as without stripes. What differs
# from the whole is rounding. No equal bits are promised, since kernels choose vector width and order of summation by
# shape. Bits do not depend on when copies are made: `test_late_copies` compares them on the simulated card.
#
# Stock kernels run on stripes, with three exceptions that compute the same in another order:
# - group norm merges the mean and variance of stripes in float64 (`layers`, `running_variance`), since a sum over many
#   stripes in float32 would lose digits. Tests: mean within 1e-6, variance within 1e-5, relative.
# - a float32 3 x 3 convolution after a twofold upsampling sums taps into 2 x 2 kernels (`enlarged`), in 4/9 of the
#   operations. Measured on a CPU: 1.5e-6 where values reach 2.8.
# - attention with a mask, without a fused kernel, or over keys that do not fit is an online softmax in float32.
#
# Tests (`tests/memory/striped`) hold single functions within 1e-5 of the whole, absolute and relative, in bf16 within
# 0.05, and pictures of diffusers' VAE classes within 1e-4 of a pixel in 0..1.


class LazyTensor:
    """A tensor of `shape` whose rows, slices along the dimension `axis`, are made on demand.

    See [Note: Stripe materialization]. `inputs` are the lazy tensors that it is made from. `operations` counts the
    multiplications and additions of one element. `shares` means that its rows are views of its input's rows. `memory`
    holds the rows once it is materialized; `inputs` is empty from then on. Subclasses are the operators.
    """

    grain = 1  # making rows is cheapest in multiples of this many
    wholly: tuple[LazyTensor, ...] = ()  # inputs of which each row reads all rows, such as keys and values

    def __init__(
        self,
        arena: StripeMemory,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        inputs: Iterable[LazyTensor] = (),
        operations: int = 0,
        shares: bool = False,
    ) -> None:
        self.arena, self.shape, self.dtype, self.axis = arena, tuple(shape), dtype, axis
        self.inputs, self.operations, self.shares = tuple(inputs), operations, shares
        self.memory: Rows | None = None
        self.statistics: MeanVariance | None = None
        self.remade = False
        self.followers: weakref.WeakSet[LazyTensor] = weakref.WeakSet()
        self.made_from: weakref.WeakSet[LazyTensor] = (
            weakref.WeakSet()
        )  # of a materialized tensor, the materialized ones it came from
        self.holders: list[weakref.ref[Any]] = []  # the caller's `StripedTensor`s that are this tensor, or were
        self._last: tuple[int, int, weakref.ref[torch.Tensor]] | None = None
        for source in self.inputs:
            source._follow(self)

    def _follow(self, follower: LazyTensor) -> None:
        more = len(self.followers) > 0
        self.followers.add(follower)
        if self.heavy and more:
            self.arena.settle(self)

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.shape[self.axis]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(1, self.length)

    @property
    def is_held(self) -> bool:
        """Return whether the caller holds a `StripedTensor` of it, and so may read any rows."""
        return any((tensor := each()) is not None and tensor.node is self for each in self.holders)

    @property
    def materialized(self) -> torch.Tensor | None:
        """The tensor that holds all rows, in RAM or on the device; None if not materialized, or in several blocks."""
        return self.memory.blocks[0].tensor if self._is_one() else None  # type: ignore[union-attr]

    @property
    def buffer(self) -> Buffer | None:
        """The buffer of `materialized`."""
        return self.memory.blocks[0].buffer if self._is_one() else None  # type: ignore[union-attr]

    def _is_one(self) -> bool:
        blocks = self.memory.blocks if self.memory else []
        return len(blocks) == 1 and blocks[0].stop - blocks[0].start == self.length

    @property
    def heavy(self) -> bool:
        """Return whether making rows takes convolutions or products, not to be done twice without need."""
        if self.memory is not None or self.remade:
            return False
        return self.operations > 0 or any(source.heavy for source in self.inputs)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` on the device. The caller must not write to them."""
        if self._last is not None and self._last[0] <= start and stop <= self._last[1]:
            again = self._last[2]()
            if again is not None:
                return again.narrow(self.axis, start - self._last[0], stop - start)
        made = self._make(start, stop) if self.memory is None else self._from_memory(self.memory, start, stop)
        self.remember(start, stop, made)
        return made

    def remember(self, start: int, stop: int, rows: torch.Tensor) -> None:
        """Serve later reads from these rows for as long as somebody else holds them (a weak reference)."""
        self._last = start, stop, weakref.ref(rows)

    def empty_rows(self, count: int) -> torch.Tensor:
        """Return uninitialized memory for `count` rows on the device."""
        shape = [*self.shape[: self.axis], count, *self.shape[self.axis + 1 :]]
        return torch.empty(shape, dtype=self.dtype, device=self.arena.device)

    def _from_memory(self, memory: Rows, start: int, stop: int) -> torch.Tensor:
        found = memory.view(start, stop)
        return RowPrefetch(self.arena).alone(self, start, stop) if found is None else found

    def fresh_bytes(self, rows: int) -> int:
        """Return the bytes that `rows` rows, once made, take on the device, without rows fetched from RAM."""
        return 0 if self.memory is not None else self._fresh_bytes(rows)

    def peak_bytes(self, rows: int) -> int:
        """Return the peak bytes of making `rows` rows on the device, without rows fetched from RAM."""
        return 0 if self.memory is not None else self._peak_bytes(rows)

    def passing_bytes(self, rows: int) -> int:
        """Return the peak bytes of `rows` rows that are read outside of a pass.

        Rows fetched from RAM count twice, since they are put together in a second tensor.
        """
        start = max(0, (self.length - rows) // 2)
        come = sum((high - low) * one.row_bytes for one, low, high in self.needed(start, start + rows))
        return 2 * come + self.peak_bytes(rows)

    def needed(self, start: int, stop: int) -> Iterator[tuple[LazyTensor, int, int]]:
        """Yield (tensor, low, high): the rows to make these from, of tensors that are not one block on the device."""
        if self.memory is None:
            for source, low, high in self._sources(start, stop):
                yield from source.needed(low, high)
        elif not self.memory.is_whole:
            yield self, start, stop

    def kind(self, start: int, stop: int) -> tuple:
        """Return a key of these rows. Making rows with equal keys takes the same operations and bytes."""
        if self.memory is not None:
            return (stop - start,)
        sources = (source.kind(low, high) for source, low, high in self._sources(start, stop))
        return (stop - start, *self._phase(start, stop), *sources)

    def materialize_as(self, memory: Rows) -> None:
        """From now on take rows from `memory`, and drop the inputs they were made from."""
        for source in self.inputs:
            source.followers.discard(self)
        self.memory, self.inputs = memory, ()
        self._let_go()

    def _make(self, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("rows were asked of a lazy tensor that is not materialized and has no operator")

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
        return [(source, start, stop) for source in self.inputs]

    def _phase(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the alignment of rows within the rows they are made from, as a part of `kind`."""
        return ()

    def _fresh_bytes(self, rows: int) -> int:
        return rows * self.row_bytes

    def _peak_bytes(self, rows: int) -> int:
        raise AssertionError("the peak was asked of a lazy tensor that is not materialized and has no operator")

    def _let_go(self) -> None:
        pass


def materialized_tensor(arena: StripeMemory, tensor: torch.Tensor, axis: int, buffer: Buffer) -> LazyTensor:
    """Return a lazy tensor materialized as `tensor`, which is all or a part of `buffer`."""
    made = LazyTensor(arena, tensor.shape, tensor.dtype, axis)
    made.materialize_as(Rows(axis, [RowBlock(0, made.length, tensor, buffer)]))
    return made


class Local(LazyTensor):
    """An operator whose rows follow from the same rows of the inputs.

    `make` takes the rows of each input and returns the rows. `ratio` (n, d) says that every d rows give n rows.
    """

    def __init__(
        self,
        arena: StripeMemory,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        inputs: Iterable[LazyTensor],
        make: Callable[[list[torch.Tensor]], torch.Tensor],
        ratio: tuple[int, int] = (1, 1),
        operations: int = 0,
        shares: bool = False,
    ) -> None:
        super().__init__(arena, shape, dtype, axis, inputs, operations, shares)
        self._function: Callable[[list[torch.Tensor]], torch.Tensor] | None = make
        self._ratio = ratio
        self.grain = max(1, max(source.grain for source in self.inputs) * ratio[0] // ratio[1])

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
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
        """Return how many rows of the inputs `rows` rows need, and how many rows these make."""
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


class Window(LazyTensor):
    """An operator whose rows follow from windows of the input's rows, such as a convolution or a pooling.

    `reach` is the height of a window, `stride` the step to the next one, `above` the rows of padding above the first
    row. `make(rows, top, bottom)` takes rows of the input and the numbers of padding rows above and below these.
    """

    def __init__(
        self,
        arena: StripeMemory,
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: int,
        source: LazyTensor,
        make: Callable[[torch.Tensor, int, int], torch.Tensor],
        reach: int,
        stride: int = 1,
        above: int = 0,
        operations: int = 0,
    ) -> None:
        super().__init__(arena, shape, dtype, axis, (source,), operations)
        self._function: Callable[[torch.Tensor, int, int], torch.Tensor] | None = make
        self._reach, self._stride, self._above = reach, stride, above

    def _reached(self, start: int, stop: int) -> tuple[int, int]:
        first = start * self._stride - self._above
        return first, first + (stop - 1 - start) * self._stride + self._reach

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
        source, (first, last) = self.inputs[0], self._reached(start, stop)
        # At least one row of the input, even if the window is all padding: replicating paddings repeat it.
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
        # The input, a padded copy of it or a GPU kernel's workspace, and the result.
        beside = source.fresh_bytes(taken) + taken * source.row_bytes
        return max(source.peak_bytes(taken), beside + rows * self.row_bytes)

    def _let_go(self) -> None:
        self._function = None
