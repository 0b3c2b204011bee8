"""Decide where each weight group of a unit lies: resident or streamed, dequantized or as stored, in RAM or on disk.

`place` is a pure function of the sizes and seconds of the groups, the room on the device and in RAM, and the rates. It
decides in these steps:

1. Raise the room to the least that works: all weights for a `resident` unit, the least ring for one that may stream.
2. If all groups fit as stored and none is encoded, keep all of them. There is nothing else to decide.
3. Otherwise collect options. "Stream nothing" is one, if all groups fit. For a unit that may stream, add each ring size
   with each set of groups to stream: all 2^n sets of up to `_FEW` groups, a few hundred generated sets of more.
4. Discard the options that exceed the room. With the room that is left, keep resident groups dequantized: first those
   that save the most seconds for each extra byte.
5. Compute a lower bound of the seconds of each option from the compute, the bus and the disk. Try the options in the
   order of that bound. Stop when the bound exceeds the best layout so far, or when that layout is within 1/1000 of the
   compute of the bound, reads nothing and copies as little as the option can.
6. For each option simulate a step: which groups the ring copies, and, where RAM does not hold these, which of them come
   from disk. Round the seconds up to 1/1000 of the compute.
7. Return the fastest layout. Ties go to the one that reads fewer bytes, then copies fewer, then takes less of the
   device.

The generated options do not depend on the room, so more room never gives a slower layout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..vocabulary import PlacementName
from .kept_dequantized import KeptDequantized, dequantized, dequantized_within, dequantizing_order
from .ring_offsets import offsets, overwritten, step_seconds
from .tiers import Sets, disk_choices, paid, spread, windows_bytes

RINGS = (2, 3, 4, 5, 6, 8, 12, 16)  # ring sizes to try beside the least, in multiples of the largest group
_LEVELS = 256  # steps between streaming nothing and streaming everything
_HIDDEN = 64  # sets to try for each ring: the k-th copies up to 2 * k / 64 seconds for each second of computing
_ROUNDING = 1e-3  # share of the computing to which seconds are rounded up: a smaller gain does not justify more copies
_FEW = 10  # groups up to which all subsets are tried, 1024 at most


@dataclass(frozen=True)
class GroupLoad:
    """Sizes of a weight group in bytes, and seconds of its call.

    `packed_bytes` is the size of its flat buffer, alignment gaps included; `held_bytes` is the size without gaps. The
    call computes for `seconds`, of which dequantizing takes `decode_seconds`. A group that is kept dequantized saves
    the latter. It then takes `more_bytes` more than as stored, and `moment_bytes` beside these while it is dequantized.
    """

    packed_bytes: int
    held_bytes: int
    seconds: float = 0.0
    decode_seconds: float = 0.0
    more_bytes: int = 0
    moment_bytes: int = 0

    @property
    def is_encoded(self) -> bool:
        """Return whether the group may be kept dequantized."""
        return self.decode_seconds > 0 or self.more_bytes != 0


class HasSizes(Protocol):
    """A weight group, or a record of one, with its sizes in bytes."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...


