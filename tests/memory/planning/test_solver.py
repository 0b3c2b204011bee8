"""The solver alone: never over its room, deterministic, monotonic, near the best there is; and its ring."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ballast.memory.planning import solver
from ballast.memory.planning.kept_dequantized import dequantizing_order
from ballast.memory.planning.ring_offsets import WINDOWS, offsets, overwritten, step_seconds
from ballast.memory.planning.solver import RINGS, GroupLoad, Layout, Loads, least_bytes, least_ring_bytes, place
from ballast.memory.planning.tiers import disk_choices, held_in_ram, spread, windows_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.integers(1, 1000)
PIECES = st.lists(st.tuples(SIZES, st.integers(0, 7), st.floats(0, 3)), min_size=1, max_size=40)


def loads_of(groups: list[tuple[int, int, float]], before: float = 0.0) -> Loads:
    """Groups of so many bytes with gaps, which compute so long for each second of their copy."""
    return Loads(tuple(GroupLoad(size + gap, size, (size + gap) * times) for size, gap, times in groups), 1.0, before)


def rings(loads: Loads) -> list[int]:
    """Sizes of rings that are tried, and 0 for none."""
    largest = max(group.packed_bytes for group in loads.groups)
    return [0, least_ring_bytes(loads.groups), *(times * largest for times in RINGS)]


def held(loads: Loads, found: Layout) -> int:
    streamed = set(found.streamed)
    return sum(group.held_bytes for i, group in enumerate(loads.groups) if i not in streamed)


def replay(loads: Loads, found: Layout, steps: int = 6) -> float:
    """Seconds of a steady step, by what lies on each byte of the ring and when it was last used."""
    sizes = [loads.groups[i].packed_bytes for i in found.streamed]
    at = dict(zip(found.streamed, offsets(sizes, found.ring_bytes), strict=True))
    used = [0.0] * found.ring_bytes
    owner = [-1] * found.ring_bytes
    copied = done = last = fetched = reading = 0.0
    out_of: list[float] = []  # ends of the copies of what was read, in order
    for _ in range(steps):
        last, done, reading = done, done + loads.before_seconds, 0.0
        for i, group in enumerate(loads.groups):
            if i in at:
                place = range(at[i], at[i] + group.packed_bytes)
                if any(owner[byte] != i for byte in place):
                    if i in found.from_disk:
                        window = out_of[-WINDOWS] if len(out_of) >= WINDOWS else 0.0
                        reading += group.packed_bytes / loads.disk_bytes_per_second
                        fetched = max(fetched, window) + group.packed_bytes / loads.disk_bytes_per_second
                        copied = max(copied, fetched)
                    copied = max(copied, max(used[byte] for byte in place)) + group.packed_bytes
                    if i in found.from_disk:
                        out_of.append(copied)
                done = max(done, copied)
                for byte in place:
                    owner[byte], used[byte] = i, done + group.seconds
            done += group.seconds
    return max(done - last, reading)  # the first step may put the disk ahead, by a little less each step


@given(st.lists(SIZES, min_size=1, max_size=40), st.integers(0, 3000))
def test_groups_follow_each_other_in_the_ring_and_begin_anew_at_its_end(sizes: list[int], more: int) -> None:
    ring = max(sizes) + more
    end = 0
    for size, begin in zip(sizes, offsets(sizes, ring), strict=True):
        assert begin == (end if end + size <= ring else 0)
        end = begin + size
        assert end <= ring


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(0, 3000))
def test_the_last_that_is_overwritten_is_known(sizes: list[int], more: int) -> None:
    ring = max(sizes) + more
    at = offsets(sizes, ring)
    owner, turn = [-1] * ring, 0
    seen: dict[int, int] = {}
    for _ in range(2):
        for i, begin in enumerate(at):
            lost = {owner[byte] for byte in range(begin, begin + sizes[i])} - {-1}
            seen[i] = turn - max(lost, default=turn - len(sizes))
            for byte in range(begin, begin + sizes[i]):
                owner[byte] = turn
            turn += 1
    assert overwritten(sizes, at) == [seen[i] % len(sizes) for i in range(len(sizes))]


@settings(max_examples=200)
@given(PIECES, st.floats(-0.1, 1.1), st.floats(0, 100))
def test_never_over_the_room_and_the_same_each_time(
    groups: list[tuple[int, int, float]], share: float, before: float
) -> None:
    loads = loads_of(groups, before)
    whole = sum(group.held_bytes for group in loads.groups)
    room = int(share * whole)
    found = place(loads, room)
    assert found.device_bytes == held(loads, found) + found.ring_bytes <= max(room, least_bytes(loads.groups))
    assert found.ring_bytes == 0 or found.ring_bytes >= least_ring_bytes(loads.groups)
    assert list(found.streamed) == sorted(set(found.streamed))
    place.cache_clear()
    assert place(loads, room) == found
    compute = before + sum(group.seconds for group in loads.groups)
    assert not found.dequantized, "nothing is encoded"
    assert found.seconds >= 0.999999 * max(compute, found.copied_bytes)
    assert (whole <= room) == (not found.streamed) or not found.copied_bytes


def test_one_large_group_streams_beside_the_next_largest() -> None:
    """A ring of twice the largest would take as much as all groups: LTX-2.5's connectors have such a layer."""
    loads = loads_of([(60, 1, 1.0), (20, 1, 1.0), (30, 1, 1.0), (10, 1, 1.0)])
    sizes = sorted(group.packed_bytes for group in loads.groups)
    least = least_bytes(loads.groups)
    assert least == sizes[-1] + sizes[-2] < sum(group.held_bytes for group in loads.groups)
    found = place(loads, least)
    assert found.device_bytes == found.ring_bytes == least and len(found.streamed) == 4


