"""Copies between RAM and the simulated card: made at once, or as late as a real card may make them.

[Note: lazy copies] An eager card copies in the order of the calls, on whatever stream, which hides that a program
forgot to wait. A lazy one queues what a real card copies on its own, and makes a queued copy no sooner than it must:
once the host has waited for it (for its stream, an event behind it, or the device), or once something that is ordered
behind it is done: all work of its stream, and of streams that have waited for an event behind it. Kernels run at
once, so they force what their own stream is behind, and nothing else. A reader that did not wait finds old bytes.

Which copies a card makes on its own is told by `mode`, as PyTorch's Copy.cu and torch-xpu-ops' Copy.cpp have it:

                                 "cuda"                          "xpu"
    non-blocking, pinned RAM     queued: RAM is read, or         the same
                                 written, when it is made
    to the device, unpinned      the host waits                  RAM is read at the call, before all that the
                                                                 stream waits for; then queued
    to unpinned RAM              the host waits                  queued
    to RAM with gaps, or of      the host waits                  queued into a temporary, whose bytes are taken at
    another type                                                 once: the target gets what was in it before

Freed memory belongs to the allocator at once. If it is given to other tensors while a copy of it is queued, which the
stream of theirs is not behind, the copy goes on in those: bytes of theirs are overwritten, or read in its place.
`races` counts that, and each access to bytes of a queued copy that it is not ordered behind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

Mode = Literal["eager", "cuda", "xpu"]
MODES: tuple[Mode, ...] = ("eager", "cuda", "xpu")

_STALE = 0xFF  # in every byte of memory that nobody has written to: not a number, in all types that have such


class Bytes(NamedTuple):
    """Bytes of an allocation of the device, or of RAM (None), from a begin to an end."""

    owner: Any
    begin: int
    end: int

    def meets(self, other: Bytes) -> bool:
        return self.owner is other.owner and self.begin < other.end and other.begin < self.end


class Queued:
    """A copy that is yet to be made. The data are kept for it, the device's allocation is not."""

    def __init__(
        self, target: torch.Tensor, source: torch.Tensor, to_device: bool, device: Bytes, after: tuple[Queued, ...]
    ) -> None:
        self.target, self.source, self.to_device, self.after = target, source, to_device, after
        self.allocation, self.span = weakref.ref(device.owner), device[1:]
        self.ram = _ram(source if to_device else target)
        self.done = False
        self._others: torch.Tensor | None = None  # bytes of those that its memory on the device was given to

    def meets(self, spans: Iterable[Bytes], written: bool) -> bool:
        """Return whether reading (or writing) these bytes now is a race with it."""
        device = Bytes(self.allocation(), *self.span)
        return any(
            (span.meets(self.ram) and (written or not self.to_device))
            or (span.owner is not None and span.meets(device) and (written or self.to_device))
            for span in spans
        )

    def give(self, allocation: Any, storage: torch.UntypedStorage) -> None:
        """Go on in the memory of others."""
        count = min(self.target.nbytes, storage.nbytes())
        self._others = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (count,), (1,))
        self.allocation, self.span = weakref.ref(allocation), (0, count)

    def run(self) -> None:
        if self._others is None:
            self.target.copy_(self.source)
        elif self.to_device:
            self._others.copy_(_flat(self.source)[: len(self._others)])
        else:
            whole = self.source.clone(memory_format=torch.contiguous_format)
            _flat(whole)[: len(self._others)] = self._others
            self.target.copy_(whole)
        self.target = self.source = self._others = torch.empty(0)
        self.done, self.after = True, ()


