"""Decide which lazy tensors are materialized or made again, and where their rows go.

See [Note: Stripe materialization] in `lazy_tensor`.
"""

from __future__ import annotations

import torch

from ..errors import is_out_of_memory
from ..planning.stripes import device_rows, is_cheaper_made
from .arena import Buffer
from .filling import AsOne, InBlocks, owns_its_memory
from .lazy_tensor import LazyTensor, materialized_tensor
from .passes import each_stripe, stripe_bytes
from .rows import RowBlock, Rows
from .running_variance import MeanVariance, RunningVariance

_DEEPEST = 2  # convolutions in a row that are made again; each one more widens the halo of a stripe
_LEAST_ROWS = 8  # of the tensor being made, for which device memory is left free
_SPARED = 3  # 1/3 of the budget stays free for stripes
_SPARED_BESIDE_BLOCKS = 8  # 1/8, beside a tensor in blocks


def settle(node: LazyTensor, with_statistics: bool = False) -> None:
    """Make the rows of a lazy tensor cheap to read more than once: materialize it, or mark it to be made again.

    Only convolutions and products count as expensive. A tensor of at most `_DEEPEST` of these in a row is made again
    if that takes less time than to move its bytes to RAM and back. Sums, which end skip connections, are always
    materialized.
    """
    while node.heavy and not node.operations and len(node.inputs) == 1:
        node = node.inputs[0]  # activations above it are cheap
    if not node.heavy:
        return
    operations, depth = _making(node)
    later = (
        node.operations * node.nbytes / node.dtype.itemsize
    )  # operations of the reader: about those of the last layer
    # If not all rows stay on the device, all bytes count as moved: rows that stay displace those of others.
    moved = 0 if _staying(node) == node.length else node.nbytes
    cheaper = is_cheaper_made(operations, later, moved, node.arena.operations_per_byte)
    if 0 < depth <= _DEEPEST and node.operations and cheaper:
        node.remade = True
    else:
        materialize(node, with_statistics)


def _making(node: LazyTensor, known: dict[LazyTensor, tuple[float, int]] | None = None) -> tuple[float, int]:
    """Return the operations to make all rows from materialized ones, and the depth: the convolutions in a row."""
    known = {} if known is None else known
    if node.memory is not None:
        return 0.0, 0
    if node not in known:
        found = [_making(source, known) for source in node.inputs]
        own = node.operations * node.nbytes / node.dtype.itemsize
        deepest = max((depth for _, depth in found), default=0)
        known[node] = own + sum(operations for operations, _ in found), deepest + (node.operations > 0)
    return known[node]


