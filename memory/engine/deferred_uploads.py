"""Deferred uploads: a resident group has its room on the device at once, and its weights when it is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .ring import Copy, State, WeightGroup
from .streams import Queues
from .weight_source import WeightSource


class DeferredUploads:
    """The groups that stay and are not there yet, which one stream copies in the order of the calls.

    `groups` are all of the module, in that order. Until a group is there its module holds the host's tensors: whoever
    reads them elsewhere than in its calls meets an error that is seen. `take_bytes` tells what has come.
    """

    def __init__(self, groups: Sequence[WeightGroup], supply: WeightSource, queues: Queues) -> None:
        self._source, self._queues = supply, queues
        self._order = {group: i for i, group in enumerate(groups)}
        self._owing: list[WeightGroup] = []  # whose copies have not been queued
        self._bytes_in = self._bytes_read = 0

    @property
    def owes(self) -> bool:
        """Return whether there are copies to queue."""
        return bool(self._owing)

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that have come since this was last asked, and those of files that were read for them."""
        taken, self._bytes_in, self._bytes_read = (self._bytes_in, self._bytes_read), 0, 0
        return taken

    def expect(self, group: WeightGroup) -> int:
        """Take room for a group. Returns the bytes."""
        made: dict[int, torch.Tensor] = {}
        for ref in group.refs:
            if id(ref.tensor) not in made:
                made[id(ref.tensor)] = torch.empty_like(ref.tensor.detach(), device=self._queues.device)
        group.owed = [(ref, made[id(ref.tensor)]) for ref in group.refs]
        group.arrived = self._queues.event()
        group.become(State.AWAITED)
        self._queues.mark(group.arrived)  # work that is queued may still read what was there before
        self._owing.append(group)
        return sum(tensor.nbytes for tensor in made.values())

    def await_ram(self, group: WeightGroup) -> None:
        """Wait until what a group is copied from has come to RAM. Raises what the reading raised."""
        if group.state is State.AWAITED:
            self._source.await_ram([ref.tensor for ref, _ in group.owed])

    def enter(self, group: WeightGroup) -> None:
        """Make work that is queued from now on wait for a group."""
        if group.state is State.AWAITED:
            self._send(group)
        if group.state is not State.COMING:
            return
        self._queues.wait(group.arrived)
        with torch.inference_mode(False), torch.no_grad():  # for tensors that outlive the call
            for ref, target in group.owed:
                ref.set(target)
        group.owed, group.arrived = [], None
        group.become(State.RESIDENT)

    def send_before(self, following: WeightGroup | None, current: WeightGroup | None) -> bool:
        """Queue the copies of what is called before another group, as far as it has come to RAM.

        Those are all where nothing follows, or what follows is called before the `current` one, in the next call.
        Returns whether nothing is left of them.
        """
        upto = self._order[following] if following else len(self._order)
        now = self._order[current] if current and current.called else -1
        for group in sorted(self._owing, key=self._order.__getitem__):
            if now < upto <= self._order[group]:
                break
            if self._source.is_on_disk(group) or not self._source.in_ram([ref.tensor for ref, _ in group.owed]):
                return False
            self._send(group)
        return True

    def before_disk(self, upcoming: list[WeightGroup], current: WeightGroup | None) -> list[WeightGroup]:
        """Return the groups that come through windows and are called before the next one that is to stay and is on
        disk: it takes the windows, and what was read into them would be read again.
        """
        now = self._order[current] if current else -1
        on_disk = (self._order[group] for group in self._owing if self._source.is_on_disk(group))
        upto = min((at for at in on_disk if at > now), default=None)
        return upcoming if upto is None else [group for group in upcoming if now < self._order[group] < upto]

    def disk_copies(self) -> list[list[Copy]]:
        """Return what is to come from disk, by group, in the order of the calls."""
        groups = sorted(self._owing, key=self._order.__getitem__)
        return [copies for group in groups if (copies := self._copies(group)[1])]

    def forget(self, group: WeightGroup) -> None:
        """Cancel the upload of a group. Its room may then be given up."""
        if group.state is State.COMING and group.arrived:
            self._queues.finish()  # the copies into what is freed
        if group in self._owing:
            self._owing.remove(group)
        group.owed, group.arrived = [], None

    def clear(self) -> None:
        """Forget all, when no copy is under way."""
        self._owing.clear()
        for group in self._order:
            group.owed, group.arrived = [], None

    def _send(self, group: WeightGroup) -> None:
        """Queue the copies of a group, behind what used their bytes before."""
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
        group.become(State.COMING)
        self._owing.remove(group)

    def _copies(self, group: WeightGroup) -> tuple[list[Copy], list[Copy]]:
        """Return the copies that a group takes, each once: from RAM, and from disk."""
        once = {id(target): (ref.tensor, target) for ref, target in group.owed}.values()
        on_disk = [copy for copy in once if self._source.reads(copy[0])]
        return [copy for copy in once if not self._source.reads(copy[0])], on_disk
