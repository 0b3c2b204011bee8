"""The ring: the device memory that streamed weight groups pass through, and the state of each group.

Read this file first. The trip of one weight, from its file to the matmul that uses it:

1. `weights.groups.divide` cuts the module into weight groups, in call order; each becomes a `WeightGroup`.
2. `planning.solver.place` decides which groups stay resident and which stream, and returns a frozen `Layout`.
3. `engine.Engine` makes that layout true: it owns the ring and a gate around every module of a group.
4. `weights.reader.Reading` reads the file into RAM, one flat buffer for each group (`WeightGroup.hosts`).
5. `weight_source.WeightSource` picks the way to the device: pinned RAM is copied from directly, while pageable RAM and
   files go through the pinned buffers of `staging_buffers.StagingBuffers`.
6. `Ring.claim` takes the bytes of the group's `RingSlot` from older groups, and collects the events to wait for.
7. `streams.Queues.copy` queues an asynchronous copy on the copy stream, behind those events, while other groups run.
8. When the first module of the group is called, its gate makes the compute stream wait for that copy.
9. `RingSlot.enter` makes the module's parameters views into the ring, `dequantize.Workspace` dequantizes encoded ones
   for the call of their module, and the matmul runs.
10. When another group is called, `Ring.used` records the event that frees the bytes, and the module's parameters are
    the host tensors again: weights are read-only, so nothing is copied back.

A resident group skips the ring. `deferred_uploads.DeferredUploads` allocates its own device memory and uploads it once.
Prefetch is step 7 done early: `Engine._fetch` queues the copies of the next groups when a group begins or a call ends.
A module that runs from disk skips step 4: its groups are read into the staging buffers, call after call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
# `planning.ring_offsets.offsets`: slots follow each other in call order, and wrap around to byte 0 where the next one
# would not fit. Slots therefore overlap, and the device never holds two groups whose slots overlap.
# For example, a ring of 100 MB gives groups of 40 MB the bytes 0-40, 40-80, 0-40 (the third overlaps the first).
# Slots of equal size would be simpler, but each would have to be as large as the largest group.
#
# Two kinds of events order the work, and the host waits for neither:
# - A copy waits for the last use of the bytes that it overwrites (`RingSlot.after`, collected by `Ring.claim`). Bytes
#   are tracked and not slots (`Ring._uses`), since one slot may overwrite parts of several earlier ones.
# - A call waits for its own copy (`RingSlot.copied`).
# So a copy can be queued as soon as its slot overlaps no group that is to run before it. `Engine._fetch` queues as
# many copies as that allows, also across the end of a step: the first groups of the next step are copied while the
# last groups of this one compute.

Copy = tuple[torch.Tensor, torch.Tensor]  # source, target
View = tuple[dict[str, Any], str, torch.Tensor]  # holder, key, and the view that it holds while the group runs


class State(Enum):
    """Where the weights of a group are. `WeightGroup.become` changes it, along `_NEXT` only."""

    ON_HOST = "on the host"
    STREAMED = "streamed"  # has a slot in the ring, whether its weights are in it or not
    AWAITED = "awaited"  # its own device memory is allocated; no copy is queued
    COMING = "coming"  # the copies to its own device memory are queued
    RESIDENT = "resident"  # work that is queued now finds the weights on the device, as stored
    DEQUANTIZED = "dequantized"  # resident, as plain tensors


_NEXT = {
    State.ON_HOST: {State.ON_HOST, State.STREAMED, State.AWAITED},  # to itself: `Engine._remove` resets every group
    State.STREAMED: {State.ON_HOST},
    State.AWAITED: {State.COMING, State.ON_HOST},
    State.COMING: {State.RESIDENT, State.ON_HOST},
    State.RESIDENT: {State.DEQUANTIZED, State.ON_HOST},
    State.DEQUANTIZED: {State.ON_HOST},
}
_RESIDENT = {State.AWAITED, State.COMING, State.RESIDENT, State.DEQUANTIZED}


@dataclass(eq=False, repr=False)
class WeightGroup(GroupWeights):
    """A weight group of a module in place: where its weights are, and the device memory that it has.

    A group takes one of two ways to the device. A streamed one has a `slot` in the ring; `RingSlot.holds` tells if its
    weights are there. A resident one has memory of its own: `owed` lists the copies that are still to come. `Placement`
    makes the groups; `Engine`, `Ring`, `WeightSource` and `DeferredUploads` change them.
    """

    hosts: tuple[torch.Tensor, ...] = ()  # flat buffers in RAM, made by `pack`: the weights, then the LoRA branches
    pinned: bool = False  # all of `hosts` are page-locked, so that copies from them are asynchronous
    parts: Sequence[Any] | None = None  # `staging_buffers.Part`s that a staging buffer is filled with; None without one
    state: State = State.ON_HOST
    slot: RingSlot | None = None
    owed: list[tuple[ParameterRef, torch.Tensor]] = field(default_factory=list)  # device memory without weights yet
    arrived: Any = None  # event: AWAITED: the memory is free to be written; COMING: the copies are done

    def become(self, state: State) -> None:
        """Change the state. Raise AssertionError for a change that `_NEXT` does not list."""
        assert state in _NEXT[self.state], f"a group that is {self.state.value} cannot become {state.value}"
        self.state = state

    @property
    def resident(self) -> bool:
        """Return whether the group has device memory of its own, with its weights or allocated for them."""
        return self.state in _RESIDENT

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory while the group is resident: plain ones if it is kept dequantized, else as stored."""
        return self.plain_bytes if self.state is State.DEQUANTIZED else self.held_bytes

    @classmethod
    def of(cls, weights: GroupWeights) -> WeightGroup:
        """Return a group of these weights that is on the host."""
        return cls(**vars(weights))

    def pack(self, device: torch.device) -> None:
        """Pack the host weights into one flat buffer, and pin it where the device allows.

        The module's host tensors become views into the buffer, so that RAM holds the weights once. Does nothing for a
        group that is packed already. Weights that are still being read must have come: see `WeightSource._pack`.
        """
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
        """Pack the LoRA branches into a second buffer, so that the weights need not move when LoRAs change."""
        if not (tensors := self.branches()):
            return []
        host, views = pack(tensors)
        with torch.inference_mode(False):
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view  # the adapter refers to the same tensor, and would keep the old memory
        return [host]

    def pin(self, device: torch.device) -> None:
        """Pin the buffers, all or none. `pinned` tells the result."""
        self.pinned = bool(self.hosts) and all(pin(host, device) for host in self.hosts)
        if not self.pinned:
            self.unpin()

    def unpin(self) -> None:
        """Unpin the buffers. No copy from them may be under way."""
        for host in self.hosts:
            unpin(host)
        self.pinned = False


