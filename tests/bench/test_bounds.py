"""The bound of a step by windows: no schedule of small cases is faster, nor what the solver finds of larger ones."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ballast.bench.bounds import bound_seconds
from ballast.memory.planning.solver import GroupLoad, Loads, least_bytes, place
from hypothesis import given, settings
from hypothesis import strategies as st

State = tuple[int, int, tuple[int, ...]]  # calls begun, seconds left of the last, bytes on the device of each group


def fastest(sizes: list[int], seconds: list[int], room: int, steps: int) -> float:
    """Seconds of the fastest step there is, of schedules that repeat after so many: a byte a second, in any order.

    Each byte may be dropped at any time, but of the group that runs, and copied whenever there is room.
    """
    count = len(sizes)

    def later(state: State) -> Iterator[tuple[int, State]]:
        calls, left, held = state
        following = calls % count
        if left == 0 and held[following] == sizes[following]:
            yield 0, (calls + 1, seconds[following], held)
        running = (calls - 1) % count if left else None
        yield 1, (calls, max(0, left - 1), held)
        for i in range(count):
            if held[i] == sizes[i]:
                continue
            more = tuple(size + (j == i) for j, size in enumerate(held))
            if sum(more) <= room:
                yield 1, (calls, max(0, left - 1), more)
                continue
            for j in range(count):  # in the place of a byte of another
                if j != i and j != running and held[j]:
                    swapped = tuple(size - (k == j) for k, size in enumerate(more))
                    yield 1, (calls, max(0, left - 1), swapped)

    best = float("inf")
    for held in itertools.product(*(range(size + 1) for size in sizes)):
        if sum(held) > room:
            continue
        start, end = (0, 0, held), (steps * count, 0, held)
        queue: list[tuple[int, State]] = [(0, start)]
        seen: dict[State, int] = {start: 0}
        while queue:
            took, state = heapq.heappop(queue)
            if state == end or took >= best * steps:
                best = min(best, took / steps)
                break
            if state[0] > steps * count or seen[state] < took:
                continue
            for seconds_more, following in later(state):
                if following[0] <= steps * count and took + seconds_more < seen.get(following, 10**9):
                    seen[following] = took + seconds_more
                    heapq.heappush(queue, (took + seconds_more, following))
    return best


def loads_of(sizes: list[int], seconds: list[float]) -> Loads:
    return Loads(tuple(GroupLoad(size, size, each) for size, each in zip(sizes, seconds, strict=True)))


CASES = [
    ([2, 2, 1], [3, 0, 0], 3),
    ([1, 2, 2], [4, 0, 1], 4),
    ([2, 1, 2], [0, 5, 0], 3),
    ([3, 1, 1], [0, 2, 3], 4),
    ([2, 2, 2], [2, 2, 2], 4),
    ([2, 3], [4, 1], 3),
    ([1, 1, 1, 1], [4, 0, 0, 0], 2),
    ([2, 1, 1], [0, 0, 1], 3),
]


@pytest.mark.parametrize(("sizes", "seconds", "room"), CASES)
def test_the_fastest_schedule_of_all_takes_as_long(sizes: list[int], seconds: list[int], room: int) -> None:
    bound = bound_seconds(loads_of(sizes, [float(each) for each in seconds]), room)
    assert bound == pytest.approx(min(fastest(sizes, seconds, room, steps) for steps in (1, 2)))
    assert bound > max(sum(seconds), sum(sizes) - room) or sizes == seconds


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3), st.integers(0, 4))
def test_no_schedule_is_faster_than_it_says_of_any_case(groups: list[tuple[int, int]], more: int) -> None:
    sizes, seconds = [size for size, _ in groups], [each for _, each in groups]
    bound = bound_seconds(loads_of(sizes, [float(each) for each in seconds]), max(sizes) + more)
    assert bound <= fastest(sizes, seconds, max(sizes) + more, 1) + 1e-9


PIECES = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 3)), min_size=1, max_size=24)


@settings(max_examples=60)
@given(PIECES, st.floats(0, 1.1), st.floats(0, 100), st.none() | st.floats(0, 1.1), st.floats(0.05, 3))
def test_what_the_solver_finds_is_never_faster(
    groups: list[tuple[int, float]], share: float, before: float, ram_share: float | None, disk: float
) -> None:
    whole = sum(size for size, _ in groups)
    loads = replace(
        loads_of([size for size, _ in groups], [size * times for size, times in groups]),
        before_seconds=before,
        disk_bytes_per_second=disk,
        ram_bytes=None if ram_share is None else 3 * max(size for size, _ in groups) + int(ram_share * whole),
    )
    room = max(int(share * whole), least_bytes(loads.groups))
    assert bound_seconds(loads, room) <= place(loads, room).seconds * (1 + 1e-9)


def test_more_room_bounds_no_longer_step() -> None:
    loads = loads_of([3, 3, 1, 5, 2, 2], [4.0, 0.0, 9.0, 0.5, 0.0, 1.0])
    bounds = [bound_seconds(loads, room) for room in range(6, 18)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] == pytest.approx(loads.compute_seconds)
