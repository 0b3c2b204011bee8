"""How long the first call of a module takes, which begins with the first of its weights. Pure functions.

The disk reads one thing after the other: tables, what lies outside the groups, those that RAM is to hold in the order
of their calls, and then the others, through windows. What lies outside is copied before anything computes. Then one
stream copies the groups in their order, those that stay and those that pass through the ring, as they come to RAM,
while others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ring_offsets import WINDOWS, offsets, overwritten
from .solver import Layout, Loads


@dataclass(frozen=True)
class Beside:
    """The bytes that a first call brings beside those of any call.

    That is all that is outside the groups, `rest_bytes`; tables, if they are read; and each of the groups, without
    gaps. Of groups RAM is to hold those in `ram`, None for all, and has those that are `there`, None for all weights.
    """

    rest_bytes: int
    table_bytes: int
    held: Sequence[int]
    there: frozenset[int] | None = frozenset()
    ram: frozenset[int] | None = None


def first_call_seconds(loads: Loads, found: Layout, beside: Beside) -> float:
    """Seconds of the first call in a layout, from when its weights begin to be read."""
    bus, disk = loads.bytes_per_second, loads.disk_bytes_per_second
    sizes = loads.sizes
    passing = [sizes[i] for i in found.streamed]
    ago = overwritten(passing, offsets(passing, found.ring_bytes)) if passing else []
    turn = {i: k for k, i in enumerate(found.streamed)}
    used = [0.0] * len(passing)
    windows = [0.0] * WINDOWS
    comes_whole = beside.there is None and beside.ram is None
    fetched = 0.0 if comes_whole else (beside.table_bytes + beside.rest_bytes) / disk
    copied = fetched + beside.rest_bytes / bus
    done = copied + loads.before_seconds
    ready: dict[int, float] = {}  # when each group that RAM is to hold is there
    for i, nbytes in enumerate(beside.held):
        if beside.ram is None or i in beside.ram:
            is_there = beside.there is None or i in beside.there
            fetched += 0.0 if is_there else nbytes / disk
            ready[i] = 0.0 if is_there else fetched
    for i, group in enumerate(loads.groups):
        k = turn.get(i)
        nbytes = beside.held[i] if k is None else sizes[i]
        through = i not in ready  # windows
        if through:
            fetched = max(fetched, windows[0]) + nbytes / disk
        begin = max(copied, ready.get(i, fetched))
        if k is not None and k >= ago[k] > 0:
            begin = max(begin, used[k - ago[k]])
        if through and k is None:
            begin = max(begin, done)  # what stays is copied out of the windows where it computes
        copied = begin + nbytes / bus
        if through:
            windows = [*windows[1:], copied]
        done = max(done, copied) + group.seconds
        if k is not None:
            used[k] = done
    return done
