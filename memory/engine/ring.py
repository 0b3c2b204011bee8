"""The parts of the streaming engine: groups, and the ring of bytes that they take turns in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..planning.ring_offsets import offsets
from ..weights.groups import GroupWeights
from ..weights.hostbuffer import layout, pack, pin, place_of, unpin
from ..weights.structure import ParameterRef
from .streams import Queues

# [Note: Order of the ring]
# Streamed weight groups pass through one allocation on the device. Each has a fixed slot in it, given by
# `planning.ring_offsets.offsets`: one behind the other in the order of their calls, starting again at byte 0 where the
# next would not fit. Slots therefore overlap, and two groups whose slots overlap are never there at the same time.
# For example, a ring of 100 MB gives groups of 40 MB the bytes 0-40, 40-80, 0-40 (the third overlaps the first).
#
# Two events order the work, and the host waits for neither:
# - A copy waits for the last use of the bytes that it overwrites (`RingSlot.after`, collected by `Ring.claim`). Bytes
#   and not slots are tracked (`Ring._uses`), since a slot may overwrite parts of several earlier ones.
# - A call waits for its own copy (`RingSlot.copied`).
# So a copy can be queued as soon as its slot overlaps no group that is yet to run before it. `Engine._fetch` queues
# as many as that allows, also across the end of a step: the first groups of the next step come while the last of this
# one compute.

Copy = tuple[torch.Tensor, torch.Tensor]  # from, and to
View = tuple[dict[str, Any], str, torch.Tensor]  # holder, key, and what it holds while the group runs


class State(Enum):
    """Where the weights of a group are."""

    ON_HOST = "on the host"
    STREAMED = "streamed"  # on the host, with a slot in the ring to come to
    AWAITED = "awaited"  # its room on the device is taken; no copy is queued
    COMING = "coming"  # the copies to its room are queued
    RESIDENT = "resident"
    DEQUANTIZED = "dequantized"  # resident, as plain tensors


_NEXT = {
    State.ON_HOST: {State.ON_HOST, State.STREAMED, State.AWAITED},
    State.STREAMED: {State.ON_HOST},
    State.AWAITED: {State.COMING, State.ON_HOST},
    State.COMING: {State.RESIDENT, State.ON_HOST},
    State.RESIDENT: {State.DEQUANTIZED, State.ON_HOST},
    State.DEQUANTIZED: {State.ON_HOST},
}
_RESIDENT = {State.AWAITED, State.COMING, State.RESIDENT, State.DEQUANTIZED}


@dataclass(eq=False, repr=False)
class WeightGroup(GroupWeights):
    """A group of a placed module: where its weights are, and what runs of it."""

    hosts: tuple[torch.Tensor, ...] = ()  # the flat buffers, once they were needed: of the weights, and of branches
    pinned: bool = False  # they are, so that copies from them are asynchronous
    parts: Sequence[Any] | None = None  # what a `StagingBuffers` makes it up of, if it comes through one
    state: State = State.ON_HOST
    slot: RingSlot | None = None  # in the ring
    owed: list[tuple[ParameterRef, torch.Tensor]] = field(default_factory=list)  # its room, until the weights are there
    arrived: Any = None  # event: they are there; before their copies are queued, the room is free
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def become(self, state: State) -> None:
        """Change the state. AssertionError for a change that cannot happen."""
        assert state in _NEXT[self.state], f"a group that is {self.state.value} cannot become {state.value}"
        self.state = state

    @property
    def resident(self) -> bool:
        """Return whether it has room of its own on the device."""
        return self.state in _RESIDENT

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes on the device while it is resident."""
        return self.plain_bytes if self.state is State.DEQUANTIZED else self.held_bytes

    @classmethod
    def of(cls, weights: GroupWeights) -> WeightGroup:
        """Return the group of these weights, not placed yet."""
        return cls(**vars(weights))

    def pack(self, device: torch.device) -> None:
        """Put the host weights in one buffer, which then is their only slot in RAM; pinned where that is possible."""
        if not self.hosts:
            tensors = self.stored()
            host, views = pack(tensors)
            replaced = {id(old): new for old, new in zip(tensors, views, strict=True)}
            for ref in self.refs:
                if not ref.is_branch:
                    ref.keep(replaced[id(ref.tensor)])
            self.hosts = (host, *self._pack_branches())
            self.pin(device)

    def _pack_branches(self) -> list[torch.Tensor]:
        """Pack the branches in a buffer of their own, so that weights stay where they are when LoRAs come and go."""
        if not (tensors := self.branches()):
            return []
        host, views = pack(tensors)
        with torch.inference_mode(False):
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view  # which the adapter has too
        return [host]

    def pin(self, device: torch.device) -> None:
        """Pin the buffers where that is possible."""
        self.pinned = bool(self.hosts) and all(pin(host, device) for host in self.hosts)
        if not self.pinned:
            self.unpin()

    def unpin(self) -> None:
        """Unpin the buffers' pages. No copy from them may be under way."""
        for host in self.hosts:
            unpin(host)
        self.pinned = False


