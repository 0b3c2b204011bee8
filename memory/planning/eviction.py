"""Which units leave when room is short. Pure functions: sizes and future uses in, names out.

Evicting costs nothing (the host copy is the truth), so what counts is the bytes that have to be loaded again. When
the running graph tells the coming uses, the choice is the one that reloads fewest bytes (Belady's rule, which for
units of unequal size takes a search); when it does not, the least recently used go first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)

# The search is exponential in the units that compete for room; a graph seldom has more than this many.
EXACT_UNITS = 9
EXACT_USES = 32


@dataclass(frozen=True)
class Use:
    """A coming run of one unit: its weights, and what it needs beside them, in bytes."""

    unit: Hashable
    size_bytes: int
    working_bytes: int = 0


def choose_evictions(
    resident: Mapping[Key, int],
    capacity_bytes: int,
    wanted: Use,
    future: Sequence[Use] | None = None,
    cached: Set[Key] = frozenset(),
) -> list[Key]:
    """Units to evict so that `wanted` fits.

    `resident` maps the units that may leave to their bytes on the device, least recently used first;
    `capacity_bytes` is what they and `wanted` may hold together. `future` is what runs after `wanted`, in order, or
    None when unknown. The `cached`, which nobody refers to, leave before any other does. If even an empty device is too
    small, all of them leave.
    """
    room_bytes = capacity_bytes - wanted.size_bytes - wanted.working_bytes
    others = {unit: size for unit, size in resident.items() if unit != wanted.unit}
    leaving: list[Key] = []
    for unit in [unit for unit in others if unit in cached]:
        if sum(others.values()) > room_bytes:
            leaving.append(unit)
            del others[unit]
    if sum(others.values()) <= room_bytes:
        return leaving
    keep: Set[Key]
    if future is None:
        keep = _keep_most_recent(list(reversed(others)), others, room_bytes)
    elif len(others | {use.unit: 0 for use in future}) <= EXACT_UNITS:
        keep = _keep_cheapest(others, capacity_bytes, room_bytes, wanted, future[:EXACT_USES])
    else:
        keep = _keep_most_recent(_by_next_use(others, future), others, room_bytes)
    return leaving + [unit for unit in others if unit not in keep]


def choose_shrinks(
    resident: Mapping[Key, int], capacity_bytes: int, wanted: Use, future: Sequence[Use] | None = None
) -> dict[Key, int]:
    """The bytes that units must give up so that `wanted` fits, where a part of a unit may leave. As `choose_evictions`.

    Of what can be divided, letting go of the bytes whose next use is farthest reloads fewest of them (Belady).
    """
    others = {unit: size for unit, size in resident.items() if unit != wanted.unit}
    missing = sum(others.values()) - (capacity_bytes - wanted.size_bytes - wanted.working_bytes)
    leaving = list(others) if future is None else list(reversed(_by_next_use(list(reversed(others)), future)))
    found: dict[Key, int] = {}
    for unit in leaving:
        if missing > 0:
            found[unit] = min(others[unit], missing)
            missing -= found[unit]
    return found


def _keep_most_recent(preferred: Sequence[Key], sizes: Mapping[Key, int], room_bytes: int) -> set[Key]:
    keep: set[Key] = set()
    for unit in preferred:
        if sizes[unit] <= room_bytes:
            keep.add(unit)
            room_bytes -= sizes[unit]
    return keep


def _by_next_use(units: Iterable[Key], future: Sequence[Use]) -> list[Key]:
    """Nearest next use first; units that are not used again come last, in the order given."""
    next_use = {use.unit: i for i, use in reversed(list(enumerate(future)))}
    return sorted(units, key=lambda unit: next_use.get(unit, len(future)))


def _fitting(sizes: Mapping[Any, int], room_bytes: int) -> Iterator[frozenset]:
    """Subsets that fit and to which nothing more can be added. Keeping more never costs, so the rest need no look."""
    if sum(sizes.values()) <= room_bytes:
        yield frozenset(sizes)
        return
    found: list[frozenset] = []
    for count in range(len(sizes) - 1, -1, -1):
        for subset in map(frozenset, combinations(sizes, count)):
            if sum(sizes[u] for u in subset) <= room_bytes and not any(subset < larger for larger in found):
                found.append(subset)
                yield subset


def _keep_cheapest(
    others: Mapping[Key, int], capacity_bytes: int, room_bytes: int, wanted: Use, future: Sequence[Use]
) -> frozenset:
    sizes: dict[Any, int] = {use.unit: use.size_bytes for use in future}
    sizes |= {wanted.unit: wanted.size_bytes} | dict(others)

    @cache
    def reload_bytes(step: int, held: frozenset) -> int:
        """Fewest bytes loaded from `step` on, when `held` is on the device before it."""
        if step == len(future):
            return 0
        use = future[step]
        room = capacity_bytes - use.size_bytes - use.working_bytes
        load = 0 if use.unit in held else use.size_bytes
        rest = {unit: sizes[unit] for unit in held if unit != use.unit}
        return load + min(reload_bytes(step + 1, keep | {use.unit}) for keep in _fitting(rest, max(0, room)))

    recency = {unit: i for i, unit in enumerate(others)}
    return min(
        _fitting(others, max(0, room_bytes)),
        key=lambda keep: (
            reload_bytes(0, keep | {wanted.unit}),
            -sum(others[unit] for unit in keep),
            -sum(recency[unit] for unit in keep),
        ),
    )
