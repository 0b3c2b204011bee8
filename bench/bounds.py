"""The least seconds of a step, whatever is copied when: no schedule of these groups in this room is faster.

A group must be on the device while it is called, and nothing else moves weights than the copies to it. So when the call
of a group ends, the device holds at most its room of that group and of what is called after it, and the rest of this
must come before its last group is called. That takes longer than computing where many bytes are called in a row that
compute little.
"""

from __future__ import annotations

import numpy as np

from ..memory.planning.solver import Loads
from ..memory.planning.tiers import windows_bytes

_STEPS = 3  # of which the last two are compared


def bound_seconds(loads: Loads, room_bytes: int) -> float:
    """Return the least seconds of a steady step with `room_bytes` on the device for groups and all that they pass.

    Of `loads.ram_bytes`, where stated, all but the windows that reads pass through may hold weights; what is neither
    there nor on the device is read at the rate of the disk. This is the longest chain of calls and of waits for windows
    of up to a step of calls. The step that grew least in it is a bound of any steady step, as the least growth of a
    max-plus system is of its eigenvalue.
    """
    count = len(loads.groups)
    seconds = [group.seconds for group in loads.groups]
    held = np.tile([float(group.held_bytes) for group in loads.groups], _STEPS + 1)
    before_bytes = np.concatenate([[0.0], np.cumsum(held)])  # of all groups before each call
    begin, end = np.zeros(len(held)), np.zeros(len(held))
    for i in range(len(held)):
        if i:
            begin[i] = end[i - 1]
        begin[i] += loads.before_seconds if i % count == 0 else 0.0
        first = max(0, i - count + 1)
        if i > first:  # windows that begin with the calls from the first on, as these end
            waits = _wait_seconds(loads, before_bytes[i + 1] - before_bytes[first:i] - room_bytes)
            begin[i] = max(begin[i], np.max(end[first:i] + waits))
        if i >= count:  # all groups
            whole = _wait_seconds(loads, before_bytes[count : count + 1] - room_bytes)
            begin[i] = max(begin[i], begin[i - count] + float(whole[0]))
        end[i] = begin[i] + seconds[i % count]
    return float(np.min(begin[-count:] - begin[-2 * count : -count]))


def _wait_seconds(loads: Loads, missing_bytes: np.ndarray) -> np.ndarray:
    """Return how long it takes at least until so many bytes more are on the device.

    Below 0 where they are there already.
    """
    seconds = missing_bytes / loads.bytes_per_second
    if loads.ram_bytes is None:
        return seconds
    ram_bytes = max(0, loads.ram_bytes - windows_bytes(loads.sizes))
    return np.maximum(seconds, (missing_bytes - ram_bytes) / loads.disk_bytes_per_second)
