"""When a map is made and kept: on the device as far as it fits in the budget, the rest in RAM; or made again."""

from __future__ import annotations

import torch

from ..errors import is_out_of_memory
from ..planning.stripes import device_rows, is_cheaper_made
from .arena import Buffer
from .filling import AsOne, InBlocks, owns_its_memory
from .lazy_tensor import Map, kept_map
from .passes import each_stripe, stripe_bytes
from .rows import RowBlock, Rows
from .running_variance import Moments, Tally

_DEEPEST = 2  # convolutions one after the other that are made again: with more, stripes have too much of a margin
_LEAST_ROWS = 8  # of the map at hand, that the device must have room for beside what is put there
_SPARED = 3  # one part of the budget in so many stays for stripes
_SPARED_BESIDE_PIECES = 8  # and beside maps that lie in blocks


def settle(node: Map, with_moments: bool = False) -> None:
    """See to it that rows of a map are cheap to make, as whoever reads some of them more than once needs it.

    What is expensive is kept, and sums, which skip connections end in: all that follows is made from these. Another
    map that would go to RAM is made again instead where that takes less.
    """
    while node.heavy and not node.operations and len(node.inputs) == 1:
        node = node.inputs[0]  # the activations above are cheap
    if not node.heavy:
        return
    operations, depth = _making(node)
    later = node.operations * node.nbytes / node.dtype.itemsize  # of what follows: about what the last layer takes
    # What does not stay whole moves all of its bytes: the rows that do stay take the room of others'.
    moved = 0 if _staying(node) == node.length else node.nbytes
    cheaper = is_cheaper_made(operations, later, moved, node.room.operations_per_byte)
    if 0 < depth <= _DEEPEST and node.operations and cheaper:
        node.remade = True
    else:
        keep(node, with_moments)


def _making(node: Map, known: dict[Map, tuple[float, int]] | None = None) -> tuple[float, int]:
    """Operations to make all of a map from what is kept, and how many layers that do any lie one after the other."""
    known = {} if known is None else known
    if node.memory is not None:
        return 0.0, 0
    if node not in known:
        found = [_making(source, known) for source in node.inputs]
        own = node.operations * node.nbytes / node.dtype.itemsize
        deepest = max((depth for _, depth in found), default=0)
        known[node] = own + sum(operations for operations, _ in found), deepest + (node.operations > 0)
    return known[node]


