"""Choose which streamed weight groups come from disk, where RAM does not hold them all. Pure functions.

A step never gets faster when one more group is read. So the sets read about as little as RAM allows. They are spread
over the step, so that the disk is never idle for long.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .ring_offsets import WINDOWS

Sets: TypeAlias = npt.NDArray[np.bool_]  # one set in each row, [sets, groups]

_FEW = 8  # groups up to which all sets are tried
_LEVELS = 128  # candidate sizes of the set to read, in even steps up to all copied bytes


def windows_bytes(sizes: Sequence[int]) -> int:
    """Return the RAM in bytes of the windows through which groups of these `sizes` are read."""
    return WINDOWS * max(sizes, default=0)


def disk_choices(copied: Mapping[int, int], seconds: Sequence[float], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of groups to read from disk. RAM holds the others.

    `copied` maps the index of each streamed group to its bytes, of which RAM may hold `ram_bytes`. `seconds` are those
    of all groups. Up to `_FEW` groups, these are all sets to which RAM could add no group, fewest bytes first. Beyond
    that, the first set reads just enough, and is a subset of the first set for less RAM. The others keep the disk
    evenly busy. Their sizes do not depend on the RAM, and grow to within one group.
    """
    missing = sum(copied.values()) - ram_bytes
    if len(copied) <= _FEW:
        yield from sorted(_all_choices(copied, ram_bytes), key=lambda read: sum(copied[i] for i in read))
        return
    chosen: list[int] = []
    left = missing
    for i in spread(list(copied), seconds):
        if left <= 0:
            break
        chosen.append(i)
        left -= copied[i]
    yield tuple(sorted(chosen))
    if missing <= 0:
        return
    total = sum(copied.values())
    levels = range(_LEVELS * missing // total, _LEVELS + 1)
    for row in _evenly(copied, seconds, [total * level / _LEVELS for level in levels]):
        read = tuple(np.flatnonzero(row).tolist())
        if sum(copied[i] for i in read) >= missing:
            yield read


def _evenly(copied: Mapping[int, int], seconds: Sequence[float], nbytes: Sequence[float]) -> Sets:
    """Return rows of about `nbytes` each, spread in proportion to the seconds: bools `[nbytes, groups]`."""
    rates = np.array(nbytes)[:, None] / (sum(seconds) or len(seconds))
    costs = [copied.get(i, 0) for i in range(len(seconds))]
    return paid(rates * (seconds if any(seconds) else [1.0] * len(seconds)), costs)


def paid(income: npt.NDArray[np.float64], costs: Sequence[float], most: npt.ArrayLike = math.inf) -> Sets:
    """Return for each row the groups that it takes, spread as evenly as its income: bools of `[rows, groups]`.

    This is error diffusion. A row earns `income[row, i]` at group i, and saves at most `most`. It takes a group as soon
    as it has half of the cost, and pays the whole: its savings may fall below 0. A group that costs nothing is never
    taken.
    """
    saved, taken = np.zeros(len(income)), np.zeros(income.shape, bool)
    for i, cost in enumerate(costs):
        saved = np.minimum(most, saved + income[:, i])
        if cost:
            taken[:, i] = saved >= cost / 2
            saved -= cost * taken[:, i]
    return taken


def _all_choices(copied: Mapping[int, int], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield every set of groups to read that leaves no room in RAM for one of them."""
    sizes = list(copied.items())
    for held in range(1 << len(sizes)):
        room = ram_bytes - sum(size for k, (_, size) in enumerate(sizes) if held >> k & 1)
        read = [(i, size) for k, (i, size) in enumerate(sizes) if not held >> k & 1]
        if room >= 0 and all(size > room for _, size in read):
            yield tuple(i for i, _ in read)


def spread(indices: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return `indices` in an order in which the first n, for any n, are spread evenly over a step.

    The order is the low-discrepancy sequence of van der Corput, applied to the times at which the groups run. Without
    seconds it goes by the index.
    """
    total = sum(seconds)
    ends = list(accumulate(seconds))
    by_time = total > 0
    left = [((ends[i] - seconds[i] / 2) / total if by_time else i / len(seconds), i) for i in sorted(indices)]
    found = []
    turn = 0
    while left:
        k = bisect_left(left, (_van_der_corput(turn), -1)) % len(left)
        found.append(left.pop(k)[1])
        turn += 1
    return found


@functools.cache
def _van_der_corput(number: int) -> float:
    """Return the element `number` of the sequence in base 2: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    value, unit = 0.0, 0.5
    while number:
        value += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return value


def held_in_ram(
    sizes: Sequence[int], copied: Collection[int], from_disk: Collection[int], ram_bytes: int
) -> frozenset[int]:
    """Return the groups to hold in RAM: first streamed groups that are not read, then resident ones as far as they fit.

    The copy of a resident group is read only once, but it saves a read if the group is evicted and comes back.
    """
    read, passing = set(from_disk), set(copied)
    needed = [i for i in copied if i not in read]
    room = ram_bytes - windows_bytes(sizes) - sum(sizes[i] for i in needed)
    held = set(needed)
    for i, size in enumerate(sizes):
        if i not in passing and size <= room:
            held.add(i)
            room -= size
    return frozenset(held)
