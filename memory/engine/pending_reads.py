"""Weights on their way to RAM: what is to be waited for before they are looked at, or copied."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..weights.reader import Reading, address_of


class DiskTimes:
    """When buffers come from a simulated disk, which `read` lets read so many bytes and tells the event.

    The disk reads them in their `order`: all when it is told to, or each when it is asked for.
    """

    def __init__(self, order: Sequence[tuple[int, set[int]]], read: Callable[[int], Any]) -> None:
        self._left = deque(order)
        self._wanted = Counter(address for _, addresses in order for address in addresses)
        self._read = read
        self._events: dict[int, Any] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the events to wait for before these tensors are read."""
        addresses = {address_of(tensor) for tensor in tensors}
        while self._left and any(self._wanted[address] for address in addresses):
            self._read_next()
        return [event for address in addresses if (event := self._events.get(address)) is not None]

    def read_all(self) -> None:
        """Make the simulated disk read everything."""
        while self._left:
            self._read_next()

    def _read_next(self) -> None:
        nbytes, addresses = self._left.popleft()
        event = self._read(nbytes)
        for address in addresses:
            self._wanted[address] -= 1
            self._events[address] = event


class Progress:
    """How far weights have come from files, in bytes of these: to RAM, and past it. `tell` is given them and all.

    `reading_bytes` are to come to RAM.
    """

    def __init__(self, tell: Callable[[int, int], None], reading_bytes: int = 0) -> None:
        self._tell: Callable[[int, int], None] | None = tell
        self._reading_bytes, self._past_bytes = reading_bytes, 0
        self._read = self._passed = 0

    def look(self, read: int) -> None:
        """Note the bytes that have been read to RAM so far."""
        self._read = read
        self._say()

    def expect(self, nbytes: int) -> None:
        """Note what is going to come past RAM from now on."""
        self._past_bytes, self._passed = nbytes, 0
        self._say()

    def passes(self, nbytes: int) -> None:
        """Note bytes that have come past RAM."""
        self._passed += nbytes
        self._say()

    def end(self) -> None:
        """Tell that all has come that is wanted, and nothing more."""
        total, tell, self._tell = self._reading_bytes + self._past_bytes, self._tell, None
        if tell and total:
            tell(total, total)

    def _say(self) -> None:
        if self._tell and (total := self._reading_bytes + self._past_bytes):
            self._tell(min(self._read, self._reading_bytes) + min(self._passed, self._past_bytes), total)


@dataclass(frozen=True)
class PendingReads:
    """A reading that brings a unit's weights, if there is one, and when they come from a simulated disk.

    `progress` is told what comes.
    """

    reading: Reading | None = None
    times: DiskTimes | None = None
    progress: Progress = field(default_factory=lambda: Progress(lambda read, total: None))

    @property
    def is_under_way(self) -> bool:
        """Return whether something is still being read."""
        return self.reading is not None and not self.reading.done

    def begin(self) -> None:
        """Begin reading, if it has not begun."""
        if self.reading:
            self.reading.begin()
            if self.times:
                self.times.read_all()

    def has(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether these have come."""
        return self.reading is None or self.reading.has(tensors)

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until these have come. Raises what the reading raised."""
        tensors = list(tensors)
        if self.reading:
            if not self.reading.has(tensors):
                self.reading.wait(tensors)
            self.progress.look(self.reading.so_far)

    def events(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return what a simulated device has to wait for before it copies these."""
        return self.times.of(tensors) if self.times else []


NOTHING = PendingReads()