class Copies:
    """The queued copies of the one simulated card."""

    mode: Mode = "eager"

    def __init__(self) -> None:
        self.queued: list[Queued] = []
        self.races = 0
        self.registered: dict[int, int] = {}  # pinned RAM that was there before: addresses, and bytes
        self._lock = threading.RLock()

    def force(self, ends: Iterable[Queued]) -> None:
        """Make these copies, and all that they are ordered behind."""
        if not self.queued:
            return
        with self._lock, torch.inference_mode():
            wanted = _behind(ends)
            for one in self.queued:
                if one in wanted and not one.done:
                    one.run()
            # Not before: who finds nothing queued goes on without the lock.
            self.queued = [one for one in self.queued if not one.done]

    def join(self, stream: Any, other: Sequence[Queued]) -> None:
        """Put all that a stream is given next behind these too."""
        if other:
            with self._lock:  # another thread may queue there
                stream.tail = joined(stream.tail, other)

    def force_all(self) -> None:
        """Make all copies."""
        self.force(tuple(self.queued))

    def check(self, reads: Iterable[Bytes], writes: Iterable[Bytes], ends: Iterable[Queued] = ()) -> None:
        """Count what is read or written now, behind these copies, but not behind others of the same bytes."""
        if self.queued:
            with self._lock:
                ordered, reads, writes = _behind(ends), list(reads), list(writes)
                races = [
                    one.meets(reads, False) or one.meets(writes, True) for one in self.queued if one not in ordered
                ]
                self.races += sum(races)

    def copy(self, target: Any, source: Any, to_device: bool, device: Bytes, blocking: bool, stream: Any) -> bool:
        """Copy between RAM and the tensor inside one of the device, or queue that. Returns whether the host waits."""
        ram, there = (source, target) if to_device else (target, source)
        lies_so = _lies_as(ram, there)
        pinned = lies_so and ram.is_pinned()
        with self._lock:
            if blocking or (self.mode == "cuda" and not pinned):
                self.force(stream.tail)
                self._check(to_device, device, _ram(ram), ())
                target.copy_(source)
                return True
            self._check(to_device, device, _ram(ram), stream.tail if pinned or not to_device else ())
            if to_device and not pinned:
                source = source.to(target.dtype).expand(target.shape).clone()
            elif not to_device and not lies_so:
                temporary = stale(source)
                target.copy_(temporary)
                target = temporary
            one = Queued(target, source, to_device, device, stream.tail)
            self.queued.append(one)
            stream.tail = (one,)
            return False

    def _check(self, to_device: bool, device: Bytes, ram: Bytes, ends: Iterable[Queued]) -> None:
        self.check([ram if to_device else device], [device if to_device else ram], ends)

    def given(self, allocation: Any, storage: torch.UntypedStorage, tail: Sequence[Queued]) -> None:
        """Give new tensors the memory of freed ones, which queued copies still read or write."""
        if not storage.nbytes() or all(one.allocation() is not None for one in self.queued):
            return
        with self._lock:
            self.force(tail)
            for one in self.queued:
                if one.allocation() is None:
                    self.races += 1
                    one.give(allocation, storage)

    def is_registered(self, address: int) -> bool:
        """Return whether RAM was pinned as it was."""
        return any(begin <= address < begin + nbytes for begin, nbytes in tuple(self.registered.items()))


class Cudart:
    """The calls that pin RAM that is there already, by the names of CUDA's runtime."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        copies.registered[address] = nbytes
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        return 0 if copies.registered.pop(address, None) else 1


def joined(tail: Sequence[Queued], other: Sequence[Queued]) -> tuple[Queued, ...]:
    """Return the copies of both tails that are not done."""
    return tuple(one for one in dict.fromkeys((*tail, *other)) if not one.done)


def stale(like: torch.Tensor) -> torch.Tensor:
    """Memory for such a tensor, contiguous, that nobody has written to."""
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    _flat(made).fill_(_STALE)
    return made


def _behind(ends: Iterable[Queued]) -> set[Queued]:
    """All queued copies that these are ordered behind, themselves included."""
    found: set[Queued] = set()
    waiting = list(ends)
    while waiting:
        one = waiting.pop()
        if not one.done and one not in found:
            found.add(one)
            waiting += one.after
    return found


def _lies_as(ram: torch.Tensor, there: torch.Tensor) -> bool:
    """Return whether one copy of bytes moves it: no gaps, the same type and order."""
    if ram.dtype != there.dtype or ram.shape != there.shape:
        return False
    same = ram.stride() == there.stride() and torch.ops.aten.is_non_overlapping_and_dense(ram)
    return same or ram.is_contiguous()


def _ram(tensor: torch.Tensor) -> Bytes:
    return Bytes(None, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


copies = Copies()
