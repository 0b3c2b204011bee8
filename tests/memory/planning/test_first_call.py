"""The seconds of a first call, by hand: one copy takes a second, and nothing is read."""

from __future__ import annotations

import pytest
from ballast.memory.planning.first_call import Beside, first_call_seconds
from ballast.memory.planning.solver import GroupLoad, Layout, Loads


def seconds(computes: list[float], streamed: tuple[int, ...], ring_bytes: int, rest_bytes: int = 0) -> float:
    loads = Loads(tuple(GroupLoad(1, 1, each) for each in computes), 1.0, disk_bytes_per_second=1.0)
    found = Layout("streamed", ring_bytes, streamed)
    return first_call_seconds(loads, found, Beside(rest_bytes, 0, [1] * len(computes), there=None))


@pytest.mark.parametrize(
    ("streamed", "ring_bytes", "expected"),
    [
        ((), 0, 11.0),  # all come while the first computes
        ((0, 1, 2, 3, 4), 5, 11.0),  # as they do to a ring of all
        ((0, 1, 2, 3, 4), 2, 14.0),  # the third waits for the bytes of the first, and the others for it
        ((1, 2, 3, 4), 2, 13.0),  # so does the fourth for those of the second, which ran at 11
    ],
)
def test_a_copy_waits_for_what_it_overwrites(streamed: tuple[int, ...], ring_bytes: int, expected: float) -> None:
    assert seconds([10.0, 0.0, 0.0, 0.0, 0.0], streamed, ring_bytes) == expected


def test_what_lies_outside_the_groups_comes_first() -> None:
    assert seconds([10.0, 0.0], (), 0, rest_bytes=3) == 3 + 1 + 10
