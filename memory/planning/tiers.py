"""Which of the pieces that stream come from disk, where RAM does not hold them all. Pure functions.

A step is never faster for one more piece that is read, so that as few are read as RAM allows; and they are spread, so
that the disk is never idle for long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from .ring import WINDOWS

_FEW = 8  # pieces, of which all choices are looked at


def windows_bytes(sizes: Sequence[int]) -> int:
    """RAM for the windows that pieces of these sizes are read through."""
    return WINDOWS * max(sizes, default=0)


def disk_choices(copied: Mapping[int, int], seconds: Sequence[float], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    """Sets of pieces to read, such that the others are in RAM, and no piece more would be.

    `copied` are the bytes of each piece that streams, by index, of which RAM may hold `ram_bytes`; `seconds` is how
    long each of all pieces takes. Of more than a few pieces there is one set, and those of less RAM contain it.
    """
    if len(copied) <= _FEW:
        yield from _all_choices(copied, ram_bytes)
        return
    missing = sum(copied.values()) - ram_bytes
    chosen: list[int] = []
    for i in spread(list(copied), seconds):
        if missing <= 0:
            break
        chosen.append(i)
        missing -= copied[i]
    yield tuple(sorted(chosen))


def _all_choices(copied: Mapping[int, int], ram_bytes: int) -> Iterator[tuple[int, ...]]:
    sizes = list(copied.items())
    for held in range(1 << len(sizes)):
        room = ram_bytes - sum(size for k, (_, size) in enumerate(sizes) if held >> k & 1)
        read = [(i, size) for k, (i, size) in enumerate(sizes) if not held >> k & 1]
        if room >= 0 and all(size > room for _, size in read):
            yield tuple(i for i, _ in read)


def spread(indices: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """The indices in such an order that any number of them, from the first, lies evenly in a step.

    By the low-discrepancy sequence of van der Corput, of the times at which the pieces run.
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


def _van_der_corput(number: int) -> float:
    value, unit = 0.0, 0.5
    while number:
        value += unit * (number & 1)
        number, unit = number >> 1, unit / 2
    return value


def held_in_ram(
    sizes: Sequence[int], copied: Collection[int], from_disk: Collection[int], ram_bytes: int
) -> frozenset[int]:
    """Which pieces are to lie in RAM: those that stream and are not read, then what stays on the device, as it fits.

    What stays there is only read once, but might leave, and come again.
    """
    needed = [i for i in copied if i not in set(from_disk)]
    room = ram_bytes - windows_bytes(sizes) - sum(sizes[i] for i in needed)
    held = set(needed)
    for i, size in enumerate(sizes):
        if i not in copied and size <= room:
            held.add(i)
            room -= size
    return frozenset(held)