@settings(max_examples=100)
@given(PIECES, st.lists(st.floats(0, 1.1), min_size=2, max_size=6))
def test_more_room_is_never_slower(groups: list[tuple[int, int, float]], shares: list[float]) -> None:
    loads = loads_of(groups)
    whole = sum(group.held_bytes for group in loads.groups)
    seconds = [place(loads, int(share * whole)).seconds for share in sorted(shares)]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(seconds))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.floats(0, 3)), min_size=1, max_size=15),
    st.floats(0, 1),
    st.floats(0, 1.2),
    st.floats(0.05, 3),
)
def test_its_seconds_are_those_of_the_bytes_in_the_ring(
    groups: list[tuple[int, int, float]], share: float, ram_share: float, disk: float
) -> None:
    loads = in_ram(loads_of(groups, 5.0), ram_share, disk)
    found = place(loads, int(share * sum(group.held_bytes for group in loads.groups)))
    if found.ring_bytes:
        assert replay(loads, found) * (1 - 1e-6) <= found.seconds <= 1.001001 * replay(loads, found) + 1e-6


@settings(max_examples=60)
@given(st.lists(st.tuples(SIZES, st.integers(0, 7), st.floats(0, 3)), min_size=3, max_size=8), st.floats(0, 1))
def test_as_good_as_all_choices_of_up_to_eight(groups: list[tuple[int, int, float]], share: float) -> None:
    loads = loads_of(groups)
    count = len(loads.groups)
    room = max(int(share * sum(group.held_bytes for group in loads.groups)), least_bytes(loads.groups))
    best = float("inf")
    for size, ring in itertools.product(range(count + 1), rings(loads)):
        for streamed in itertools.combinations(range(count), size):
            packed = [loads.groups[i].packed_bytes for i in streamed]
            made = Layout("streamed", ring, streamed)
            if held(loads, made) + ring > room or (streamed and not ring):
                continue
            ago = overwritten(packed, offsets(packed, ring))
            compute, transfer = [p.seconds for p in loads.groups], [float(p.packed_bytes) for p in loads.groups]
            best = min(best, step_seconds(compute, transfer, streamed, ago, 0.0))
    assert place(loads, room).seconds <= 1.03 * best + 1e-9


# Bytes as stored, its times as plain, the share of its seconds that decoding takes, and a moment's bytes.
PIECE = st.tuples(SIZES, st.integers(0, 7), st.floats(0, 3), st.floats(0.5, 4), st.floats(0, 1), st.integers(0, 50))
ENCODED = st.lists(PIECE, min_size=1, max_size=24)


