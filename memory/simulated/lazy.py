"""Copies between RAM and the simulated card: made at once, or as late as a real card may make them.

See [Note: Lazy copies].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

Mode = Literal["eager", "cuda", "xpu"]
MODES: tuple[Mode, ...] = ("eager", "cuda", "xpu")

# [Note: Lazy copies]
# An eager card copies in the order of the calls, on whatever stream, which hides that a program forgot to wait. A lazy
# one queues the copies that a real card makes asynchronously, and makes each as late as it can: once the host has
# waited for it (for its stream, a later event, or the device), or before work that is ordered behind it, which is later
# work of its stream, and of streams that have waited for a later event. Kernels run at once, so they force the copies
# that their own stream is ordered behind, and no others. A reader that did not wait finds old bytes.
#
# Which copies are asynchronous, by `mode`, as in PyTorch's Copy.cu and torch-xpu-ops' Copy.cpp:
#
#                                  "cuda"                          "xpu"
#     non-blocking, pinned RAM     queued: RAM is read, or         the same
#                                  written, when it is made
#     to the device, unpinned      the host waits                  RAM is read at the call, before all that the
#                                                                  stream waits for; then queued
#     to unpinned RAM              the host waits                  queued
#     to RAM with gaps, or of      the host waits                  queued into a temporary, whose bytes are taken at
#     another type                                                 once: the target gets what was in it before
#
# Freed memory goes back to the allocator at once. It may be given to a new tensor whose stream is not ordered behind a
# queued copy of the old one. Then the copy overwrites the new tensor's bytes, or reads these instead of the old ones.
# `races` counts that, and each access to bytes of a queued copy by work that is not ordered behind it.

_STALE = 0xFF  # fills memory that nobody has written to: NaN in all float dtypes that have one


class Bytes(NamedTuple):
    """Bytes `begin` to `end` of a device allocation, or of RAM by address if `owner` is None."""

    owner: Any
    begin: int
    end: int

    def meets(self, other: Bytes) -> bool:
        return self.owner is other.owner and self.begin < other.end and other.begin < self.end


class Queued:
    """A copy that is yet to be made. It keeps the data alive, but not the device's allocation, which may be reused."""

    def __init__(
        self, target: torch.Tensor, source: torch.Tensor, to_device: bool, device: Bytes, after: tuple[Queued, ...]
    ) -> None:
        self.target, self.source, self.to_device, self.after = target, source, to_device, after
        self.allocation, self.span = weakref.ref(device.owner), device[1:]
        self.ram = _ram(source if to_device else target)
        self.done = False
        self._others: torch.Tensor | None = None  # bytes of the tensor that now owns its device memory

    def meets(self, spans: Iterable[Bytes], written: bool) -> bool:
        """Return whether reading, or if `written` writing, these bytes now is a race with this copy."""
        device = Bytes(self.allocation(), *self.span)
        return any(
            (span.meets(self.ram) and (written or not self.to_device))
            or (span.owner is not None and span.meets(device) and (written or self.to_device))
            for span in spans
        )

    def give(self, allocation: Any, storage: torch.UntypedStorage) -> None:
        """Redirect the copy to the storage that its freed device memory was given to."""
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
        self.registered: dict[int, int] = {}  # RAM pinned in place by `Cudart`: bytes by address
        self._lock = threading.RLock()

    def force(self, ends: Iterable[Queued]) -> None:
        """Make these copies, and all copies that they are ordered behind."""
        if not self.queued:
            return
        with self._lock, torch.inference_mode():
            wanted = _behind(ends)
            for one in self.queued:
                if one in wanted and not one.done:
                    one.run()
            # Only now: a thread that finds nothing queued goes on without the lock.
            self.queued = [one for one in self.queued if not one.done]

    def join(self, stream: Any, other: Sequence[Queued]) -> None:
        """Order all later work of a stream behind these copies too."""
        if other:
            with self._lock:  # another thread may queue there
                stream.tail = joined(stream.tail, other)

    def force_all(self) -> None:
        """Make all copies."""
        self.force(tuple(self.queued))

    def check(self, reads: Iterable[Bytes], writes: Iterable[Bytes], ends: Iterable[Queued] = ()) -> None:
        """Count races: queued copies of bytes read or written now, by work that is ordered behind `ends` only."""
        if self.queued:
            with self._lock:
                ordered, reads, writes = _behind(ends), list(reads), list(writes)
                races = [
                    one.meets(reads, False) or one.meets(writes, True) for one in self.queued if one not in ordered
                ]
                self.races += sum(races)

    def copy(self, target: Any, source: Any, to_device: bool, device: Bytes, blocking: bool, stream: Any) -> bool:
        """Copy between RAM and a raw tensor of the device, or queue the copy. Return whether the host waits for it."""
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
        """Return whether RAM at `address` was pinned in place."""
        return any(begin <= address < begin + nbytes for begin, nbytes in tuple(self.registered.items()))


class Cudart:
    """The calls of the CUDA runtime that pin existing RAM, by their names there."""

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
    """Return a contiguous tensor like `like`, with bytes that nobody has written to."""
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    _flat(made).fill_(_STALE)
    return made


def _behind(ends: Iterable[Queued]) -> set[Queued]:
    """Return all queued copies that these are ordered behind, themselves included."""
    found: set[Queued] = set()
    waiting = list(ends)
    while waiting:
        one = waiting.pop()
        if not one.done and one not in found:
            found.add(one)
            waiting += one.after
    return found


def _lies_as(ram: torch.Tensor, there: torch.Tensor) -> bool:
    """Return whether one copy of bytes is enough: no gaps, the same dtype, shape and order."""
    if ram.dtype != there.dtype or ram.shape != there.shape:
        return False
    same = ram.stride() == there.stride() and torch.ops.aten.is_non_overlapping_and_dense(ram)
    return same or ram.is_contiguous()


def _ram(tensor: torch.Tensor) -> Bytes:
    return Bytes(None, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


copies = Copies()
