"""Which way to decode, from numbers alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ballast.pipelines.decoding.policy import Way, choose, less

WAYS = [Way("whole", 100), Way("stripes", 20, 60, 30.0), Way("tiles", 30, 0, 10.0), Way("cpu")]


@pytest.mark.parametrize(
    ("room", "ram", "chosen"),
    [
        (100, 1000, "whole"),
        (99, 1000, "stripes"),
        (20, 60, "stripes"),
        (50, 59, "tiles"),
        (29, 59, "cpu"),
        (0, 0, "cpu"),
    ],
)
def test_exact_ways_come_first(room: int, ram: int, chosen: str) -> None:
    assert choose(WAYS, room, ram).name == chosen


def test_stripes_that_take_absurdly_long_give_way_to_tiles() -> None:
    slow = [Way("whole", 100), Way("stripes", 20, 60, 141.0), Way("tiles", 30, 0, 10.0), Way("cpu")]
    assert choose(slow, 50, 100).name == "tiles"
    assert choose(slow, 25, 100).name == "stripes", "where tiles do not fit"
    hardly = [Way("whole", 100), Way("stripes", 20, 60, 139.0), Way("tiles", 30, 0, 10.0), Way("cpu")]
    assert choose(hardly, 50, 100).name == "stripes"


def test_what_is_not_known_is_tried() -> None:
    assert choose([Way("whole"), Way("cpu")], 0, 0).name == "whole"


def test_later_ways_are_not_worked_out() -> None:
    def ways() -> Iterator[Way]:
        yield Way("whole", 10)
        raise AssertionError("it fits: nothing else has a dry run")

    assert choose(ways(), 10, 0).name == "whole"


def test_steps_down_end_on_the_cpu() -> None:
    steps, way = [], Way("whole", 10)
    while lower := less(way):
        way = lower
        steps.append(way.words)
    assert steps == [
        "in stripes",
        "in stripes of 1/8 of the room",
        "in tiles",
        "on the CPU",
    ]
