"""Reads to RAM that are still under way: waiting for weights before they are used, and their progress."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..weights.reader import Reading, address_of


class DiskTimes:
    """The events of a simulated disk: when it has read each host buffer. For simulated devices only.

    The disk reads in the `order` of `Reading.order`: pairs of bytes and the addresses of the buffers that they go to.
    `read` lets it read `nbytes` and returns the event of their end.
    """

    def __init__(self, order: Sequence[tuple[int, set[int]]], read: Callable[[int], Any]) -> None:
        self._left = deque(order)
        self._wanted = Counter(address for _, addresses in order for address in addresses)
        self._read = read
        self._events: dict[int, Any] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the events to wait for before these tensors are used. Makes the disk read up to the last of them."""
        addresses = {address_of(tensor) for tensor in tensors}
        while self._left and any(self._wanted[address] for address in addresses):
            self._read_next()
        return [event for address in addresses if (event := self._events.get(address)) is not None]

    def read_all(self) -> None:
        """Make the disk read everything that is left."""
        while self._left:
            self._read_next()

    def _read_next(self) -> None:
        nbytes, addresses = self._left.popleft()
        event = self._read(nbytes)
        for address in addresses:
            self._wanted[address] -= 1
            self._events[address] = event


class Progress:
    """The progress of reading a unit's weights, in bytes of files.

    `reading_bytes` of them go to RAM, others past it to the device. `tell` is called with the bytes that have come and
    the bytes in all.
    """

    def __init__(self, tell: Callable[[int, int], None], reading_bytes: int = 0) -> None:
        self._tell: Callable[[int, int], None] | None = tell
        self._reading_bytes, self._past_bytes = reading_bytes, 0
        self._read = self._passed = 0

    def look(self, read: int) -> None:
        """Note that `read` bytes are in RAM so far."""
        self._read = read
        self._say()

    def expect(self, nbytes: int) -> None:
        """Note that `nbytes` will be read past RAM, from disk to the device."""
        self._past_bytes, self._passed = nbytes, 0
        self._say()

    def passes(self, nbytes: int) -> None:
        """Note that `nbytes` more have been read past RAM."""
        self._passed += nbytes
        self._say()

    def end(self) -> None:
        """Report that everything has come, for the last time."""
        total, tell, self._tell = self._reading_bytes + self._past_bytes, self._tell, None
        if tell and total:
            tell(total, total)

    def _say(self) -> None:
        if self._tell and (total := self._reading_bytes + self._past_bytes):
            self._tell(min(self._read, self._reading_bytes) + min(self._passed, self._past_bytes), total)


@dataclass(frozen=True)
class PendingReads:
    """The reading that brings a unit's weights to RAM, if one is under way.

    `times` are set on a simulated device. `progress` is told the bytes that come. `HostCache` makes one for each
    placement.
    """

    reading: Reading | None = None
    times: DiskTimes | None = None
    progress: Progress = field(default_factory=lambda: Progress(lambda read, total: None))

    @property
    def is_under_way(self) -> bool:
        """Return whether weights are still being read."""
        return self.reading is not None and not self.reading.done

    def begin(self) -> None:
        """Begin the reading, if it has not begun."""
        if self.reading:
            self.reading.begin()
            if self.times:
                self.times.read_all()

    def has(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether none of these tensors is still being read to RAM."""
        return self.reading is None or self.reading.has(tensors)

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until none of these tensors is still being read to RAM. Raises the error of the reading."""
        tensors = list(tensors)
        if self.reading:
            if not self.reading.has(tensors):
                self.reading.wait(tensors)
            self.progress.look(self.reading.so_far)

    def events(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the events of a simulated disk to wait for before these tensors are copied."""
        return self.times.of(tensors) if self.times else []


NOTHING = PendingReads()  # nothing is being read to RAM