def encoded_loads(groups: list[tuple[int, int, float, float, float, int]], before: float = 0.0) -> Loads:
    """Groups some of which are encoded: those that decoding takes seconds of."""
    made = []
    for size, gap, times, plain, share, moment in groups:
        seconds = (size + gap) * times
        more = int(size * (plain - 1))
        made.append(GroupLoad(size + gap, size, seconds, share * seconds * (share > 0.2), more, moment))
    return Loads(tuple(made), 1.0, before)


def more_bytes(loads: Loads, decoded: Sequence[int]) -> int:
    """The most that groups take more while they are dequantized, one after the other."""
    most = now = 0
    for i in sorted(decoded):
        most = max(most, now + loads.groups[i].moment_bytes + max(0, loads.groups[i].more_bytes))
        now += max(0, loads.groups[i].more_bytes)
    return most


@settings(max_examples=200)
@given(ENCODED, st.floats(-0.1, 4), st.floats(0, 100))
def test_what_stays_decoded_is_within_the_room_and_saves_its_seconds(
    groups: list[tuple[int, int, float, float, float, int]], share: float, before: float
) -> None:
    loads = encoded_loads(groups, before)
    room = int(share * sum(group.held_bytes for group in loads.groups))
    found = place(loads, room)
    assert not set(found.dequantized) & set(found.streamed)
    assert all(loads.groups[i].is_encoded for i in found.dequantized)
    taken = held(loads, found) + found.ring_bytes + more_bytes(loads, found.dequantized)
    assert found.device_bytes == taken <= max(room, least_bytes(loads.groups))
    place.cache_clear()
    assert place(loads, room) == found
    # As if decoding were not there for those groups.
    plain = replace(
        loads,
        groups=tuple(
            replace(group, seconds=group.seconds - group.decode_seconds * (i in found.dequantized), decode_seconds=0.0)
            for i, group in enumerate(loads.groups)
        ),
    )
    if found.ring_bytes:
        assert replay(plain, found) * (1 - 1e-6) <= found.seconds
        assert found.seconds <= replay(plain, found) + 1.001e-3 * loads.compute_seconds + 1e-6
    else:
        assert found.seconds == pytest.approx(plain.compute_seconds, rel=2e-3, abs=1e-6)
    every = [i for i, group in enumerate(loads.groups) if group.decode_seconds]
    if room >= sum(group.held_bytes for group in loads.groups) + more_bytes(loads, every):
        assert found.seconds <= plain.compute_seconds * 1.001 + 1e-6


@settings(max_examples=60)
@given(ENCODED, st.lists(st.floats(0, 4), min_size=2, max_size=6))
def test_more_room_is_never_slower_with_decoding(
    groups: list[tuple[int, int, float, float, float, int]], shares: list[float]
) -> None:
    loads = encoded_loads(groups)
    whole = sum(group.held_bytes for group in loads.groups)
    seconds = [place(loads, int(share * whole)).seconds for share in sorted(shares)]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(seconds))


@settings(max_examples=25)
@given(st.lists(PIECE, min_size=2, max_size=5), st.floats(0, 3))
def test_as_good_as_all_choices_with_decoding(
    groups: list[tuple[int, int, float, float, float, int]], share: float
) -> None:
    """Of what streams through which ring. Of what stays, those are dequantized that save most for their bytes."""
    loads = encoded_loads(groups)
    count, order = len(loads.groups), dequantizing_order(loads.groups)
    room = max(int(share * sum(group.held_bytes for group in loads.groups)), least_bytes(loads.groups))
    best = float("inf")
    for passes in itertools.product((False, True), repeat=count):
        streamed = tuple(i for i in range(count) if passes[i])
        for ring in rings(loads):
            left = room - held(loads, Layout("streamed", ring, streamed)) - ring
            if left < 0 or (streamed and not ring):
                continue
            decoded: list[int] = []
            for i in order:
                more = sum(max(0, loads.groups[k].more_bytes) for k in (*decoded, i))
                if not passes[i] and more + max(loads.groups[k].moment_bytes for k in (*decoded, i)) > left:
                    break
                decoded += [] if passes[i] else [i]
            packed = [loads.sizes[i] for i in streamed]
            ago = overwritten(packed, offsets(packed, ring))
            compute = [p.seconds - p.decode_seconds * (i in decoded) for i, p in enumerate(loads.groups)]
            transfer = [float(size) for size in loads.sizes]
            best = min(best, step_seconds(compute, transfer, streamed, ago, 0.0))
    assert place(loads, room).seconds <= best + 1.001e-3 * loads.compute_seconds + 1e-9


