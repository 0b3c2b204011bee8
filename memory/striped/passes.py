"""A pass makes a tensor stripe by stripe, while rows of the next stripe come from RAM and the last stripe leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import is_out_of_memory
from ..planning.stripes import stripe_height, stripes
from .lazy_tensor import LazyTensor
from .rows import RowPrefetch, Wanted

Span = tuple[int, int]


def each_stripe(
    node: LazyTensor,
    take: Callable[[int, torch.Tensor], None],
    copies: int = 0,
    budget_bytes: int | None = None,
    dying: Sequence[LazyTensor] = (),
    spilled: Sequence[LazyTensor] = (),
    relieve: Callable[[], bool] = lambda: False,
) -> None:
    """Make a tensor stripe by stripe from the top down, and call `take(start, stripe)` with each.

    `take` makes `copies` copies of a stripe on the device; with any, one is still leaving for RAM while the next stripe
    is made. Rows of `dying` tensors are freed once they have been used, those of `spilled` ones are moved to RAM.

    When memory runs out, the pass goes on from that stripe, with stripes at most half as high. Before that, `relieve`
    may free memory and return True. Raises the out-of-memory error if one row does not fit and nothing was freed.
    """
    arena, done, most = node.arena, 0, node.length
    known: dict[tuple, tuple[float, int]] = {}
    arena.copy_streams.settle()
    with arena.one_pass():
        while done < node.length:
            left, again = node.length - done, _made_twice(node)
            free = arena.free_bytes if budget_bytes is None else min(arena.free_bytes, budget_bytes)
            height = min(most, stripe_height(left, free, lambda rows: stripe_bytes(node, rows, copies), node.grain))
            spans = [(done + start, done + stop) for start, stop in stripes(left, height)]
            fresh = [done, *(stop for _, stop in spans)]
            prefetch, wanted = RowPrefetch(arena), [wanted_rows(node, *span) for span in spans]
            try:
                before = arena.h2d_bytes
                prefetch.bring(wanted[0])
                arena.exposed_bytes += arena.h2d_bytes - before
                for index, (start, stop) in enumerate(spans):
                    arena.begin_stripe()
                    prefetch.begin(wanted[index])
                    if index + 1 < len(spans):
                        prefetch.bring(wanted[index + 1])
                    made = _made(node, start, stop, again, known)
                    before = arena.d2h_bytes
                    take(fresh[index], made.narrow(node.axis, fresh[index] - start, stop - fresh[index]))
                    del made
                    done = stop
                    if done == node.length:
                        arena.exposed_bytes += arena.d2h_bytes - before
                    _behind(dying, spilled, wanted[index + 1] if index + 1 < len(spans) else None)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                del prefetch
                arena.ran_out(error)
                if not relieve() and height == 1:
                    raise
                most = max(1, height // 2)


def _made(
    node: LazyTensor, start: int, stop: int, again: Sequence[LazyTensor], known: dict[tuple, tuple[float, int]]
) -> torch.Tensor:
    """Return the rows of a stripe. A dry run makes one stripe of each kind, and counts its cost for the others."""
    arena = node.arena
    if arena.skips and (found := known.get(kind := node.kind(start, stop))):
        arena.note(*found)
        return node.empty_rows(stop - start)
    before, held_bytes = arena.begin_noting()
    held = [one.rows(low, high) for one, low, high in _spans_of(again, node, start, stop)]
    made = node.rows(start, stop)
    del held
    if arena.skips and not node.shares and node.memory is None:
        known[kind] = arena.noted(before, held_bytes)
    return made


def stripe_bytes(node: LazyTensor, rows: int, copies: int = 0) -> int:
    """Return the peak bytes of a pass on the device with stripes of `rows` rows, beside materialized tensors."""
    start = (node.length - rows) // 2
    held = sum((high - low) * one.row_bytes for one, (low, high) in wanted_rows(node, start, start + rows).items())
    leaving = rows * node.row_bytes if copies else 0
    shared, most = 0, 0
    for one, low, high in _spans_of(_made_twice(node), node, start, start + rows):
        most = max(most, shared + one.peak_bytes(high - low))
        shared += one.fresh_bytes(high - low)
    making = max(node.peak_bytes(rows), node.fresh_bytes(rows) + copies * rows * node.row_bytes)
    # The rows that a stripe needs are put together from those held for the one before, and new ones.
    return max(3 * held, 2 * held + max(most, shared + making)) + leaving


def wanted_rows(node: LazyTensor, start: int, stop: int) -> Wanted:
    """Return the rows to make these from, of each tensor that is not one block on the device."""
    found: Wanted = {}
    for one, low, high in node.needed(start, stop):
        known = found.get(one, (low, high))
        found[one] = min(low, known[0]), max(high, known[1])
    return found


def _made_twice(node: LazyTensor) -> list[LazyTensor]:
    """Return the sources of `node` that take convolutions, are not materialized, and are read twice or more."""
    times: dict[LazyTensor, int] = {}
    waiting = [node]
    while waiting:
        for source in waiting.pop().inputs:
            times[source] = times.get(source, 0) + 1
            if times[source] == 1:
                waiting.append(source)
    return [one for one, count in times.items() if count > 1 and one.memory is None and one.operations]


def _spans_of(
    nodes: Sequence[LazyTensor], node: LazyTensor, start: int, stop: int
) -> list[tuple[LazyTensor, int, int]]:
    """Return the rows of each of `nodes` that rows of `node` are made from, in the order in which to make them."""
    found: dict[LazyTensor, tuple[int, int]] = {}
    if nodes:
        _ask(nodes, found, node, start, stop)
    return [(one, *found[one]) for one in reversed(nodes) if one in found]


def _ask(
    nodes: Sequence[LazyTensor], found: dict[LazyTensor, tuple[int, int]], one: LazyTensor, low: int, high: int
) -> None:
    """Widen the spans `found` by the rows that rows of `one` are made from.

    Not a closure: a recursive closure is a reference cycle, which would keep tensors until the collector runs.
    """
    if one in nodes:
        known = found.get(one, (low, high))
        low, high = found[one] = min(low, known[0]), max(high, known[1])
    if one.memory is None:
        for source, first, last in one._sources(low, high):
            _ask(nodes, found, source, first, last)


def _behind(dying: Sequence[LazyTensor], spilled: Sequence[LazyTensor], wanted: Wanted | None) -> None:
    """Free or spill the rows above those that the next stripe is made from; all rows if `wanted` is None."""
    for one in (*dying, *spilled):
        if one.memory is None or (wanted is not None and one not in wanted):
            continue
        start = wanted[one][0] if wanted else one.length
        if one in dying:
            one.memory.release(start)
        else:
            one.memory.spill(start, one.arena)
