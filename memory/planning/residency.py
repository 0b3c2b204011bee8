"""Which blocks of a module stream through the ring, and which stay. Pure functions: no device, no weights touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

RING_SLOTS = 2  # more gain nothing when residency is spread
WINDOWS = 3  # one more than blocks can be asked for at a time: another can then always be read


class HasSizes(Protocol):
    """A block, or what is known of one."""

    @property
    def packed_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int: ...


class BlockSize(NamedTuple):
    """A block's weights: in its flat buffer, with the gaps that this has, and without."""

    packed_bytes: int
    held_bytes: int


def ring_bytes(blocks: Iterable[HasSizes], slots: int = RING_SLOTS) -> int:
    """What the ring takes on the device: its slots are as large as the largest block."""
    return slots * max((block.packed_bytes for block in blocks), default=0)


def least_streamed_bytes(fixed_bytes: int, blocks: Sequence[HasSizes]) -> int:
    """The least on the device that weights can be streamed in: all of them if there are no blocks."""
    return fixed_bytes + min(ring_bytes(blocks), sum(block.held_bytes for block in blocks))


def blocks_to_stream(fixed_bytes: int, blocks: Sequence[HasSizes], budget_bytes: int) -> list[int]:
    """The blocks that must stream so that all weights on the device keep a budget, as indices in order.

    On the device are `fixed_bytes` outside the blocks, those blocks that stay, and the ring if any streams.
    """
    if fixed_bytes + sum(block.held_bytes for block in blocks) <= budget_bytes:
        return []
    return streamed_blocks([block.packed_bytes for block in blocks], budget_bytes - fixed_bytes - ring_bytes(blocks))


def streamed_blocks(block_bytes: Sequence[int], resident_bytes: int) -> list[int]:
    """The blocks that must stream so that the others hold at most `resident_bytes`, as indices in order.

    They are spread by seconds of transfer, not bunched: between two copies there is then always work to hide them
    behind. Of N equal blocks, s of them streamed, block i streams iff floor((i+1)*s/N) > floor(i*s/N).
    """
    total = sum(block_bytes)
    least = total - max(0, resident_bytes)
    if least <= 0:
        return []

    def fits(goal_bytes: int) -> bool:
        return sum(block_bytes[i] for i in _spread(block_bytes, goal_bytes)) >= least

    # The smallest goal that frees enough: streaming whole blocks, the spread ends up to one block short of its goal.
    low, high = least, total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return _trimmed(block_bytes, _spread(block_bytes, low), least)


def _spread(block_bytes: Sequence[int], goal_bytes: int) -> list[int]:
    """Error diffusion: each block earns its share of the goal, and streams once its whole size has been earned."""
    total = sum(block_bytes)
    chosen, earned = [], 0
    for i, size in enumerate(block_bytes):
        earned += size * goal_bytes
        if size and earned >= size * total:
            earned -= size * total
            chosen.append(i)
    return chosen


def _trimmed(block_bytes: Sequence[int], chosen: list[int], least: int) -> list[int]:
    """Without the blocks that need not stream after all, largest first. Equal blocks never have one."""
    spare = sum(block_bytes[i] for i in chosen) - least
    kept = set(chosen)
    for i in sorted(chosen, key=lambda i: -block_bytes[i]):
        if block_bytes[i] <= spare:
            spare -= block_bytes[i]
            kept.discard(i)
    return sorted(kept)