@dataclass(frozen=True)
class Loads:
    """The weight groups of a call in call order, and the rates in bytes per second.

    `before_seconds` is the compute ahead of the first group. Groups that are not in RAM are read at
    `disk_bytes_per_second`. There are two ways to say which these are:

    - `on_disk` names them by index.
    - `ram_bytes` leaves the choice to the solver. RAM then holds at most that much of the streamed groups, windows
      included. `on_disk` names the groups that are on disk at present.

    With `once` the weights leave after each call, so the engine prefetches nothing for a next one. `spared_bytes` is
    the working memory that calls save when all groups are kept dequantized.
    """

    groups: tuple[GroupLoad, ...]
    bytes_per_second: float = 1.0
    before_seconds: float = 0.0
    disk_bytes_per_second: float = math.inf
    on_disk: frozenset[int] = frozenset()
    ram_bytes: int | None = None
    once: bool = False
    spared_bytes: int = 0

    @functools.cached_property
    def all_dequantized_bytes(self) -> int:
        """Extra bytes on the device when all encoded groups are kept dequantized."""
        return dequantized(self.groups, dequantizing_order(self.groups)).more_bytes

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Packed bytes of each group, in call order."""
        return tuple(group.packed_bytes for group in self.groups)

    @functools.cached_property
    def compute_seconds(self) -> float:
        """Seconds of computing in one call, dequantizing included."""
        return self.before_seconds + sum(group.seconds for group in self.groups)

    def computing(self, seconds: float) -> Loads:
        """Return the same loads, scaled so that a call computes for `seconds` in all."""
        times = seconds / self.compute_seconds if self.compute_seconds else 0.0
        groups = tuple(replace(group, seconds=group.seconds * times) for group in self.groups)
        return replace(self, groups=groups, before_seconds=self.before_seconds * times)

    @classmethod
    def even(cls, groups: Iterable[HasSizes]) -> Loads:
        """Return loads whose groups compute for as long as they are copied, for when no seconds are known."""
        return cls(tuple(GroupLoad(p.packed_bytes, p.held_bytes, float(p.packed_bytes)) for p in groups))


@dataclass(frozen=True)
class Layout:
    """The placement of a unit's weight groups during its calls: decided by `place`, made true by the engine.

    Groups are numbered in call order. The `streamed` ones pass through a ring of `ring_bytes`; the others stay on the
    device. Of the latter, those in `dequantized` stay as plain tensors. `device_bytes` is the total on the device, ring
    included.

    Each call takes `seconds` and copies the groups `copied`, `copied_bytes` in all. That is fewer than `streamed` if a
    group has its bytes of the ring to itself. Of the copied groups, those in `from_disk` are read first, `read_bytes`
    in all.

    Two layouts are equal if they place the groups alike: `loads` and `seconds` do not count. `Layout()` stands for a
    whole resident unit, whatever groups it has.
    """

    placement: PlacementName = "resident"
    ring_bytes: int = 0
    streamed: tuple[int, ...] = ()
    dequantized: tuple[int, ...] = ()
    device_bytes: int = 0
    copied: tuple[int, ...] = ()
    copied_bytes: int = 0
    from_disk: tuple[int, ...] = ()
    read_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    loads: Loads = field(default=Loads(()), compare=False, repr=False)

    def within(self, room_bytes: int, ring_bytes: int | None = None) -> Layout:
        """Return the layout of the same groups in `room_bytes`; an existing ring of `ring_bytes` is kept if it fits."""
        return place(self.loads, room_bytes, self.placement, ring_bytes)

    def on_disk(self, groups: frozenset[int], room_bytes: int) -> Layout:
        """Return the layout of the same loads when exactly `groups` are not in RAM.

        A resident layout is returned as it is: its calls read nothing.
        """
        if groups == self.loads.on_disk or self.placement == "resident":
            return self
        return place(replace(self.loads, on_disk=groups), room_bytes, self.placement)


def least_bytes(groups: Sequence[GroupLoad]) -> int:
    """Return the least bytes on the device in which the groups can run.

    That is a ring of the two largest groups, or all groups if these take less.
    """
    return min(least_ring_bytes(groups), sum(group.held_bytes for group in groups))


def least_ring_bytes(groups: Sequence[GroupLoad]) -> int:
    """Return the size of the smallest ring in which copies still overlap with computing: any two groups fit in it."""
    return sum(sorted(group.packed_bytes for group in groups)[-2:])


@functools.lru_cache(maxsize=256)
def place(
    loads: Loads, room_bytes: int, placement: PlacementName = "streamed", ring_bytes: int | None = None
) -> Layout:
    """Decide how groups lie in at most `room_bytes` on the device. The module's docstring lists the steps.

    A `resident` unit keeps all groups, even beyond the room. The room then only decides which are kept dequantized. For
    a `streamed` unit the result is the fastest layout, with seconds rounded up to 1/1000 of the compute. A room below
    `least_bytes` counts as `least_bytes`, and RAM below the windows counts as the windows. A ring of `ring_bytes` that
    exists already is kept if it fits.

    A layout with all groups dequantized may exceed the room by `loads.spared_bytes`, since its calls need that much
    less beside the weights. Pure and cached.
    """
    found = _fastest(loads, room_bytes, placement, ring_bytes)
    if loads.ram_bytes is None or loads.on_disk & set(found.copied) <= set(found.from_disk):
        return found
    # RAM holds other groups at present than would be best. Solve again for the groups that are really on disk.
    return _fastest(replace(loads, ram_bytes=None), room_bytes, placement, ring_bytes)


def _fastest(loads: Loads, room_bytes: int, placement: PlacementName, ring_bytes: int | None) -> Layout:
    """Return the fastest layout for loads that have either `ram_bytes` or `on_disk`: with both, `ram_bytes` counts."""
    groups, compute = loads.groups, loads.compute_seconds
    whole = sum(group.held_bytes for group in groups)
    room = max(room_bytes, whole if placement == "resident" else least_bytes(groups))
    if whole <= room and not any(group.is_encoded for group in groups):
        return Layout(placement, device_bytes=whole, seconds=compute, loads=loads)
    ram = math.inf if loads.ram_bytes is None else max(0, loads.ram_bytes - windows_bytes(loads.sizes))
    on_disk = loads.on_disk if loads.ram_bytes is None else frozenset()
    stay = [(0, _Choice((), whole, 0))] if whole <= room else []
    rings = _rings(groups, room, ring_bytes) if placement == "streamed" else ()
    choices = _choices(groups, loads.bytes_per_second, on_disk, rings) if rings else {}
    streamed = ((ring, choice) for ring, each in choices.items() for choice in each if ring + choice.held_bytes <= room)
    found = [*stay, *streamed]
    passing = [choice.streamed for _, choice in found]
    rooms = [room - ring - choice.held_bytes for ring, choice in found]
    decoded = dequantized_within(groups, passing, rooms)
    # With everything dequantized no call needs a workspace, whose bytes are then free for weights.
    if stay and loads.all_dequantized_bytes <= rooms[0] + loads.spared_bytes:
        decoded[0] = dequantized(groups, dequantizing_order(groups))
    options: list[tuple[float, int, int, _Option]] = []
    for one, kept in zip(found, decoded, strict=True):
        option = _Option(*one, kept)
        options.append((option.least_seconds(loads, ram), option.copied_bytes, len(options), option))
    options.sort()
    best: Layout | None = None
    for least, copied_bytes, _, option in options:
        if best and least > best.seconds:
            break
        for made in _layouts(loads, option, placement, ram, best):
            if best is None or _rank(made) < _rank(best):
                best = made
        assert best is not None
        near = best.seconds <= least + compute * _ROUNDING
        if near and not best.read_bytes and best.copied_bytes <= copied_bytes:
            break
    assert best is not None  # the room takes all groups or the least ring, so there is at least one option
    return best


def _rank(made: Layout) -> tuple[float, int, int, int]:
    """Return the key by which layouts are compared: the least is the best."""
    return made.seconds, made.read_bytes, made.copied_bytes, made.device_bytes


def _rings(groups: Sequence[GroupLoad], room: int, there: int | None) -> tuple[int, ...]:
    """Return the sizes in bytes of the rings to try, or just that of the ring that is there, if it fits."""
    least, largest = least_ring_bytes(groups), max((group.packed_bytes for group in groups), default=0)
    if there and least <= there <= room:
        return (there,)
    return tuple(sorted({least, *(times * largest for times in RINGS)}))


@dataclass(frozen=True)
class _Choice:
    """A set of groups to stream, and its bytes."""

    streamed: tuple[int, ...]
    held_bytes: int  # of the groups that stay
    streamed_bytes: int


@dataclass(frozen=True)
class _Option:
    """A ring, a set of groups to stream through it, and the other groups that are kept dequantized."""

    ring_bytes: int
    choice: _Choice
    decoded: KeptDequantized

    @property
    def copied_bytes(self) -> int:
        """Lower bound of the bytes copied in each call: up to a ring of the streamed groups may stay between calls."""
        return max(0, self.choice.streamed_bytes - self.ring_bytes)

    def least_seconds(self, loads: Loads, ram_bytes: float) -> float:
        """Return a lower bound of the seconds of a call with this option: no layout of it is faster."""
        copied = self.copied_bytes
        return max(
            loads.compute_seconds - self.decoded.saved_seconds,
            copied / loads.bytes_per_second,
            (copied - ram_bytes) / loads.disk_bytes_per_second,
        )


@functools.lru_cache(maxsize=64)
def _choices(
    groups: tuple[GroupLoad, ...], bytes_per_second: float, on_disk: frozenset[int], rings: tuple[int, ...]
) -> dict[int, tuple[_Choice, ...]]:
    """Return the sets of groups to stream through each ring. They do not depend on the room.

    Generated sets come with the fewest bytes first; the subsets of few groups come in any order.
    """
    if len(groups) <= _FEW:
        few = _sets(groups, np.array(list(itertools.product((False, True), repeat=len(groups))), bool))
        return dict.fromkeys(rings, tuple(few))
    sets = _sets(
        groups, np.vstack([_spreads(groups, bytes_per_second), *_with_disk_last(groups, bytes_per_second, on_disk)])
    )
    hidden = _sets(groups, _hidden(groups, bytes_per_second, rings))
    through = [hidden[i * _HIDDEN : (i + 1) * _HIDDEN] for i in range(len(rings))]
    return {
        ring: tuple(sorted({*sets, *own}, key=lambda choice: (choice.streamed_bytes, choice.streamed)))
        for ring, own in zip(rings, through, strict=True)
    }


def _sets(groups: Sequence[GroupLoad], rows: Sets) -> list[_Choice]:
    """Return a choice for each row of `[rows, groups]`, which streams the groups marked in that row."""
    held = np.array([group.held_bytes for group in groups], np.int64)
    packed = np.array([group.packed_bytes for group in groups], np.int64)
    passing = [tuple(np.flatnonzero(row).tolist()) for row in rows]
    return [_Choice(*each) for each in zip(passing, (~rows @ held).tolist(), (rows @ packed).tolist(), strict=True)]


def _spreads(groups: Sequence[GroupLoad], bytes_per_second: float) -> Sets:
    """Return sets of increasing copy time, spread so that copies hide behind computing: bools `[levels, groups]`."""
    transfer = [group.packed_bytes / bytes_per_second for group in groups]
    total = sum(transfer)
    # A group that computes next to nothing can hide no copy. The tiny term keeps its ratio finite: it streams last.
    compute = [group.seconds + 1e-6 * (total + 1e-12) / len(groups) for group in groups]
    times = np.array(list(_times(compute, transfer)))[:, None]
    return paid(np.minimum(transfer, times * compute), transfer)


def _hidden(groups: Sequence[GroupLoad], bytes_per_second: float, rings: Sequence[int]) -> Sets:
    """Return sets of groups whose copies hide behind computing, with the ring as the limit of prefetching.

    A group may arrive as early as the ring has room for it, so a long computation also hides the copies of later
    groups. There are `_HIDDEN` rows for each ring, with more copying for each second of computing from row to row.
    """
    transfer = [group.packed_bytes / bytes_per_second for group in groups]
    levels = np.tile(np.arange(1, _HIDDEN + 1), len(rings))[:, None]
    most = np.repeat(np.array(rings) / bytes_per_second, _HIDDEN)
    return paid(np.array([group.seconds for group in groups]) * levels * 2 / _HIDDEN, transfer, most)


def _with_disk_last(groups: Sequence[GroupLoad], bytes_per_second: float, on_disk: frozenset[int]) -> Iterator[Sets]:
    """Yield arrays of sets that stream groups on disk last.

    The first array streams only groups in RAM. The others stream all of these, and one more group on disk each.
    """
    if not on_disk:
        return
    in_ram = [replace(group, packed_bytes=0) if i in on_disk else group for i, group in enumerate(groups)]
    yield _spreads(in_ram, bytes_per_second)
    streamed = np.array([i not in on_disk for i in range(len(groups))])
    for i in spread(sorted(on_disk), [group.seconds for group in groups]):
        streamed[i] = True
        yield streamed.copy()


def _times(compute: Sequence[float], transfer: Sequence[float]) -> Iterator[float]:
    """Yield, for each level, the seconds that each group streams for each second that it computes.

    A group never streams more than its own copy. The seconds of all groups together rise in even steps from 0 to the
    whole copy.
    """
    ratios = sorted((t / c, t, c) for t, c in zip(transfer, compute, strict=True))
    whole, rest, k = 0.0, sum(compute), 0  # seconds of copies that stream whole; computing of the other groups
    for level in range(_LEVELS + 1):
        goal = sum(transfer) * level / _LEVELS
        while k < len(ratios) - 1 and goal - whole > ratios[k][0] * rest:
            whole, rest, k = whole + ratios[k][1], rest - ratios[k][2], k + 1
        yield (goal - whole) / ratios[k][2] if k == len(ratios) - 1 else (goal - whole) / rest


def _layouts(
    loads: Loads, option: _Option, placement: PlacementName, ram_bytes: float, best: Layout | None
) -> Iterator[Layout]:
    """Combine an option with each set of groups to read from disk, where RAM holds `ram_bytes` of the streamed groups.

    Yield each layout that may be better than `best`.
    """
    groups, before, sizes, disk = loads.groups, loads.before_seconds, loads.sizes, loads.disk_bytes_per_second
    ring, choice, decoded = option.ring_bytes, option.choice, option.decoded
    device_bytes = choice.held_bytes + ring + decoded.more_bytes
    least_seconds = loads.compute_seconds - decoded.saved_seconds

    def is_beaten(copied_bytes: int) -> bool:
        least = least_seconds, max(0, copied_bytes - ram_bytes), copied_bytes, device_bytes
        return best is not None and least >= _rank(best)

    if is_beaten(option.copied_bytes):
        return
    ago = _copies_ago(sizes, choice.streamed, ring)
    copied = {i: sizes[i] for i, copies_ago in zip(choice.streamed, ago, strict=True) if copies_ago}
    copied_bytes = sum(copied.values())
    if is_beaten(copied_bytes):
        return
    compute = [group.seconds for group in groups]
    for i in decoded.groups:
        compute[i] -= groups[i].decode_seconds
    transfer = [size / loads.bytes_per_second for size in sizes]

    def made(from_disk: tuple[int, ...]) -> Layout:
        read = {i: sizes[i] / disk for i in from_disk}
        seconds = step_seconds(compute, transfer, choice.streamed, ago, before, read)
        unit = _ROUNDING * loads.compute_seconds
        if not copied:
            seconds = least_seconds
        elif unit > 1e-12 * seconds:
            seconds = max(least_seconds, math.ceil(seconds / unit - 1e-6) * unit)
        return Layout(
            placement,
            ring_bytes=ring,
            streamed=choice.streamed,
            dequantized=decoded.groups,
            device_bytes=device_bytes,
            copied=tuple(copied),
            copied_bytes=copied_bytes,
            from_disk=from_disk,
            read_bytes=sum(sizes[i] for i in from_disk),
            seconds=seconds,
            loads=loads,
        )

    if copied_bytes <= ram_bytes:
        yield made(tuple(i for i in copied if i in loads.on_disk) if loads.ram_bytes is None else ())
        return
    least, within_seconds = made(()), best.seconds if best else math.inf
    if least.seconds > within_seconds:
        return
    times = [max(done, transfer[i] * (i in copied)) for i, done in enumerate(compute)]
    for from_disk in disk_choices(copied, times, int(ram_bytes)):
        over_bytes = sum(sizes[i] for i in from_disk) - within_seconds * disk
        if over_bytes > 2 * max(sizes):
            return  # later sets read as much or more, to within one group: none can be faster than the best
        if over_bytes <= 0:
            found = made(from_disk)
            within_seconds = min(within_seconds, found.seconds)
            yield found
            if found.seconds <= least.seconds:
                return


@functools.lru_cache(maxsize=2048)  # plans of several budgets ask for the same sets
def _copies_ago(sizes: tuple[int, ...], streamed: tuple[int, ...], ring_bytes: int) -> tuple[int, ...]:
    """Return the result of `overwritten` for the streamed groups in a ring of `ring_bytes`."""
    passing = [sizes[i] for i in streamed]
    return tuple(overwritten(passing, offsets(passing, ring_bytes)))