@dataclass(eq=False, repr=False)
class RingSlot:
    """The bytes `begin` to `end` of the ring, which one group is copied to. Other slots may overlap them."""

    group: WeightGroup
    memory: torch.Tensor
    begin: int
    used: Any  # event: the last call of the group in the slot is done
    copied: Any  # event: the copy to the slot is done
    holds: bool = False  # the group's weights are in the slot, or their copy was asked for
    after: list[Any] = field(default_factory=list)  # events: the last uses of the bytes that the copy overwrites
    pending: Any = None  # the `_Fill` of a staging buffer that the copy waits for; None once it is queued
    overlaps: list[RingSlot] = field(default_factory=list)
    _views: list[View] | None = None

    @property
    def end(self) -> int:
        """The first byte of the ring behind the slot."""
        return self.begin + self.group.packed_bytes

    def receive(self, flats: Sequence[torch.Tensor], queues: Queues) -> None:
        """Queue the copies from flat buffers in RAM to the slot, one behind the other, on the copy stream.

        The buffers are `WeightGroup.hosts`, or one filled staging buffer. Each copy waits for the events in `after`.
        The `copied` event follows the last one.
        """
        begin = 0
        for flat in flats:
            queues.copy(self.memory[begin : begin + flat.nbytes], flat, self.after, self.copied)
            begin += flat.nbytes

    def enter(self) -> None:
        """Make the group's parameters and buffers views into the ring, until `WeightGroup.restore`."""
        if self._views is None:
            self._views = self._make_views()
        for holder, key, view in self._views:
            holder[key] = view

    def _make_views(self) -> list[View]:
        """Return the views, made once for each slot.

        The view of an encoded weight is its stored bytes. It goes to `ParameterRef.here`, where the workspace looks for
        it.
        """
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
    """One allocation on the device that weight groups pass through, each in its slot. See [Note: Order of the ring].

    `Engine` calls it, under its lock. Nothing here makes the host wait.
    """

    def __init__(self, nbytes: int, queues: Queues) -> None:
        self.nbytes = nbytes
        self._queues = queues
        # Made in inference mode, it could not be written to outside of it.
        with torch.inference_mode(False):
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=queues.device)
        self.slots: list[RingSlot] = []
        self._uses: list[tuple[int, int, Any]] = []  # begin, end, event: the last use of these bytes is done
        self.most_at_a_time = 0  # most slots in a row that do not overlap: how far prefetch can reach

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view into the ring. `Placement._kept` clones results of modules that are."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def lay(self, groups: Sequence[WeightGroup], seldom: Iterable[WeightGroup] = ()) -> None:
        """Give these `groups` slots in call order, and take away all earlier slots.

        Groups that are `seldom` called, as far as is known, get a slot at byte 0 if they fit in the ring. The content
        of the ring is lost, so no group in it may run. `nbytes` must be at least the largest of `groups`.
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
        self._queues.mark(free)  # work that is queued may still read the groups of the old slots
        self._uses = [(0, self.nbytes, free)]
        for slot in self.slots:
            slot.overlaps = [
                other for other in self.slots if other is not slot and other.begin < slot.end and slot.begin < other.end
            ]
        self.most_at_a_time = max((self._room_after(i, len(groups)) for i in range(len(groups))), default=0)

    def claim(self, slot: RingSlot) -> list[RingSlot]:
        """Take the bytes of a slot from the groups that hold them. Return the slots whose content is lost.

        Fills `slot.after` with the events that the next copy to the slot must wait for.
        """
        lost = [other for other in slot.overlaps if other.holds]
        for other in lost:
            other.holds = False
        slot.after = [event for begin, end, event in self._uses if begin < slot.end and slot.begin < end]
        return lost

    def used(self, slot: RingSlot) -> None:
        """Record that the group in the slot has run, behind all work that this thread has queued so far."""
        self._queues.mark(slot.used)
        # Cut the slot's bytes out of earlier uses: a later copy there then waits for this event alone.
        kept: list[tuple[int, int, Any]] = []
        for begin, end, event in self._uses:
            parts = ((begin, min(end, slot.begin)), (max(begin, slot.end), end))
            kept += [(first, last, event) for first, last in parts if first < last]
        self._uses = [*kept, (slot.begin, slot.end, slot.used)]

    def clear(self) -> None:
        """Take all slots away: their groups are on the host."""
        for slot in self.slots:
            slot.group.slot = None
            slot.group.become(State.ON_HOST)
            slot.overlaps.clear()  # a cycle: the device memory would stay until the garbage collector runs
        self.slots, self._uses = [], []

    def _room_after(self, first: int, count: int) -> int:
        """Return how many of the first `count` slots, from `first` on and around, follow each other without overlap."""
        taken: list[RingSlot] = []
        for i in range(count):
            slot = self.slots[(first + i) % count]
            if any(other in taken for other in slot.overlaps):
                break
            taken.append(slot)
        return len(taken)
