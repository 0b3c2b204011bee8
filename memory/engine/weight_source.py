"""The source of a streamed module's weights: pinned RAM where that can be had, else the windows of `StagingBuffers`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import release_frames
from ..planning.ring_offsets import WINDOWS
from ..weights import hostbuffer
from ..weights.encoding import Source, extents, file_bytes
from ..weights.reader import BATCH_BYTES
from ..weights.stored import Stored
from .pending_reads import NOTHING, PendingReads
from .ring import Copy, RingSlot, WeightGroup
from .staging_buffers import StagingBuffers, parts_of
from .streams import Queues


class WeightSource:
    """Brings groups to the ring, and other weights to the device. `close` must follow.

    `on_disk` tells, by `id` of the parameters on `meta`, where they lie in files; empty for a module that is in RAM,
    or `incoming`.
    Windows are as large as the largest of the groups that stream or, where none do, as the largest tensor of
    `tensor_bytes`.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        queues: Queues,
        on_disk: Mapping[int, Source],
        tensor_bytes: int,
        incoming: PendingReads = NOTHING,
    ) -> None:
        self._groups = groups
        self._queues = queues
        self._window_bytes = max((group.packed_bytes for group in groups), default=min(BATCH_BYTES, tensor_bytes))
        self._on_disk = on_disk
        self._incoming = incoming
        self._staging: StagingBuffers | None = None
        self._flow: Generator[None, None, None] | None = None  # brings what is to stay, group by group
        self._awaited: deque[int] = deque()  # the groups that it has not brought, by `id` of their first targets
        self.reach = 0  # how many groups that come through windows can be on their way beyond those in the ring

    @property
    def host_bytes(self) -> int:
        """RAM taken by windows."""
        return self._staging.held_bytes if self._staging else 0

    def open(self) -> None:
        """Make the windows, if weights are on disk."""
        if self._on_disk and not self._staging:
            self._staging, self.reach = self._new_staging(), WINDOWS
            self._staging.pin()

    def settle(self) -> None:
        """Wait until nothing is being read, and no copy is under way."""
        if self._staging:
            self._staging.settle()
        self._queues.finish()

    def close(self) -> None:
        """End the threads and let go of the windows."""
        self.stop()
        if self._staging:
            self._staging.close()
            self._staging, self.reach = None, 0

    def bring(self, wanted: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
        """Read the wanted tensors that are on disk to the device. Return them by the `id` of the wanted one."""
        fresh = {id(t): torch.empty_like(t, device=device) for t in wanted if id(t) in self._on_disk}
        try:
            self.fill([(t, fresh[id(t)]) for t in wanted if id(t) in fresh])
        except BaseException as error:
            fresh.clear()
            release_frames(error)  # whoever shows the error would hold the tensors
            raise
        return fresh

    def fill(self, wanted: Sequence[Copy]) -> None:
        """Read tensors that are on disk to those on the device, once each."""
        if not wanted or not self._staging:
            return
        if self._flow and id(wanted[0][1]) in self._awaited:
            self._follow(id(wanted[0][1]))
        else:
            self._staging.bring(self._targets(wanted))
        self.passed([tensor for tensor, _ in wanted])

    def passed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that these have come, of which some are on disk."""
        self._incoming.progress.passes(self.file_bytes(tensors))

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that these are going to come."""
        self._incoming.progress.expect(self.file_bytes(tensors))

    def file_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the bytes of files that hold these, as far as they are on disk."""
        return sum(file_bytes(self._on_disk[key]) for key in {id(tensor) for tensor in tensors} & self._on_disk.keys())

    def follow(self, groups: Sequence[Sequence[Copy]]) -> None:
        """Read these to the device, one after the other, each no later than `fill` asks for it. `stop` ends it."""
        self.stop()
        if groups and self._staging:
            self._flow = self._staging.bringing([self._targets(copies) for copies in groups])
            self._awaited = deque(id(copies[0][1]) for copies in groups)

    def stop(self) -> None:
        """Read no longer ahead what `follow` was told; `fill` still reads it."""
        if self._flow:
            self._flow.close()
        self._flow = None
        self._awaited.clear()

    def _follow(self, wanted: int) -> None:
        """Bring groups until a wanted one has come."""
        assert self._flow
        try:
            while wanted in self._awaited:
                next(self._flow)
                self._awaited.popleft()
        except BaseException:
            self.stop()
            raise

    def _targets(self, copies: Sequence[Copy]) -> list[tuple[Stored, torch.Tensor]]:
        once = {id(tensor): (tensor, target) for tensor, target in copies}.values()
        return [pair for tensor, target in once for pair in _targets(self._on_disk[id(tensor)], target)]

    def await_ram(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until weights that are being read to RAM have come there. Raises what the reading raised."""
        self._incoming.wait(tensors)

    def begin(self) -> None:
        """Begin reading the weights that go to RAM."""
        self._incoming.begin()

    def await_disk(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make work that is queued from now on wait for a simulated disk."""
        for event in self._incoming.events(tensors):
            self._queues.wait(event)

    def events(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return what copies of these must wait for, where the disk is simulated."""
        return self._incoming.events(tensors)

    def in_ram(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether nothing of these is still being read to RAM."""
        return self._incoming.has(tensors)

    @property
    def has_windows(self) -> bool:
        """Return whether there are windows."""
        return self._staging is not None

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return whether one of the host's tensors is not in RAM, and comes from disk."""
        return id(tensor) in self._on_disk

    def is_on_disk(self, group: WeightGroup) -> bool:
        """Return whether a group's weights are not in RAM."""
        return bool(self._on_disk) and any(self.reads(ref.tensor) for ref in group.refs)

    def prepare(self, groups: list[WeightGroup]) -> None:
        """Make groups ready to be streamed: in pinned memory where they may be, or through the windows."""
        in_ram = [group for group in groups if not self.is_on_disk(group)]
        through = [group for group in groups if group not in in_ram]
        for group in in_ram:
            self._pack(group)
        wants_pinned = self._queues.copying and hostbuffer.wants_pinned(self._queues.device)
        if wants_pinned and not all(p.pinned for p in in_ram) and (self._staging or self._make_windows()):
            through += [group for group in self._groups if group.hosts and not group.pinned]
        for group in through:
            group.parts = group.parts or parts_of(group, self._on_disk)

    def pin_too(self, groups: Sequence[WeightGroup]) -> None:
        """Pin what stays on the device as well, while it is being read: it comes there faster, this time and again."""
        if self._incoming.is_under_way and not self._staging and hostbuffer.wants_pinned(self._queues.device):
            for group in groups:
                self._pack(group)

    def _pack(self, group: WeightGroup) -> None:
        if not group.hosts and not hostbuffer.is_packed(group.stored()):
            self.await_ram(group.stored())  # or what has not come yet would be copied
        group.pack(self._queues.device)

    def load(self, slot: RingSlot) -> None:
        """Send a group to its slot, behind those before it. `wait` must be asked before its `copied` event."""
        if events := self.events(slot.group.hosts):
            slot.after = [*slot.after, *events]
        if self._staging:
            self._staging.load(slot)
            return
        slot.receive(slot.group.hosts, self._queues)

    def has_room(self, group: WeightGroup) -> bool:
        """Return whether a group can start for the ring without holding up another or waiting for RAM."""
        if not self.in_ram(group.hosts):
            return False
        return self._staging is None or not group.parts or self._staging.has_room(group)

    def forget(self, slot: RingSlot) -> None:
        """Cancel the copy to a slot if it has not been sent yet."""
        if self._staging:
            self._staging.forget(slot)

    def wait(self, slot: RingSlot) -> None:
        """Wait until the copy to a slot has been queued. Returns at once for what comes straight from RAM."""
        if slot.pending and self._staging:
            self._staging.wait(slot)

    def ahead(self, upcoming: Sequence[WeightGroup]) -> None:
        """Read on: the groups that come next through windows, of which those in the ring are there already."""
        if self._staging:
            wanted = [p for p in upcoming if not (p.slot and p.slot.holds) and self.in_ram(p.hosts)]
            self._staging.ahead(wanted[: self.reach])

    def _new_staging(self) -> StagingBuffers:
        return StagingBuffers(self._queues, self._window_bytes)

    def _make_windows(self) -> bool:
        """Pin windows for the groups that are not pinned, if need be in the place of some that are."""
        stager = self._new_staging()
        pinned = [group for group in self._groups if group.pinned]
        given_up: list[WeightGroup] = []
        self._queues.finish()  # the copies out of what is unpinned here
        while not stager.pin():
            if not pinned:
                stager.close()
                for group in given_up:
                    group.pin(self._queues.device)
                return False
            given_up.append(pinned.pop())
            given_up[-1].unpin()
        self._staging, self.reach = stager, WINDOWS
        return True


def _targets(source: Source, tensor: torch.Tensor) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Yield what is read for a tensor, each with the part of it where that goes."""
    for stored, begin in extents(source):
        whole = isinstance(source, Stored)
        yield stored, tensor if whole else tensor[begin : begin + stored.shape[0]]
