"""Which groups of a module stay on the device, decoded or as stored, which stream from RAM and which from disk, and
through how large a ring.

A pure function of what groups weigh and compute, of the room on the device and in RAM, and of the rates. It looks at
arrangements that do not depend on the room, and takes the fastest that fits: so it is never over, and more room is
never slower.
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
from .decoded import Decoded, decoded_within, decoding_order, dequantized
from .ring_offsets import offsets, overwritten, step_seconds
from .tiers import Sets, disk_choices, paid, spread, windows_bytes

RINGS = (2, 3, 4, 5, 6, 8, 12, 16)  # sizes of rings to look at, in largest groups; below two nothing overlaps
_LEVELS = 256  # of how much stays
_HIDDEN = 64  # of how much is copied for each second of computing, up to twice what this hides
_ROUNDING = 1e-3  # of the computing: what is less is no reason to copy more
_FEW = 10  # groups, of which all choices are looked at


@dataclass(frozen=True)
class GroupLoad:
    """A group: its bytes in a flat buffer, with the gaps that this has, and without; and what its call computes.

    Decoding takes `decode_seconds` of these, which it does not where the group stays decoded: that takes `more_bytes`
    than as stored, and `moment_bytes` beside while it is done.
    """

    packed_bytes: int
    held_bytes: int
    seconds: float = 0.0
    decode_seconds: float = 0.0
    more_bytes: int = 0
    moment_bytes: int = 0

    @property
    def is_encoded(self) -> bool:
        """Return whether it may be dequantized for good."""
        return self.decode_seconds > 0 or self.more_bytes != 0


class HasSizes(Protocol):
    """A group, or what is known of one."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...


@dataclass(frozen=True)
class Loads:
    """The groups of a call in their order, the rate at which they come, and the computing ahead of the first.

    What is not in RAM is read at a rate of its own. Those are the groups `on_disk` or, with `ram_bytes`, whichever are
    best, where RAM holds no more than that of groups that stream, windows included. After a call that comes `once` the
    weights leave. Where all groups are dequantized for good, calls take `spared_bytes` less beside the weights.
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
        """Bytes that all groups take more to be dequantized for good."""
        return dequantized(self.groups, decoding_order(self.groups)).more_bytes

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the flat buffers."""
        return tuple(group.packed_bytes for group in self.groups)

    @functools.cached_property
    def compute_seconds(self) -> float:
        """Seconds that a call computes in all."""
        return self.before_seconds + sum(group.seconds for group in self.groups)

    def computing(self, seconds: float) -> Loads:
        """Return the same for a call that computes so long in all, in the same proportions."""
        times = seconds / self.compute_seconds if self.compute_seconds else 0.0
        groups = tuple(replace(group, seconds=group.seconds * times) for group in self.groups)
        return replace(self, groups=groups, before_seconds=self.before_seconds * times)

    @classmethod
    def even(cls, groups: Iterable[HasSizes]) -> Loads:
        """Return loads of groups that compute for as long as they are copied, for when nothing is known."""
        return cls(tuple(GroupLoad(p.packed_bytes, p.held_bytes, float(p.packed_bytes)) for p in groups))