def _staying(node: LazyTensor) -> int:
    """Return how many rows would lie on the device if the tensor were materialized now."""
    arena = node.arena
    if not _is_picture(node):
        spared = max(arena.budget_bytes // _SPARED, node.passing_bytes(min(_LEAST_ROWS, node.length)))
        return node.length if node.nbytes + spared <= arena.free_bytes else 0
    leaving = [*dying_sources(node), *rejoined_sources(node)]
    ends = sum(one.memory.device_bytes for one in leaving if one.memory is not None)
    return device_rows(node.length, node.row_bytes, arena.free_bytes + ends - _for_stripes(node))


def _is_picture(node: LazyTensor) -> bool:
    """Return whether it may lie in blocks: [B,C,H,W] with rows along H."""
    return len(node.shape) == 4 and node.axis == 2


def _for_stripes(node: LazyTensor) -> int:
    rows = min(_LEAST_ROWS, node.length)
    return max(node.arena.budget_bytes // _SPARED_BESIDE_BLOCKS, stripe_bytes(node, rows, 1))


def materialize(node: LazyTensor, with_statistics: bool = False, as_one: bool = False) -> None:
    """Make all rows and hold them on the device or in RAM; `as_one` makes them one tensor, which the host may read."""
    if node.memory is None:
        for one in _read_again(node):
            materialize(one)
        memory, statistics = _materialized(node, with_statistics, as_one)
        node.made_from.update(materialized_sources(node))
        node.materialize_as(memory)
        node.statistics = statistics or node.statistics
    if as_one:
        if node.materialized is None:
            node.materialize_as(_filled(node, 0, False)[0])
        node.arena.copy_streams.finish()


def _materialized(node: LazyTensor, with_statistics: bool, as_one: bool) -> tuple[Rows, MeanVariance | None]:
    staying = _staying(node)
    if as_one and staying < node.length:
        staying = 0
    if staying:
        try:
            whole = _whole(node, with_statistics) if staying == node.length else None
            return whole or _filled(node, staying, with_statistics, as_one)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            node.arena.ran_out(error)
    return _filled(node, 0, with_statistics)


def _whole(node: LazyTensor, with_statistics: bool) -> tuple[Rows, MeanVariance | None] | None:
    """Make all rows in one stripe on the device. Return them and their statistics, or None if that does not fit."""
    if stripe_bytes(node, node.length) > node.arena.free_bytes:
        return None
    running = RunningVariance(node.axis) if with_statistics else None
    made: list[torch.Tensor] = []

    def take(_: int, whole: torch.Tensor) -> None:
        made.append(whole if owns_its_memory(whole, node) else whole.clone(memory_format=torch.contiguous_format))
        if running:
            running.add(whole)

    try:
        each_stripe(node, take)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        made.clear()
        node.arena.ran_out(error)
        return None
    if len(made) > 1:  # memory ran out, and the pass went on in several stripes
        return None
    whole = Buffer(node.arena, made[0], True)
    return Rows(node.axis, [RowBlock(0, node.length, made[0], whole)]), running.total() if running else None


def _filled(
    node: LazyTensor, staying: int, with_statistics: bool, as_one: bool = False
) -> tuple[Rows, MeanVariance | None]:
    """Make all rows stripe by stripe, `staying` of them on the device. Return them and their statistics.

    Pictures lie in blocks, with a share of each stripe on the device. Other tensors are one tensor in either place.
    """
    running = RunningVariance(node.axis) if with_statistics else None
    in_blocks = bool(staying) and not as_one and _is_picture(node)
    dying, spilled = (dying_sources(node), rejoined_sources(node)) if in_blocks else ([], [])
    spared = _for_stripes(node) if in_blocks else None
    filling = InBlocks(node, staying, spared) if spared is not None else AsOne(node, bool(staying))

    def take(start: int, stripe: torch.Tensor) -> None:
        if running:
            running.add(stripe)
        filling.put(start, stripe)

    each_stripe(node, take, 0 if filling.on_device else 1, spared, dying, spilled, filling.relieve)
    return filling.memory, running.total() if running else None


def find_statistics(node: LazyTensor) -> MeanVariance:
    """Return mean and variance over the rows and all dimensions behind them, made by a pass if not known."""
    if node.statistics is None:
        running = RunningVariance(node.axis)
        each_stripe(node, lambda _, stripe: running.add(stripe))
        node.statistics = running.total()
    return node.statistics


def recut(node: LazyTensor, axis: int) -> LazyTensor:
    """Return the same tensor with its rows along dimension `axis`. It is materialized as one tensor for that."""
    if node.axis == axis:
        return node
    materialize(node, as_one=True)
    assert node.materialized is not None
    assert node.buffer is not None
    return materialized_tensor(node.arena, node.materialized, axis, node.buffer)


def to_host(node: LazyTensor) -> torch.Tensor:
    """Return a contiguous tensor of all rows in RAM. Only one stripe of it at a time lies on the device."""
    result = torch.empty(node.shape, dtype=node.dtype)

    def take(start: int, stripe: torch.Tensor) -> None:
        node.arena.store(result.narrow(node.axis, start, stripe.shape[node.axis]), stripe, node.axis)

    each_stripe(node, take, copies=1)
    node.arena.copy_streams.finish()
    return result


def to_device(node: LazyTensor) -> torch.Tensor:
    """Return all rows on the device as one tensor. The caller must not write to it."""
    if node.materialized is not None and node.memory is not None and node.memory.is_whole:
        return node.materialized
    whole = torch.empty(node.shape, dtype=node.dtype, device=node.arena.device)

    def take(start: int, stripe: torch.Tensor) -> None:
        whole.narrow(node.axis, start, stripe.shape[node.axis]).copy_(stripe)

    each_stripe(node, take)
    return whole


def held_bytes(node: LazyTensor) -> int:
    """Return the bytes of the materialized tensors that a tensor is made from, itself included."""
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


# Which materialized tensors are not read again, or hardly so, once the present one has been made from them


def _inside(node: LazyTensor) -> list[LazyTensor]:
    """Return a tensor and all that it is made from, down to materialized tensors."""
    found: dict[LazyTensor, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting += one.inputs
    return list(found)


def _read_again(node: LazyTensor) -> list[LazyTensor]:
    """Return the sums that a tensor is made from and the caller holds, as where a skip connection begins."""
    inside = reversed(_inside(node)[1:])
    return [one for one in inside if one.heavy and not one.operations and len(one.inputs) > 1 and one.is_held]


def materialized_sources(node: LazyTensor) -> list[LazyTensor]:
    """Return the materialized tensors that a tensor is made from."""
    return [one for one in _inside(node) if one.memory is not None and one is not node]


def dying_sources(node: LazyTensor) -> list[LazyTensor]:
    """Return the materialized sources that nothing else will be made from. Their rows are freed while `node` is made.

    A source may yet be read while the caller holds a `StripedTensor` of it, or of a tensor made from it.
    """
    inside = _inside(node)
    known: dict[LazyTensor, bool] = {node: True}
    again = {source for one in inside for whole in one.wholly for source in (whole, *materialized_sources(whole))}
    return [one for one in materialized_sources(node) if one not in again and _only_here(one, known, set(inside))]


def _only_here(one: LazyTensor, known: dict[LazyTensor, bool], inside: set[LazyTensor]) -> bool:
    """Return whether only tensors `inside` read `one`, directly or indirectly. `known` caches earlier results."""
    if one not in known:
        followers = list(one.followers)
        known[one] = not one.is_held and all(each in inside and _only_here(each, known, inside) for each in followers)
    return known[one]


def rejoined_sources(node: LazyTensor) -> list[LazyTensor]:
    """Return the materialized tensors at which a skip connection ending in `node` began, without dying ones.

    The caller's variable holds such a tensor until the block returns its result, and as a rule does not read it again.
    So its rows are moved to RAM.
    """
    inside, sources = _inside(node), materialized_sources(node)
    if any(one.wholly for one in inside):
        return []
    dying = set(dying_sources(node))
    forks = [one for one in inside if sum(each in inside for each in one.followers) > 1]
    under = {source for fork in forks for source in (fork, *materialized_sources(fork))}
    return [
        one
        for one in sources
        if one not in dying and (one in under or any(one in other.made_from for other in sources))
    ]