def test_of_many_alike_those_decoded_lie_among_those_that_stream() -> None:
    # Twenty blocks of 100 bytes that compute 100 s, of which decoding takes half, and are four times as large plain.
    loads = Loads(tuple(GroupLoad(100, 100, 100.0, 50.0, 300, 0) for _ in range(20)), 1.0)
    rooms = {room: place(loads, room) for room in (400, 800, 1200, 2000, 4000, 8000)}
    seconds = [found.seconds for found in rooms.values()]
    assert seconds == pytest.approx([2000, 1950, 1900, 1800, 1550, 1000], rel=2e-3)
    assert [len(found.dequantized) for found in rooms.values()] == [0, 1, 2, 4, 9, 20]


def in_ram(loads: Loads, share: float, disk: float) -> Loads:
    """The same with RAM for a share of the groups, and a disk so many times as fast as the copies."""
    ram = windows_bytes(loads.sizes) + int(share * sum(loads.sizes))
    return replace(loads, ram_bytes=ram, disk_bytes_per_second=disk)


@settings(max_examples=200)
@given(PIECES, st.floats(0, 1.1), st.floats(-0.2, 1.1), st.floats(0.05, 3))
def test_never_over_the_ram(groups: list[tuple[int, int, float]], share: float, ram_share: float, disk: float) -> None:
    loads = in_ram(loads_of(groups), ram_share, disk)
    found = place(loads, int(share * sum(group.held_bytes for group in loads.groups)))
    assert set(found.from_disk) <= set(found.copied) <= set(found.streamed)
    assert found.read_bytes == sum(loads.sizes[i] for i in found.from_disk)
    kept = [i for i in found.copied if i not in found.from_disk]
    ram = max(loads.ram_bytes or 0, windows_bytes(loads.sizes))
    assert windows_bytes(loads.sizes) + sum(loads.sizes[i] for i in kept) <= ram
    held_groups = held_in_ram(loads.sizes, found.copied, found.from_disk, ram)
    assert set(kept) <= held_groups and not held_groups & set(found.from_disk)
    assert windows_bytes(loads.sizes) + sum(loads.sizes[i] for i in held_groups) <= ram
    assert found.seconds >= 0.999999 * found.read_bytes / disk
    # What is there by now is taken as it is.
    placed = replace(loads, ram_bytes=None, on_disk=frozenset(range(len(groups))) - held_groups)
    again = place(placed, found.device_bytes)
    assert set(again.from_disk) == set(again.copied) & placed.on_disk
    assert again.seconds <= found.seconds * (1 + 1e-9)


