"""The seconds of the first call of a module, counted from when its weights begin to be read. Pure functions.

The disk reads one thing after the other:

1. the tables, and the weights outside all groups;
2. the groups that RAM is to hold, in call order;
3. the other groups, through windows.

Weights outside the groups are copied before anything computes. Then one copy stream copies all groups in call order,
resident and streamed ones alike, as they arrive in RAM. Copies overlap with the computing of earlier groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ring_offsets import WINDOWS, offsets, overwritten
from .solver import Layout, Loads


@dataclass(frozen=True)
class Beside:
    """The bytes that a first call copies or reads beyond those of any later call.

    `rest_bytes` are the weights outside all groups, `table_bytes` the tables that are read, `held` the bytes of each
    group without gaps. `ram` names the groups that RAM is to hold, None for all. `there` names those that it holds
    already, None for all weights of the unit.
    """

    rest_bytes: int
    table_bytes: int
    held: Sequence[int]
    there: frozenset[int] | None = frozenset()
    ram: frozenset[int] | None = None


def first_call_seconds(loads: Loads, found: Layout, beside: Beside) -> float:
    """Return the seconds of the first call in the layout `found`, counted from when its weights begin to be read."""
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
    ready: dict[int, float] = {}  # time at which each group that RAM is to hold has been read
    for i, nbytes in enumerate(beside.held):
        if beside.ram is None or i in beside.ram:
            is_there = beside.there is None or i in beside.there
            fetched += 0.0 if is_there else nbytes / disk
            ready[i] = 0.0 if is_there else fetched
    for i, group in enumerate(loads.groups):
        k = turn.get(i)
        nbytes = beside.held[i] if k is None else sizes[i]
        through = i not in ready  # comes through a window
        if through:
            fetched = max(fetched, windows[0]) + nbytes / disk
        begin = max(copied, ready.get(i, fetched))
        if k is not None and k >= ago[k] > 0:
            begin = max(begin, used[k - ago[k]])
        if through and k is None:
            begin = max(begin, done)  # a resident group is copied out of its window on the compute stream
        copied = begin + nbytes / bus
        if through:
            windows = [*windows[1:], copied]
        done = max(done, copied) + group.seconds
        if k is not None:
            used[k] = done
    return done
