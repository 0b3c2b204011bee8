"""Where ComfyUI puts the weights of a MODEL that has no dynamic VRAM: its own rules, on sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A module with weights, in bytes as they are stored.

    At each use from RAM the host expects it to take `beside` besides, in another type or for its LoRAs, which is
    `unexpected` too little. `at_use` is what it takes besides just before its product, `kept` meanwhile. `merging` is
    what it takes while its patches are merged, when it is loaded; 0 if it has none.
    """

    name: str
    bytes: int
    beside: int = 0
    unexpected: int = 0
    at_use: int = 0
    kept: int = 0
    merging: int = 0

    @property
    def _rank(self) -> tuple[int, int, str]:
        return self.bytes + self.beside, self.bytes, self.name


@dataclass(frozen=True)
class Placing:
    """The parts that stay in VRAM, by index, and the buffers in bytes that the host reserves for the others."""

    held: frozenset[int]
    buffer_bytes: int = 0


def in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts in the order in which the host loads them: those first that are worst to pass through."""
    return tuple(sorted(parts, key=lambda part: part._rank, reverse=True))


def loaded(parts: Sequence[Part], room_bytes: float, streams: int) -> Placing:
    """Return what the host loads where so much is free for weights.

    It takes each part that fits beside the buffers: one part, with what it takes besides, and one for each of the
    `streams` of copies.
    """
    if sum(part.bytes for part in parts) < room_bytes:
        return Placing(frozenset(range(len(parts))))
    held, taken, buffers = set(), 0, 0
    for i, part in enumerate(parts):
        wanted = max(buffers, part.beside + sum(each.bytes for each in parts[i : i + 1 + streams]))
        if taken + part.bytes + wanted < room_bytes:
            held.add(i)
            taken += part.bytes
        else:
            buffers = wanted
    return Placing(frozenset(held), buffers)


def unloaded(parts: Sequence[Part], placing: Placing, wanted_bytes: int, streams: int) -> Placing:
    """Return what is left where the host is asked for so much: the last that it would load leave first."""
    held, freed, buffers = set(placing.held), 0, placing.buffer_bytes
    beside = [min(buffers / (streams + 1), parts[-1].bytes)] * streams
    for i in sorted(held, reverse=True):
        if wanted_bytes + buffers - placing.buffer_bytes < freed:
            break
        held.discard(i)
        freed += parts[i].bytes
        buffers = max(buffers, int(parts[i].bytes + parts[i].beside + sum(beside)))
        beside = [*beside, parts[i].bytes][1:] if beside else []
    return Placing(frozenset(held), buffers)


def shrunk(parts: Sequence[Part], placing: Placing, target_bytes: int, streams: int) -> Placing:
    """Return what stays when weights and buffers are to take no more than so much."""
    while placing.held and (over := taken_bytes(parts, placing) - target_bytes) > 0:
        placing = unloaded(parts, placing, over, streams)
    return placing


def loading_bytes(parts: Sequence[Part], placing: Placing) -> int:
    """Return the peak while the host loads: it merges patches into weights one by one, the largest first."""
    held = sorted((parts[i] for i in placing.held), key=lambda part: part.bytes, reverse=True)
    total = most = 0
    for part in held:
        if part.merging:
            most = max(most, total + part.merging)
            total += part.bytes
    return max(most, sum(part.bytes for part in held))


def taken_bytes(parts: Sequence[Part], placing: Placing) -> int:
    """Weights that stay, and buffers for the others with their LoRAs."""
    unexpected = max((part.unexpected for i, part in enumerate(parts) if i not in placing.held), default=0)
    return sum(parts[i].bytes for i in placing.held) + placing.buffer_bytes + unexpected


def batches_expected(wanted_bytes: float, one_bytes: float, more_bytes: float) -> int:
    """Return the number of batches for which the host expects activations of `wanted_bytes`, and no more."""
    return 1 + int(max(0, wanted_bytes - one_bytes) // more_bytes) if more_bytes > 0 else 1