@settings(max_examples=100)
@given(PIECES, st.lists(st.floats(0, 1.1), min_size=2, max_size=5), st.floats(0, 1), st.floats(0.05, 3))
def test_more_ram_is_never_slower(
    groups: list[tuple[int, int, float]], shares: list[float], room_share: float, disk: float
) -> None:
    loads = loads_of(groups)
    whole = sum(group.held_bytes for group in loads.groups)
    for ram, room in ((True, False), (False, True)):
        seconds = [
            place(in_ram(loads, share if ram else 0.4, disk), int((share if room else room_share) * whole)).seconds
            for share in sorted(shares)
        ]
        assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(seconds))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(SIZES, st.integers(0, 7), st.floats(0, 3)), min_size=3, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.1, 2),
)
def test_as_good_as_all_mixes_of_three_tiers(
    groups: list[tuple[int, int, float]], share: float, ram_share: float, disk: float
) -> None:
    loads = in_ram(loads_of(groups), ram_share, disk)
    count, sizes = len(groups), loads.sizes
    room = max(int(share * sum(group.held_bytes for group in loads.groups)), least_bytes(loads.groups))
    best = float("inf")
    for tiers in itertools.product(("device", "ram", "disk"), repeat=count):
        streamed = tuple(i for i in range(count) if tiers[i] != "device")
        for ring in rings(loads):
            if held(loads, Layout("streamed", ring, streamed)) + ring > room or (streamed and not ring):
                continue
            packed = [sizes[i] for i in streamed]
            ago = overwritten(packed, offsets(packed, ring))
            copied = [i for i, copies_ago in zip(streamed, ago, strict=True) if copies_ago]
            if sum(sizes[i] for i in copied if tiers[i] == "ram") + windows_bytes(sizes) > (loads.ram_bytes or 0):
                continue
            read = {i: sizes[i] / disk for i in copied if tiers[i] == "disk"}
            compute, transfer = [p.seconds for p in loads.groups], [float(size) for size in sizes]
            best = min(best, step_seconds(compute, transfer, streamed, ago, 0.0, read))
    assert place(loads, room).seconds <= 1.03 * best + 1e-9


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60), st.data())
def test_any_number_of_the_spread_lies_evenly(seconds: list[float], data: st.DataObject) -> None:
    among = sorted(data.draw(st.sets(st.integers(0, len(seconds) - 1), min_size=1)))
    assert sorted(spread(among, seconds)) == among
    even = spread(list(range(64)), [1.0] * 64)
    for count in (2, 4, 8, 16, 32):
        gaps = [after - before for before, after in itertools.pairwise([*sorted(even[:count]), even[0] + 64])]
        assert max(gaps) - min(gaps) <= 1


def test_less_ram_reads_what_more_does_too() -> None:
    copied = {i: 10 + i % 3 for i in range(40)}
    seconds = [float(i % 5) for i in range(50)]
    reads = [set(next(iter(disk_choices(copied, seconds, ram)))) for ram in range(0, 450, 7)]
    assert all(more <= less for less, more in itertools.pairwise(reads))
    assert reads[0] == set(copied) and not reads[-1]


def test_of_equally_fast_arrangements_that_which_copies_least_is_taken() -> None:
    loads = loads_of([(100, 0, 4.0)] * 64)
    found = place(loads, 4800)
    assert found.seconds == pytest.approx(64 * 400, rel=1e-3)
    assert len(found.streamed) == 18, "46 stay beside a ring of two"


def test_no_copies_are_timed_that_cannot_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def step(*arguments: Any) -> float:
        timed.append(arguments)
        return step_seconds(*arguments)

    monkeypatch.setattr(solver, "step_seconds", step)
    place.cache_clear()
    groups = tuple(GroupLoad(1000 + 7 * i % 300, 1000, 40.0 + i % 5) for i in range(300))
    loads = Loads(groups, bytes_per_second=50.0, disk_bytes_per_second=10.0, ram_bytes=200_000)
    found = place(loads, 70_000)
    assert found.seconds == pytest.approx(loads.compute_seconds), "hides behind the computing, as many others do"
    assert found.read_bytes and len(timed) < 40


def test_a_ring_that_is_there_stays_if_it_can() -> None:
    loads = loads_of([(100, 0, 1.0)] * 40)
    assert place(loads, 2000, ring_bytes=300).ring_bytes == 300
    assert place(loads, 250, ring_bytes=300).ring_bytes == 200
    assert place(loads, 4000, ring_bytes=300).ring_bytes == 0, "all fit without it"


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1, 2])
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    "lists", [[(340, 19), (141, 38)], [(10, 49), (430, 16), (250, 32)]], ids=["flux-like", "hidream-like"]
)
def test_real_mixes_come_within_5_percent_of_the_bound(
    lists: list[tuple[int, int]], share: float, ratio: float
) -> None:
    """Groups in the proportions of the real models, which compute as they weigh."""
    sizes = [size for size, count in lists for _ in range(4 * count)]
    loads = Loads(tuple(GroupLoad(size, size, size * ratio) for size in sizes), 1.0)
    found = place(loads, 4 * max(sizes) + int(share * sum(sizes)))
    assert found.seconds <= 1.05 * max(ratio * sum(sizes), sum(sizes) * (1 - share))
