"""The ring of bytes that streamed groups pass through: where each lies in it, and how long a step takes.

Pure functions. Groups take the next bytes in the order of their calls, and begin anew at byte 0 where the end is too
near, and with each step. A copy waits for the copy before it and for the last use of the bytes that it overwrites, a
group for its copy and for the group before it. What comes from disk is read, one group after the other, into a few
windows first, each of which is free again when the copy out of it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

WINDOWS = 3  # that what is not in pinned RAM is read through: one is read, one waits, one is copied

_STEPS_TO_STEADY = 4


def offsets(sizes: Sequence[int], ring_bytes: int) -> list[int]:
    """Where each of the groups that pass through a ring lies, which must take the largest."""
    placed, end = [], 0
    for size in sizes:
        begin = end if end + size <= ring_bytes else 0
        placed.append(begin)
        end = begin + size
    return placed


def overwritten(sizes: Sequence[int], at: Sequence[int]) -> list[int]:
    """For each group how many copies ago the last group was copied that it overwrites; 0 if there is none.

    Such a group has its bytes to itself, and is copied once.
    """
    count, begins = len(sizes), np.array([*at, *at], np.int64)  # of the step before, and of this one
    ends = begins + np.array([*sizes, *sizes], np.int64)
    laps = np.cumsum(np.diff(begins, prepend=0) <= 0)  # each time around
    apart = int(ends.max(initial=0)) + 1
    keys = laps * apart + begins
    found, left = np.zeros(count, np.int64), np.arange(count, 2 * count)
    back = 0
    while left.size and back < laps[-1]:
        back += 1
        # The last of that time around that begins ahead of a group's end overlaps it, or none does.
        lap = laps[left] - back
        last = np.searchsorted(keys, lap * apart + ends[left]) - 1
        overlaps = (laps[last] == lap) & (ends[last] > begins[left]) & (left - last < count)
        found[left[overlaps] - count] = (left - last)[overlaps]
        left = left[~overlaps]
    return found.tolist()


def step_seconds(
    compute: Sequence[float],
    transfer: Sequence[float],
    streamed: Sequence[int],
    ago: Sequence[int],
    before: float,
    read: Mapping[int, float] | None = None,
) -> float:
    """Seconds of a steady step: each group computes, those at the indices `streamed` are copied.

    `ago` is what `overwritten` gives for those, `before` the compute ahead of the first group, `read` the seconds that
    groups which come from disk are read for.
    """
    read = read or {}
    turn = {group: k for k, group in enumerate(streamed) if ago[k]}  # the others are copied once
    calls = [(i, seconds, turn.get(i, -1)) for i, seconds in enumerate(compute)]
    copied = done = last = fetched = 0.0
    used = [0.0] * len(streamed)
    windows = [0.0] * WINDOWS  # the ends of the last copies out of them
    for _ in range(_STEPS_TO_STEADY):
        last, done = done, done + before
        for i, seconds, k in calls:
            if k < 0:
                done += seconds
                continue
            free = used[k - ago[k]]
            if i in read:
                fetched = max(fetched, windows[0]) + read[i]
                copied = max(copied, free, fetched) + transfer[i]
                windows = [*windows[1:], copied]
            else:
                copied = (copied if copied > free else free) + transfer[i]
            if copied > done:
                done = copied
            done += seconds
            used[k] = done
    return done - last
