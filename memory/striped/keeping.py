"""When a map is made and kept, stripe by stripe: on the device while it fits in the budget, else in RAM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import is_out_of_memory
from .heights import stripe_height, stripes
from .maps import Map, kept_map
from .moments import Moments, Tally
from .room import Buffer

# Of an element at most. At 25e9 bytes and 25e12 operations a second, moving a value to RAM and back takes as long as
# making it again in so many operations; more are not worth the RAM that they save.
_REMADE_OPERATIONS = 10_000
_LEAST_ROWS = 8  # of the map at hand, that the device must have room for beside what is put there
_SPARED = 3  # one part of the budget in so many stays for stripes


def settle(node: Map, with_moments: bool = False) -> None:
    """See to it that rows of a map are cheap to make, as whoever reads some of them more than once needs it.

    What is expensive is kept. What would go to RAM is made again instead where that takes no longer, and is only one
    convolution away from what is kept.
    """
    while node.heavy and not node.operations and len(node.inputs) == 1:
        node = node.inputs[0]  # the activations above are cheap
    if not node.heavy:
        return
    if not _fits(node) and node.operations <= _REMADE_OPERATIONS and _is_shallow(node):
        node.remade = True
    else:
        keep(node, with_moments)


def _is_shallow(node: Map) -> bool:
    """Whether it takes one convolution, from what is kept."""
    return node.operations > 0 and not any(_is_remade(source) or source.heavy for source in node.inputs)


def _is_remade(node: Map) -> bool:
    return node.kept is None and (node.remade or any(_is_remade(source) for source in node.inputs))


def _fits(node: Map) -> bool:
    room = node.room
    spared = max(room.budget_bytes // _SPARED, node.peak_bytes(min(_LEAST_ROWS, node.length)))
    return node.nbytes + spared <= room.free_bytes


def keep(node: Map, with_moments: bool = False) -> None:
    """Make all of a map, and hold it on the device or in RAM."""
    if node.kept is not None:
        return
    filled = None
    if _fits(node):
        try:
            filled = _whole(node, with_moments) or _filled(node, True, with_moments)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            node.room.ran_out(error)
    buffer, moments = filled or _filled(node, False, with_moments)
    node.keep_as(buffer.tensor, buffer)
    node.moments = moments or node.moments


def _whole(node: Map, with_moments: bool) -> tuple[Buffer, Moments | None] | None:
    """The map in memory, made at once on the device; None where that does not fit."""
    if node.peak_bytes(node.length) > node.room.free_bytes:
        return None
    tally = Tally(node.axis) if with_moments else None
    try:
        whole = node.rows(0, node.length)
        if node.shares or not _owns_its_memory(whole):
            whole = whole.clone(memory_format=torch.contiguous_format)
        if tally:
            tally.add(whole)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        node.room.ran_out(error)
        return None
    return Buffer(node.room, whole, True), tally.total() if tally else None


def _filled(node: Map, on_device: bool, with_moments: bool) -> tuple[Buffer, Moments | None]:
    """The map in memory, made stripe by stripe."""
    room, tally = node.room, Tally(node.axis) if with_moments else None
    buffer = room.buffer(node.shape, node.dtype, node.axis, on_device)

    def take(start: int, stripe: torch.Tensor) -> None:
        room.store(buffer.tensor.narrow(node.axis, start, stripe.shape[node.axis]), stripe, node.axis)
        if tally:
            tally.add(stripe)

    _each_stripe(node, take, 0 if on_device else 1)
    return buffer, tally.total() if tally else None


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _each_stripe(node: Map, take: Callable[[int, torch.Tensor], None], copies: int = 0) -> None:
    """Make a map stripe by stripe, and have each taken, with the row it starts at; taking makes so many `copies` of it.

    What is taken stays taken: from a stripe that memory runs out in on they are lower.
    """
    room = node.room

    def peak_bytes(rows: int) -> int:
        start = (node.length - rows) // 2
        held = sum((high - low) * one.row_bytes for one, low, high in _shared(node, start, start + rows))
        return held + max(node.peak_bytes(rows), node.fresh_bytes(rows) + copies * rows * node.row_bytes)

    done, most = 0, node.length
    while done < node.length:
        left = node.length - done
        height = min(most, stripe_height(left, room.free_bytes, peak_bytes, node.grain))
        spans = [(done + above, done + below) for above, below in stripes(left, height)]
        for start, stop in room.steps(spans, node.kind):
            try:
                _take(node, take, start, stop)
            except Exception as error:
                if height == 1 or not is_out_of_memory(error):
                    raise
                room.ran_out(error)
                done, most = start, height // 2
                break
        else:
            done = node.length


def _take(node: Map, take: Callable[[int, torch.Tensor], None], start: int, stop: int) -> None:
    """One stripe. Rows in RAM that it needs more than once come once, and are held for as long as it is made."""
    held = [one.rows(low, high) for one, low, high in _shared(node, start, stop)]
    take(start, node.rows(start, stop))
    del held


def _shared(node: Map, start: int, stop: int) -> list[tuple[Map, int, int]]:
    """Which rows of which maps in RAM are needed more than once."""
    needed: dict[int, list[tuple[Map, int, int]]] = {}
    for one in node.needed(start, stop):
        needed.setdefault(id(one[0]), []).append(one)
    return [
        (found[0][0], min(low for _, low, _ in found), max(high for *_, high in found))
        for found in needed.values()
        if len(found) > 1
    ]


def find_moments(node: Map) -> Moments:
    """Mean and variance of a map over its rows and what is in them, for all dimensions before these."""
    if node.moments is None:
        tally = Tally(node.axis)
        _each_stripe(node, lambda _, stripe: tally.add(stripe))
        node.moments = tally.total()
    return node.moments


def recut(node: Map, axis: int) -> Map:
    """The same map, with its rows along another dimension."""
    if node.axis == axis:
        return node
    keep(node)
    assert node.kept is not None
    assert node.buffer is not None
    return kept_map(node.room, node.kept, axis, node.buffer)


def to_host(node: Map) -> torch.Tensor:
    """All of a map in RAM, contiguous; on the device there is a stripe of it at a time."""
    result = torch.empty(node.shape, dtype=node.dtype)

    def take(start: int, stripe: torch.Tensor) -> None:
        node.room.store(result.narrow(node.axis, start, stripe.shape[node.axis]), stripe, node.axis)

    _each_stripe(node, take, copies=1)
    return result


def to_device(node: Map) -> torch.Tensor:
    """All of a map on the device, as one tensor."""
    if node.kept is not None and node._on_device:
        return node.kept
    whole = torch.empty(node.shape, dtype=node.dtype, device=node.room.device)

    def take(start: int, stripe: torch.Tensor) -> None:
        whole.narrow(node.axis, start, stripe.shape[node.axis]).copy_(stripe)

    _each_stripe(node, take)
    return whole


def held_bytes(node: Map) -> int:
    """What is kept for a map to be made from, itself included."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.buffer is not None:
            found[id(one.buffer)] = one.buffer.nbytes
        waiting += one.inputs
    return sum(found.values())