def _staying(node: Map) -> int:
    """Return how many rows of a map would lie on the device, were it kept."""
    room = node.room
    if not _is_picture(node):
        spared = max(room.budget_bytes // _SPARED, node.passing_bytes(min(_LEAST_ROWS, node.length)))
        return node.length if node.nbytes + spared <= room.free_bytes else 0
    leaving = [*dying_sources(node), *rejoined_sources(node)]
    ends = sum(one.memory.device_bytes for one in leaving if one.memory is not None)
    return device_rows(node.length, node.row_bytes, room.free_bytes + ends - _for_stripes(node))


def _is_picture(node: Map) -> bool:
    """Return whether it may lie in blocks: nobody takes its rows for anything else."""
    return len(node.shape) == 4 and node.axis == 2


def _for_stripes(node: Map) -> int:
    rows = min(_LEAST_ROWS, node.length)
    return max(node.room.budget_bytes // _SPARED_BESIDE_PIECES, stripe_bytes(node, rows, 1))


def keep(node: Map, with_moments: bool = False, as_one: bool = False) -> None:
    """Make all of a map, and hold it on the device or in RAM; `as_one` tensor, which the host may read."""
    if node.memory is None:
        memory, moments = _kept(node, with_moments, as_one)
        node.made_from.update(kept_sources(node))
        node.keep_as(memory)
        node.moments = moments or node.moments
    if as_one:
        if node.kept is None:
            node.keep_as(_filled(node, 0, False)[0])
        node.room.lanes.finish()


def _kept(node: Map, with_moments: bool, as_one: bool) -> tuple[Rows, Moments | None]:
    staying = _staying(node)
    if as_one and staying < node.length:
        staying = 0
    if staying:
        try:
            whole = _whole(node, with_moments) if staying == node.length else None
            return whole or _filled(node, staying, with_moments, as_one)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            node.room.ran_out(error)
    return _filled(node, 0, with_moments)


def _whole(node: Map, with_moments: bool) -> tuple[Rows, Moments | None] | None:
    """Return the map in memory, made at once on the device; None where that does not fit."""
    if stripe_bytes(node, node.length) > node.room.free_bytes:
        return None
    tally = Tally(node.axis) if with_moments else None
    made: list[torch.Tensor] = []

    def take(_: int, whole: torch.Tensor) -> None:
        made.append(whole if owns_its_memory(whole, node) else whole.clone(memory_format=torch.contiguous_format))
        if tally:
            tally.add(whole)

    try:
        each_stripe(node, take)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        made.clear()
        node.room.ran_out(error)
        return None
    if len(made) > 1:  # memory ran out on the way
        return None
    whole = Buffer(node.room, made[0], True)
    return Rows(node.axis, [RowBlock(0, node.length, made[0], whole)]), tally.total() if tally else None


def _filled(node: Map, staying: int, with_moments: bool, as_one: bool = False) -> tuple[Rows, Moments | None]:
    """Return the map in memory, made stripe by stripe, `staying` rows on the device.

    Of pictures a part of each stripe.
    """
    tally = Tally(node.axis) if with_moments else None
    in_blocks = bool(staying) and not as_one and _is_picture(node)
    dying, spilled = (dying_sources(node), rejoined_sources(node)) if in_blocks else ([], [])
    spared = _for_stripes(node) if in_blocks else None
    filling = InBlocks(node, staying, spared) if spared is not None else AsOne(node, bool(staying))

    def take(start: int, stripe: torch.Tensor) -> None:
        if tally:
            tally.add(stripe)
        filling.put(start, stripe)

    each_stripe(node, take, 0 if filling.on_device else 1, spared, dying, spilled, filling.relieve)
    return filling.memory, tally.total() if tally else None


def find_moments(node: Map) -> Moments:
    """Mean and variance of a map over its rows and what is in them, for all dimensions before these."""
    if node.moments is None:
        tally = Tally(node.axis)
        each_stripe(node, lambda _, stripe: tally.add(stripe))
        node.moments = tally.total()
    return node.moments


def recut(node: Map, axis: int) -> Map:
    """Return the same map, with its rows along another dimension."""
    if node.axis == axis:
        return node
    keep(node, as_one=True)
    assert node.kept is not None
    assert node.buffer is not None
    return kept_map(node.room, node.kept, axis, node.buffer)


def to_host(node: Map) -> torch.Tensor:
    """All of a map in RAM, contiguous; on the device there is a stripe of it at a time."""
    result = torch.empty(node.shape, dtype=node.dtype)

    def take(start: int, stripe: torch.Tensor) -> None:
        node.room.store(result.narrow(node.axis, start, stripe.shape[node.axis]), stripe, node.axis)

    each_stripe(node, take, copies=1)
    node.room.lanes.finish()
    return result


def to_device(node: Map) -> torch.Tensor:
    """All of a map on the device, as one tensor."""
    if node.kept is not None and node.memory is not None and node.memory.is_whole:
        return node.kept
    whole = torch.empty(node.shape, dtype=node.dtype, device=node.room.device)

    def take(start: int, stripe: torch.Tensor) -> None:
        whole.narrow(node.axis, start, stripe.shape[node.axis]).copy_(stripe)

    each_stripe(node, take)
    return whole


def held_bytes(node: Map) -> int:
    """Return what is kept for a map to be made from, itself included."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.memory is not None:
            found |= {id(block.buffer): block.buffer.nbytes for block in one.memory.blocks}
        waiting += one.inputs
    return sum(found.values())


# Which kept maps will not be asked for again, or hardly so, once the map at hand is made from them


def _inside(node: Map) -> list[Map]:
    """Return a map and what it is made from, down to maps that are kept."""
    found: dict[Map, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting += one.inputs
    return list(found)


def kept_sources(node: Map) -> list[Map]:
    """Return the kept maps that a map is made from."""
    return [one for one in _inside(node) if one.memory is not None and one is not node]


def dying_sources(node: Map) -> list[Map]:
    """Return the kept maps that nothing else will be made from. Their rows may go as this one is made.

    A map may yet be asked for while a tensor of the caller's is that map, or one that follows from it.
    """
    inside = _inside(node)
    known: dict[Map, bool] = {node: True}
    again = {source for one in inside for whole in one.wholly for source in (whole, *kept_sources(whole))}
    return [one for one in kept_sources(node) if one not in again and _only_here(one, known, set(inside))]


def _only_here(one: Map, known: dict[Map, bool], inside: set[Map]) -> bool:
    """Return whether only maps `inside` ask for a map, and for each of those too; `known` has earlier results."""
    if one not in known:
        followers = list(one.followers)
        known[one] = not one.is_held and all(each in inside and _only_here(each, known, inside) for each in followers)
    return known[one]


def rejoined_sources(node: Map) -> list[Map]:
    """Return the maps where a skip connection began that ends in this map, save dying ones.

    The caller has such a map at hand until it is given the block's result, and as a rule has no more use for it: its
    rows are better in RAM.
    """
    inside, sources = _inside(node), kept_sources(node)
    if any(one.wholly for one in inside):
        return []
    dying = set(dying_sources(node))
    forks = [one for one in inside if sum(each in inside for each in one.followers) > 1]
    under = {source for fork in forks for source in (fork, *kept_sources(fork))}
    return [
        one
        for one in sources
        if one not in dying and (one in under or any(one in other.made_from for other in sources))
    ]
