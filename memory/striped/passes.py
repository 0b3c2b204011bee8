"""One pass over a map: a stripe is made while what the next one needs comes from RAM and the last one leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import is_out_of_memory
from ..planning.stripes import stripe_height, stripes
from .lazy_tensor import Map
from .rows import Ahead, Wanted

Span = tuple[int, int]


def each_stripe(
    node: Map,
    take: Callable[[int, torch.Tensor], None],
    copies: int = 0,
    budget_bytes: int | None = None,
    dying: Sequence[Map] = (),
    spilled: Sequence[Map] = (),
    relieve: Callable[[], bool] = lambda: False,
) -> None:
    """Make a map stripe by stripe, from the top down, and have each taken, with the row it starts at.

    Taking makes so many `copies` of it, and leaves one more to be copied to RAM while the next one is made. What is
    taken stays taken: from a stripe that memory runs out in on they are lower. Rows of the maps `dying` are let go of
    once they have been used, those of the maps `spilled` go to RAM then. When memory
    runs out, `relieve` may make room, and says whether it did.
    """
    room, done, most = node.room, 0, node.length
    known: dict[tuple, tuple[float, int]] = {}
    room.lanes.settle()
    with room.one_pass():
        while done < node.length:
            left, again = node.length - done, _made_twice(node)
            free = room.free_bytes if budget_bytes is None else min(room.free_bytes, budget_bytes)
            height = min(most, stripe_height(left, free, lambda rows: stripe_bytes(node, rows, copies), node.grain))
            spans = [(done + start, done + stop) for start, stop in stripes(left, height)]
            fresh = [done, *(stop for _, stop in spans)]
            ahead, wanted = Ahead(room), [wanted_rows(node, *span) for span in spans]
            try:
                before = room.h2d_bytes
                ahead.bring(wanted[0])
                room.exposed_bytes += room.h2d_bytes - before
                for index, (start, stop) in enumerate(spans):
                    room.begin_stripe()
                    ahead.begin(wanted[index])
                    if index + 1 < len(spans):
                        ahead.bring(wanted[index + 1])
                    made = _made(node, start, stop, again, known)
                    before = room.d2h_bytes
                    take(fresh[index], made.narrow(node.axis, fresh[index] - start, stop - fresh[index]))
                    del made
                    done = stop
                    if done == node.length:
                        room.exposed_bytes += room.d2h_bytes - before
                    _behind(dying, spilled, wanted[index + 1] if index + 1 < len(spans) else None)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                del ahead
                room.ran_out(error)
                if not relieve() and height == 1:
                    raise
                most = max(1, height // 2)


def _made(
    node: Map, start: int, stop: int, again: Sequence[Map], known: dict[tuple, tuple[float, int]]
) -> torch.Tensor:
    """Make the rows of a stripe. A dry run makes one of each kind, and notes its costs for the others."""
    room = node.room
    if room.skips and (found := known.get(kind := node.kind(start, stop))):
        room.note(*found)
        return node.empty_rows(stop - start)
    before, held_bytes = room.begin_noting()
    held = [one.rows(low, high) for one, low, high in _spans_of(again, node, start, stop)]
    made = node.rows(start, stop)
    del held
    if room.skips and not node.shares and node.memory is None:
        known[kind] = room.noted(before, held_bytes)
    return made


def stripe_bytes(node: Map, rows: int, copies: int = 0) -> int:
    """Return the most that a pass takes on the device with stripes so high, beside what is kept there."""
    start = (node.length - rows) // 2
    held = sum((high - low) * one.row_bytes for one, (low, high) in wanted_rows(node, start, start + rows).items())
    leaving = rows * node.row_bytes if copies else 0
    shared, most = 0, 0
    for one, low, high in _spans_of(_made_twice(node), node, start, start + rows):
        most = max(most, shared + one.peak_bytes(high - low))
        shared += one.fresh_bytes(high - low)
    making = max(node.peak_bytes(rows), node.fresh_bytes(rows) + copies * rows * node.row_bytes)
    # A stripe's rows are put together from those held for the one before and those new.
    return max(3 * held, 2 * held + max(most, shared + making)) + leaving


def wanted_rows(node: Map, start: int, stop: int) -> Wanted:
    """Rows of each map that lies elsewhere than as one on the device, which these rows are made from."""
    found: Wanted = {}
    for one, low, high in node.needed(start, stop):
        known = found.get(one, (low, high))
        found[one] = min(low, known[0]), max(high, known[1])
    return found


def _made_twice(node: Map) -> list[Map]:
    """Return the maps on the way to a map that take convolutions, are not kept, and are asked for more than once."""
    times: dict[Map, int] = {}
    waiting = [node]
    while waiting:
        for source in waiting.pop().inputs:
            times[source] = times.get(source, 0) + 1
            if times[source] == 1:
                waiting.append(source)
    return [one for one, count in times.items() if count > 1 and one.memory is None and one.operations]


def _spans_of(maps: Sequence[Map], node: Map, start: int, stop: int) -> list[tuple[Map, int, int]]:
    """Which rows of these maps it takes to make rows of another; those first that others are made from."""
    found: dict[Map, tuple[int, int]] = {}
    if maps:
        _ask(maps, found, node, start, stop)
    return [(one, *found[one]) for one in reversed(maps) if one in found]


def _ask(maps: Sequence[Map], found: dict[Map, tuple[int, int]], one: Map, low: int, high: int) -> None:
    """Widen the spans `found` by what rows of a map take. Not a closure: one that calls itself is a cycle with maps."""
    if one in maps:
        known = found.get(one, (low, high))
        low, high = found[one] = min(low, known[0]), max(high, known[1])
    if one.memory is None:
        for source, first, last in one._sources(low, high):
            _ask(maps, found, source, first, last)


def _behind(dying: Sequence[Map], spilled: Sequence[Map], wanted: Wanted | None) -> None:
    """Have done with rows that are behind what the next stripe is made from; with all after the last one."""
    for one in (*dying, *spilled):
        if one.memory is None or (wanted is not None and one not in wanted):
            continue
        start = wanted[one][0] if wanted else one.length
        if one in dying:
            one.memory.release(start)
        else:
            one.memory.spill(start, one.room)
