"""Which of the groups that stream come from disk, where RAM does not hold them all. Pure functions.

A step is never faster for one more group that is read, so that about as few are read as RAM allows; and they are
spread, so that the disk is never idle for long.
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

Sets: TypeAlias = npt.NDArray[np.bool_]  # one in each row, [sets, groups]

_FEW = 8  # groups, of which all choices are looked at
_LEVELS = 128  # of how much is read


def windows_bytes(sizes: Sequence[int]) -> int:
    """RAM for the windows that groups of these sizes are read through."""
    return WINDOWS * max(sizes, default=0)


def disk_choices(copied: Mapping[int, int], seconds: Sequence[float], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of groups to read, fewest bytes first. RAM holds the others, and could hold no group more.

    `copied` are the bytes of each group that streams, by index, of which RAM may hold `ram_bytes`; `seconds` is how
    long each of all groups takes. Of more than a few groups the first set is in that of less RAM; the others, which
    keep the disk as busy at any time, are of so many bytes or more that do not depend on the RAM, to a group.
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
    """Rows of about so many bytes, in each part of the time as many as in another as long as it."""
    rates = np.array(nbytes)[:, None] / (sum(seconds) or len(seconds))
    costs = [copied.get(i, 0) for i in range(len(seconds))]
    return paid(rates * (seconds if any(seconds) else [1.0] * len(seconds)), costs)


def paid(income: npt.NDArray[np.float64], costs: Sequence[float], most: npt.ArrayLike = math.inf) -> Sets:
    """Return for each row which groups it takes, spread as evenly as its income: bools of `[rows, groups]`.

    A row earns `income[row, i]` at group i, and saves `most` at a time. It takes a group as soon as it has half of the
    cost, and pays. A group that costs nothing is never taken.
    """
    saved, taken = np.zeros(len(income)), np.zeros(income.shape, bool)
    for i, cost in enumerate(costs):
        saved = np.minimum(most, saved + income[:, i])
        if cost:
            taken[:, i] = saved >= cost / 2
            saved -= cost * taken[:, i]
    return taken


def _all_choices(copied: Mapping[int, int], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    sizes = list(copied.items())
    for held in range(1 << len(sizes)):
        room = ram_bytes - sum(size for k, (_, size) in enumerate(sizes) if held >> k & 1)
        read = [(i, size) for k, (i, size) in enumerate(sizes) if not held >> k & 1]
        if room >= 0 and all(size > room for _, size in read):
            yield tuple(i for i, _ in read)


def spread(indices: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the indices in such an order that any number of them, from the first, lies evenly in a step.

    By the low-discrepancy sequence of van der Corput, of the times at which the groups run.
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
    value, unit = 0.0, 0.5
    while number:
        value += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return value


def held_in_ram(
    sizes: Sequence[int], copied: Collection[int], from_disk: Collection[int], ram_bytes: int
) -> frozenset[int]:
    """Which groups are to lie in RAM: those that stream and are not read, then what stays on the device, as it fits.

    What stays there is only read once, but might leave, and come again.
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
