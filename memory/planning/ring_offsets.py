"""The offsets of streamed weight groups in the ring, and the seconds of a step. Pure functions.

Groups take the next bytes of the ring in call order. They begin again at byte 0 where a group would exceed the end, and
at each step. A copy waits for the copy before it and for the last use of the bytes that it overwrites. A group waits
for its copy and for the group before it. Groups from disk are read one after the other into a few windows. A window is
free again when the copy out of it is done. See [Note: Order of the ring] in `engine.ring`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

WINDOWS = 3  # buffers for groups that are not in pinned RAM: one is being read, one waits, one is being copied

_STEPS_TO_STEADY = 4  # steps to simulate until the last one stands for all later ones


def offsets(sizes: Sequence[int], ring_bytes: int) -> list[int]:
    """Return the offset in bytes of each group in a ring of `ring_bytes`, for groups of these `sizes` in call order.

    The ring must take the largest group.
    """
    placed, end = [], 0
    for size in sizes:
        begin = end if end + size <= ring_bytes else 0
        placed.append(begin)
        end = begin + size
    return placed


def overwritten(sizes: Sequence[int], at: Sequence[int]) -> list[int]:
    """Return for each group how many copies before it the last group was copied whose bytes it overwrites.

    For example, 2 means the copy before the previous one, counted across steps. 0 means that no group shares the bytes:
    such a group is copied once and then stays.
    """
    count, begins = len(sizes), np.array([*at, *at], np.int64)  # of the step before, and of this one
    ends = begins + np.array([*sizes, *sizes], np.int64)
    laps = np.cumsum(np.diff(begins, prepend=0) <= 0)  # a lap begins wherever the offset falls back
    apart = int(ends.max(initial=0)) + 1
    keys = laps * apart + begins
    found, left = np.zeros(count, np.int64), np.arange(count, 2 * count)
    back = 0
    while left.size and back < laps[-1]:
        back += 1
        # Within a lap offsets rise: the last group that begins before this one ends overlaps it, or none does.
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
    """Return the seconds of a steady step in which each group computes and the `streamed` ones are copied.

    `compute` and `transfer` are the seconds of each group, `before` the compute ahead of the first one. `ago` is the
    result of `overwritten` for the streamed groups. `read` maps a group that comes from disk to the seconds of its
    read.
    """
    read = read or {}
    turn = {group: k for k, group in enumerate(streamed) if ago[k]}  # the others are copied once, in the first step
    calls = [(i, seconds, turn.get(i, -1)) for i, seconds in enumerate(compute)]
    copied = done = last = fetched = 0.0
    used = [0.0] * len(streamed)
    windows = [0.0] * WINDOWS  # times at which the last copy out of each ended, oldest first
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