@dataclass(frozen=True)
class Layout:
    """How the groups of a unit lie on the device during its calls: decided by `place`, made true by the engine.

    Groups are numbered in the order of their calls. Those `streamed` pass through a ring of `ring_bytes`, the others
    stay, of which those `dequantized` do so as plain tensors. They take `device_bytes` in all, ring included, and a
    call takes `seconds`. Each call copies the groups `copied`, of `copied_bytes`, and reads those `from_disk`, of
    `read_bytes`, first. Layouts are equal that lie alike, whatever `loads` they were placed for and however long calls
    take.

    A `resident` layout without anything else is that of a whole unit, whatever groups it has.
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
        """Return the layout of the same groups in another room; a ring of `ring_bytes` stays, if it can."""
        return place(self.loads, room_bytes, self.placement, ring_bytes)

    def on_disk(self, groups: frozenset[int], room_bytes: int) -> Layout:
        """Return the layout where just these groups are not in RAM."""
        if groups == self.loads.on_disk or self.placement == "resident":
            return self
        return place(replace(self.loads, on_disk=groups), room_bytes, self.placement)


def least_bytes(groups: Sequence[GroupLoad]) -> int:
    """Return the least on the device that groups can be run in.

    A ring of the two largest, or all of them if that is less.
    """
    return min(least_ring_bytes(groups), sum(group.held_bytes for group in groups))


def least_ring_bytes(groups: Sequence[GroupLoad]) -> int:
    """Return the smallest ring: copies to it still overlap with computing."""
    return RINGS[0] * max((group.packed_bytes for group in groups), default=0)


@functools.lru_cache(maxsize=256)
def place(
    loads: Loads, room_bytes: int, placement: PlacementName = "streamed", ring_bytes: int | None = None
) -> Layout:
    """Decide how groups lie in at most `room_bytes` on the device.

    Of a `resident` unit all stay, in more room than there is if need be; the room decides what is dequantized for good.
    Of one that may be `streamed` the layout is the fastest; of equally fast ones that which reads least, then that
    which copies least. Its seconds are rounded up, to a thousandth of the computing. Less room than `least_bytes` is
    taken as that, and less RAM than the windows as these. A ring of `ring_bytes` that is there stays, if it can.
    """
    found = _fastest(loads, room_bytes, placement, ring_bytes)
    if loads.ram_bytes is None or loads.on_disk & set(found.copied) <= set(found.from_disk):
        return found
    # RAM holds other groups than would be best.
    return _fastest(replace(loads, ram_bytes=None), room_bytes, placement, ring_bytes)


def _fastest(loads: Loads, room_bytes: int, placement: PlacementName, ring_bytes: int | None) -> Layout:
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
    decoded = decoded_within(groups, passing, rooms)
    if stay and loads.all_dequantized_bytes <= rooms[0] + loads.spared_bytes:
        decoded[0] = dequantized(groups, decoding_order(groups))
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
    assert best is not None  # all may stream through the least ring
    return best


def _rank(made: Layout) -> tuple[float, int, int, int]:
    return made.seconds, made.read_bytes, made.copied_bytes, made.device_bytes


def _rings(groups: Sequence[GroupLoad], room: int, there: int | None) -> tuple[int, ...]:
    least = least_ring_bytes(groups)
    if there and least <= there <= room:
        return (there,)
    return tuple(times * least // RINGS[0] for times in RINGS)


@dataclass(frozen=True)
class _Choice:
    streamed: tuple[int, ...]
    held_bytes: int  # of those that stay
    streamed_bytes: int


@dataclass(frozen=True)
class _Option:
    ring_bytes: int
    choice: _Choice
    decoded: Decoded

    @property
    def copied_bytes(self) -> int:
        """The least in each call: up to a ring of them may lie there for good."""
        return max(0, self.choice.streamed_bytes - self.ring_bytes)

    def least_seconds(self, loads: Loads, ram_bytes: float) -> float:
        """No arrangement of it is faster."""
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
    """Return the sets of groups to stream through each ring, fewest bytes first. They do not depend on the room."""
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
    """Return the choices that stream what is marked in each row of `[rows, groups]`."""
    held = np.array([group.held_bytes for group in groups], np.int64)
    packed = np.array([group.packed_bytes for group in groups], np.int64)
    passing = [tuple(np.flatnonzero(row).tolist()) for row in rows]
    return [_Choice(*each) for each in zip(passing, (~rows @ held).tolist(), (rows @ packed).tolist(), strict=True)]


def _spreads(groups: Sequence[GroupLoad], bytes_per_second: float) -> Sets:
    """Yield sets of ever more seconds of copying, spread so that each copy has computing to hide behind."""
    transfer = [group.packed_bytes / bytes_per_second for group in groups]
    total = sum(transfer)
    # What computes next to nothing can hide no copy, and streams last.
    compute = [group.seconds + 1e-6 * (total + 1e-12) / len(groups) for group in groups]
    times = np.array(list(_times(compute, transfer)))[:, None]
    return paid(np.minimum(transfer, times * compute), transfer)


def _hidden(groups: Sequence[GroupLoad], bytes_per_second: float, rings: Sequence[int]) -> Sets:
    """Return what is hidden behind computing where a group may come as long before its call as a ring has room for it.

    So what computes long makes up for what comes after it. For each ring, `_HIDDEN` rows of ever more copying for each
    second of computing.
    """
    transfer = [group.packed_bytes / bytes_per_second for group in groups]
    levels = np.tile(np.arange(1, _HIDDEN + 1), len(rings))[:, None]
    most = np.repeat(np.array(rings) / bytes_per_second, _HIDDEN)
    return paid(np.array([group.seconds for group in groups]) * levels * 2 / _HIDDEN, transfer, most)


def _with_disk_last(groups: Sequence[GroupLoad], bytes_per_second: float, on_disk: frozenset[int]) -> Iterator[Sets]:
    """Yield sets of ever more groups in RAM, while all else stays; then of the rest too."""
    if not on_disk:
        return
    in_ram = [replace(group, packed_bytes=0) if i in on_disk else group for i, group in enumerate(groups)]
    yield _spreads(in_ram, bytes_per_second)
    streamed = np.array([i not in on_disk for i in range(len(groups))])
    for i in spread(sorted(on_disk), [group.seconds for group in groups]):
        streamed[i] = True
        yield streamed.copy()


def _times(compute: Sequence[float], transfer: Sequence[float]) -> Iterator[float]:
    """Yield how many times its computing each group is to stream, of its copy at most, for ever more seconds in all."""
    ratios = sorted((t / c, t, c) for t, c in zip(transfer, compute, strict=True))
    whole, rest, k = 0.0, sum(compute), 0  # copies that stream whole, and the computing of the other groups
    for level in range(_LEVELS + 1):
        goal = sum(transfer) * level / _LEVELS
        while k < len(ratios) - 1 and goal - whole > ratios[k][0] * rest:
            whole, rest, k = whole + ratios[k][1], rest - ratios[k][2], k + 1
        yield (goal - whole) / ratios[k][2] if k == len(ratios) - 1 else (goal - whole) / rest


def _layouts(
    loads: Loads, option: _Option, placement: PlacementName, ram_bytes: float, best: Layout | None
) -> Iterator[Layout]:
    """Combine an option with each set of groups to come from disk, where RAM holds `ram_bytes` of those that stream.

    Yields each that may be better than the best so far.
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
            return  # all that follow read more, but for a group
        if over_bytes <= 0:
            found = made(from_disk)
            within_seconds = min(within_seconds, found.seconds)
            yield found
            if found.seconds <= least.seconds:
                return


@functools.lru_cache(maxsize=2048)  # budgets share it
def _copies_ago(sizes: tuple[int, ...], streamed: tuple[int, ...], ring_bytes: int) -> tuple[int, ...]:
    passing = [sizes[i] for i in streamed]
    return tuple(overwritten(passing, offsets(passing, ring_bytes)))
