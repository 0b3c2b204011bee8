"""The source of a module's weights: pinned RAM where it can be had, else the staging buffers."""

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
    """Brings streamed groups to the ring, and other weights to the device. `close` must follow.

    `on_disk` has the place in files of each parameter on `meta`, by `id`. It is empty for a module that is in RAM or
    being read to RAM, which `incoming` tells. Staging buffers ("windows") are as large as the largest of `groups`.
    Without groups they have `tensor_bytes`, the largest tensor, and 16 MB at most.
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
        self._flow: Generator[None, None, None] | None = None  # of `follow`: brings one resident group at each step
        self._awaited: deque[int] = deque()  # groups that `_flow` has not brought, by `id` of their first targets
        self.reach = 0  # groups that can be in staging buffers, beyond those in the ring

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM taken by staging buffers."""
        return self._staging.held_bytes if self._staging else 0

    def open(self) -> None:
        """Make the staging buffers, if weights are on disk."""
        if self._on_disk and not self._staging:
            self._staging, self.reach = self._new_staging(), WINDOWS
            self._staging.pin()

    def wait_for_reads(self) -> None:
        """Wait until nothing is being read into staging buffers, and no copy is under way."""
        if self._staging:
            self._staging.wait_for_reads()
        self._queues.finish()

    def close(self) -> None:
        """End the reader threads, and free the staging buffers."""
        self.stop()
        if self._staging:
            self._staging.close()
            self._staging, self.reach = None, 0

    def bring(self, wanted: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
        """Read the `wanted` tensors that are on disk to the device.

        Return the copies, by `id` of the wanted tensor; those in RAM are left out. On an error no copy stays.
        """
        fresh = {id(t): torch.empty_like(t, device=device) for t in wanted if id(t) in self._on_disk}
        try:
            self.fill([(t, fresh[id(t)]) for t in wanted if id(t) in fresh])
        except BaseException as error:
            fresh.clear()
            release_frames(error)  # the traceback would keep the tensors on the device
            raise
        return fresh

    def fill(self, wanted: Sequence[Copy]) -> None:
        """Read tensors that are on disk to their targets on the device, each once.

        A group that `follow` reads ahead is taken from there. Raises the reader's error.
        """
        if not wanted or not self._staging:
            return
        if self._flow and id(wanted[0][1]) in self._awaited:
            self._follow(id(wanted[0][1]))
        else:
            self._staging.bring(self._targets(wanted))
        self.passed([tensor for tensor, _ in wanted])

    def passed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Report to the progress that these tensors have come from disk; those in RAM do not count."""
        self._incoming.progress.passes(self.file_bytes(tensors))

    def announce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tell the progress that these tensors will come from disk; those in RAM do not count."""
        self._incoming.progress.expect(self.file_bytes(tensors))

    def file_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the bytes of files of these tensors; 0 for those in RAM."""
        return sum(file_bytes(self._on_disk[key]) for key in {id(tensor) for tensor in tensors} & self._on_disk.keys())

    def follow(self, groups: Sequence[Sequence[Copy]]) -> None:
        """Read groups ahead to the device, one after the other. `fill` takes them in this order; `stop` ends it."""
        self.stop()
        if groups and self._staging:
            self._flow = self._staging.bringing([self._targets(copies) for copies in groups])
            self._awaited = deque(id(copies[0][1]) for copies in groups)

    def stop(self) -> None:
        """Stop reading ahead for `follow`. Its groups are then read when `fill` asks for them."""
        if self._flow:
            self._flow.close()
        self._flow = None
        self._awaited.clear()

    def _follow(self, wanted: int) -> None:
        """Bring groups until the one with the target of this `id` has come."""
        assert self._flow
        try:
            while wanted in self._awaited:
                next(self._flow)
                self._awaited.popleft()
        except BaseException:
            self.stop()
            raise

    def _targets(self, copies: Sequence[Copy]) -> list[tuple[Stored, torch.Tensor]]:
        """Return each run in a file that is read for these copies, with the part of the target that it goes to."""
        once = {id(tensor): (tensor, target) for tensor, target in copies}.values()
        return [pair for tensor, target in once for pair in _targets(self._on_disk[id(tensor)], target)]

    def await_ram(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until none of these tensors is still being read to RAM. Raises the error of the reading."""
        self._incoming.wait(tensors)

    def begin(self) -> None:
        """Begin to read the weights that go to RAM, if they are not being read yet."""
        self._incoming.begin()

    def await_disk(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the current stream wait for a simulated disk, before work that is queued from now on."""
        for event in self._incoming.events(tensors):
            self._queues.wait(event)

    def events(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the events of a simulated disk that copies of these tensors must wait for."""
        return self._incoming.events(tensors)

    def in_ram(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether none of these tensors is still being read to RAM."""
        return self._incoming.has(tensors)

    @property
    def has_windows(self) -> bool:
        """Return whether there are staging buffers."""
        return self._staging is not None

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the host is not in RAM, so that it is read from disk each time."""
        return id(tensor) in self._on_disk

    def is_on_disk(self, group: WeightGroup) -> bool:
        """Return whether weights of a group are not in RAM."""
        return bool(self._on_disk) and any(self.reads(ref.tensor) for ref in group.refs)

    def prepare(self, groups: list[WeightGroup]) -> None:
        """Make groups ready to be streamed: pack those in RAM and pin them, and plan the reads of the others.

        If not all could be pinned, staging buffers are made for the rest. If these cannot be pinned either, unpinned
        groups are copied as they are: slower, and the copy blocks.
        """
        in_ram = [group for group in groups if not self.is_on_disk(group)]
        through = [group for group in groups if group not in in_ram]
        for group in in_ram:
            self._pack(group)
        wants_pinned = self._queues.copying and hostbuffer.wants_pinned(self._queues.device)
        if wants_pinned and not all(group.pinned for group in in_ram) and (self._staging or self._make_windows()):
            through += [group for group in self._groups if group.hosts and not group.pinned]
        for group in through:
            group.parts = group.parts or parts_of(group, self._on_disk)

    def pin_too(self, groups: Sequence[WeightGroup]) -> None:
        """Pin resident groups too while they are being read to RAM: their upload is faster from pinned memory."""
        if self._incoming.is_under_way and not self._staging and hostbuffer.wants_pinned(self._queues.device):
            for group in groups:
                self._pack(group)

    def close_unused(self, streaming: Sequence[WeightGroup]) -> None:
        """Free the staging buffers if no group comes through them: all are in RAM, and those `streaming` pinned.

        No call may be waiting for them.
        """
        if not (self._on_disk or any(group.parts for group in streaming)):
            self.close()

    def _pack(self, group: WeightGroup) -> None:
        """Pack a group, once its weights have been read."""
        if not group.hosts and not hostbuffer.is_packed(group.stored()):
            self.await_ram(group.stored())  # packing copies the tensors, which must have been read by then
        group.pack(self._queues.device)

    def load(self, slot: RingSlot) -> None:
        """Queue the copy of a group to its slot, behind the copies asked for before.

        Ask `wait` before waiting for `slot.copied`: the event may not be recorded yet.
        """
        if events := self.events(slot.group.hosts):
            slot.after = [*slot.after, *events]
        if self._staging:
            self._staging.load(slot)
            return
        slot.receive(slot.group.hosts, self._queues)

    def has_room(self, group: WeightGroup) -> bool:
        """Return whether a group can be sent to the ring without holding up another one or waiting for RAM."""
        if not self.in_ram(group.hosts):
            return False
        return self._staging is None or not group.parts or self._staging.has_room(group)

    def forget(self, slot: RingSlot) -> None:
        """Cancel the copy to a slot, if it has not been queued yet."""
        if self._staging:
            self._staging.forget(slot)

    def wait(self, slot: RingSlot) -> None:
        """Wait until the copy to a slot has been queued. Returns at once for groups that need no staging buffer."""
        if slot.pending and self._staging:
            self._staging.wait(slot)

    def ahead(self, upcoming: Sequence[WeightGroup]) -> None:
        """Prefetch the next of these groups into staging buffers, but for those in the ring. `reach` groups at most."""
        if self._staging:
            wanted = [p for p in upcoming if not (p.slot and p.slot.holds) and self.in_ram(p.hosts)]
            self._staging.ahead(wanted[: self.reach])

    def _new_staging(self) -> StagingBuffers:
        return StagingBuffers(self._queues, self._window_bytes)

    def _make_windows(self) -> bool:
        """Make pinned staging buffers for the groups that are not pinned, and return whether there are some now.

        Pinned memory is limited: groups are unpinned, from the last, until the staging buffers fit in it.
        """
        stager = self._new_staging()
        pinned = [group for group in self._groups if group.pinned]
        given_up: list[WeightGroup] = []
        self._queues.finish()  # copies may still read the memory that is unpinned here
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
    """Yield each run in a file that is read for a tensor, with the part of the tensor that it goes to."""
    for stored, begin in extents(source):
        whole = isinstance(source, Stored)
        yield stored, tensor if whole else tensor[begin : begin + stored.shape[0]]