@dataclass(eq=False, repr=False)
class RingSlot:
    """The bytes of the ring that one group comes to, which others overlap."""

    group: WeightGroup
    memory: torch.Tensor
    begin: int
    used: Any  # event: the last call of the group there is done
    copied: Any  # event: the weights are there
    holds: bool = False  # they are, or are on their way
    after: list[Any] = field(default_factory=list)  # events: the last uses of what the copy overwrites
    pending: Any = None  # what the slot waits for, where the copy could not be queued yet
    overlaps: list[RingSlot] = field(default_factory=list)
    _views: list[View] | None = None

    @property
    def end(self) -> int:
        """The first byte of the ring behind it."""
        return self.begin + self.group.packed_bytes

    def receive(self, flats: Sequence[torch.Tensor], queues: Queues) -> None:
        """Queue the copies of the weights from flat buffers in RAM, behind the last use of the bytes."""
        begin = 0
        for flat in flats:
            queues.copy(self.memory[begin : begin + flat.nbytes], flat, self.after, self.copied)
            begin += flat.nbytes

    def enter(self) -> None:
        """Make the group's parameters and buffers views into the ring, until its `restore`."""
        if self._views is None:
            self._views = self._make_views()
        for holder, key, view in self._views:
            holder[key] = view

    def _make_views(self) -> list[View]:
        tensors = self.group.tensors()
        with torch.inference_mode(False), torch.no_grad():
            offsets_of = zip(tensors, layout(tensors)[0], strict=True)
            made = {id(tensor): place_of(self.memory, offset, tensor) for tensor, offset in offsets_of}
            return [
                (ref.holder, ref.key, made[id(ref.tensor)])
                if ref.shown is None
                else (vars(ref), "here", made[id(ref.tensor)])
                for ref in self.group.refs
            ]


class Ring:
    """Memory on the device that groups pass through, each in its slot. See [Note: Order of the ring]."""

    def __init__(self, nbytes: int, queues: Queues) -> None:
        self.nbytes = nbytes
        self._queues = queues
        # An ordinary tensor, which may be written to in and outside inference mode.
        with torch.inference_mode(False):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=queues.device)
        self.slots: list[RingSlot] = []
        self._uses: list[tuple[int, int, Any]] = []  # from byte to byte: the event that they are no longer used
        self.most_at_a_time = 0  # of slots, as they follow each other

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the ring."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def lay(self, groups: Sequence[WeightGroup], seldom: Iterable[WeightGroup] = ()) -> None:
        """Give these groups slots, in their order, and no others save those that come `seldom`, where they fit.

        What is in the ring is there no longer: nothing of it may run.
        """
        self.clear()
        begins = offsets([group.packed_bytes for group in groups], self.nbytes)
        fitting = [group for group in seldom if group.packed_bytes <= self.nbytes]
        for group, begin in [*zip(groups, begins, strict=True), *((group, 0) for group in fitting)]:
            memory = self._memory[begin : begin + group.packed_bytes]
            group.slot = RingSlot(group, memory, begin, self._queues.event(), self._queues.event())
            group.become(State.STREAMED)
            self.slots.append(group.slot)
        free = self._queues.event()
        self._queues.mark(free)  # work that is queued may still read what was there before
        self._uses = [(0, self.nbytes, free)]
        for slot in self.slots:
            slot.overlaps = [
                other for other in self.slots if other is not slot and other.begin < slot.end and slot.begin < other.end
            ]
        self.most_at_a_time = max((self._room_after(i, len(groups)) for i in range(len(groups))), default=0)

    def claim(self, slot: RingSlot) -> list[RingSlot]:
        """Take the bytes of a slot from whatever is there. Returns the slots that hold their groups no longer."""
        lost = [other for other in slot.overlaps if other.holds]
        for other in lost:
            other.holds = False
        slot.after = [event for begin, end, event in self._uses if begin < slot.end and slot.begin < end]
        return lost

    def used(self, slot: RingSlot) -> None:
        """Note that the group there runs no longer, once what this thread has queued so far is done."""
        self._queues.mark(slot.used)
        kept: list[tuple[int, int, Any]] = []
        for begin, end, event in self._uses:
            parts = ((begin, min(end, slot.begin)), (max(begin, slot.end), end))
            kept += [(first, last, event) for first, last in parts if first < last]
        self._uses = [*kept, (slot.begin, slot.end, slot.used)]

    def clear(self) -> None:
        """Take the slots away."""
        for slot in self.slots:
            slot.group.slot = None
            slot.group.become(State.ON_HOST)
            slot.overlaps.clear()  # they know each other, and would wait for the collector with their memory
        self.slots, self._uses = [], []

    def _room_after(self, first: int, count: int) -> int:
        """Return how many of the first `count` slots there are from one on before they overlap."""
        taken: list[RingSlot] = []
        for i in range(count):
            slot = self.slots[(first + i) % count]
            if any(other in taken for other in slot.overlaps):
                break
            taken.append(slot)
        return len(taken)
