"""Deferred uploads: a resident group has its device memory at once, and its weights when it is first called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..weights import hostbuffer
from .ring import Copy, State, WeightGroup
from .streams import Queues
from .weight_source import WeightSource

_NEVER = object()


class DeferredUploads:
    """The resident groups whose weights are still to be uploaded, in call order.

    `groups` are all groups of the module, in that order. Until a group is uploaded its module holds the host's tensors.
    A read outside of its calls then raises an error, where device memory without weights would give garbage. `Engine`
    calls this, under its lock but for `await_ram`.
    """

    def __init__(self, groups: Sequence[WeightGroup], source: WeightSource, queues: Queues) -> None:
        self._source, self._queues = source, queues
        self._order = {group: i for i, group in enumerate(groups)}
        self._pending: list[WeightGroup] = []  # groups in the state ALLOCATED, their copies not queued
        self._bytes_in = self._bytes_read = 0
        self._held_host_at: object = _NEVER  # the running group when a copy last held up the host

    @property
    def pending(self) -> bool:
        """Return whether there are copies to queue."""
        return bool(self._pending)

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes uploaded since the last call of this, and the bytes of files read for them."""
        taken, self._bytes_in, self._bytes_read = (self._bytes_in, self._bytes_read), 0, 0
        return taken

    def allocate(self, group: WeightGroup) -> int:
        """Allocate device memory for a group, in the state ON_HOST. Return its bytes."""
        made: dict[int, torch.Tensor] = {}
        for ref in group.refs:
            if id(ref.tensor) not in made:
                made[id(ref.tensor)] = torch.empty_like(ref.tensor.detach(), device=self._queues.device)
        group.uploads = [(ref, made[id(ref.tensor)]) for ref in group.refs]
        group.arrived = self._queues.event()
        group.become(State.ALLOCATED)
        self._queues.mark(group.arrived)  # queued work may still read what the allocator had in these bytes before
        self._pending.append(group)
        return sum(tensor.nbytes for tensor in made.values())

    def await_ram(self, group: WeightGroup) -> None:
        """Wait until the host weights of a group have been read. Raises the error of the reading."""
        if group.state is State.ALLOCATED:
            self._source.await_ram([ref.tensor for ref, _ in group.uploads])

    def enter(self, group: WeightGroup) -> None:
        """Upload a group, and make work that this thread queues from now on wait for it. The group is resident.

        The host waits only if weights still have to be read. Does nothing for groups that are resident already, or
        stream.
        """
        if group.state is State.ALLOCATED:
            self._send(group)
        if group.state is not State.UPLOADING:
            return
        self._queues.wait(group.arrived)
        with torch.inference_mode(False), torch.no_grad():  # the parameters outlive the call
            for ref, target in group.uploads:
                ref.set(target)
        group.uploads, group.arrived = [], None
        group.become(State.RESIDENT)

    def send_before(self, following: WeightGroup | None, current: WeightGroup | None) -> bool:
        """Queue the uploads of groups that are called before `following`, as far as RAM has their weights.

        All of them if `following` is None, or is called before the `current` group, that is, in the next call. Return
        False if a group was not in RAM, so that it and later ones are still to be queued.

        Copies from pageable RAM hold up the host, which launches no kernels meanwhile. So one group from there is
        uploaded for each running group: the device computes one while the host copies another.
        """
        upto = self._order[following] if following else len(self._order)
        now = self._order[current] if current and current.called else -1
        for group in sorted(self._pending, key=self._order.__getitem__):
            if now < upto <= self._order[group]:
                break
            if self._source.is_on_disk(group) or not self._source.in_ram([ref.tensor for ref, _ in group.uploads]):
                return False
            if self._holds_host(group):
                if self._held_host_at is current:
                    return False
                self._held_host_at = current
            self._send(group)
        return True

    def before_disk(self, upcoming: list[WeightGroup], current: WeightGroup | None) -> list[WeightGroup]:
        """Return the streamed groups to prefetch into staging buffers now.

        These end before the next resident group that is uploaded from disk. It needs the staging buffers itself, and
        groups read into them earlier would have to be read again.
        """
        now = self._order[current] if current else -1
        on_disk = (self._order[group] for group in self._pending if self._source.is_on_disk(group))
        upto = min((at for at in on_disk if at > now), default=None)
        return upcoming if upto is None else [group for group in upcoming if now < self._order[group] < upto]

    def disk_copies(self) -> list[list[Copy]]:
        """Return the copies that are to be read from disk, group by group in call order."""
        groups = sorted(self._pending, key=self._order.__getitem__)
        return [copies for group in groups if (copies := self._copies(group)[1])]

    def forget(self, group: WeightGroup) -> None:
        """Cancel the upload of a group. Its device memory may then be freed."""
        if group.state is State.UPLOADING and group.arrived:
            self._queues.finish()  # copies into memory that the caller frees next
        if group in self._pending:
            self._pending.remove(group)
        group.uploads, group.arrived = [], None

    def clear(self) -> None:
        """Cancel all uploads. No copy may be under way."""
        self._pending.clear()
        self._held_host_at = _NEVER
        for group in self._order:
            group.uploads, group.arrived = [], None

    def _send(self, group: WeightGroup) -> None:
        """Upload a group: queue copies from RAM, behind the last use of their memory, and read weights on disk."""
        self.await_ram(group)
        in_ram, on_disk = self._copies(group)
        self._source.fill(on_disk)
        freed, done = group.arrived, self._queues.event()
        after = [*filter(None, [freed]), *self._source.events([source for source, _ in in_ram])]
        for source, target in in_ram:
            self._queues.copy(target, source, after, done)
        self._bytes_in += sum(target.nbytes for _, target in in_ram + on_disk)
        self._bytes_read += self._source.file_bytes([source for source, _ in on_disk])
        group.arrived = done if in_ram else None
        group.become(State.UPLOADING)
        self._pending.remove(group)

    def _holds_host(self, group: WeightGroup) -> bool:
        """Return whether uploading a group from RAM would hold up the host."""
        if not (self._queues.copying and hostbuffer.wants_pinned(self._queues.device)):
            return False
        return not all(source.is_pinned() for source, _ in self._copies(group)[0])

    def _copies(self, group: WeightGroup) -> tuple[list[Copy], list[Copy]]:
        """Return the copies of a group, each once: from RAM, and from disk."""
        once = {id(target): (ref.tensor, target) for ref, target in group.uploads}.values()
        on_disk = [copy for copy in once if self._source.reads(copy[0])]
        return [copy for copy in once if not self._source.reads(copy[0])], on_disk
