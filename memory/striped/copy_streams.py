"""The ways between the device and RAM: a stream each way, and RAM that is used again, pinned where that pays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..simulated import card as state
from ..simulated import clock
from ..weights import hostbuffer

_WASTE = 1.25  # times what is wanted: a larger piece is not taken for it
_streams: dict[torch.device, tuple[Any, Any]] = {}
_lock = threading.Lock()


class Lanes:
    """Copies of one run. On a device without streams they are waited for; of a dry run only their time is counted.

    Memory on the device is always that of the computing stream: a copy waits for it, and it waits for the copy before
    the memory is used or let go of. The host waits in `finish` only.
    """

    def __init__(self, device: torch.device, dry: bool) -> None:
        self.device, self._dry = device, dry
        self._backend: Any = clock if dry else torch.get_device_module(device)
        has_streams = dry or (device.type not in ("cpu", "mps") and hasattr(self._backend, "Stream"))
        self._incoming: Any = None
        self._outgoing: Any = None
        if has_streams:
            self._incoming, self._outgoing = self._both()
        self._leaving: dict[bool, tuple[Any, Any]] = {}  # what is being copied to RAM, of two kinds

    def _both(self) -> tuple[Any, Any]:
        if self._dry:
            return clock.Stream(), clock.Stream()
        with _lock:  # of the process: each would take resources of the driver
            if self.device not in _streams:
                _streams[self.device] = tuple(self._backend.Stream(device=self.device) for _ in range(2))
            return _streams[self.device]

    def fetch(self, source: torch.Tensor, after: Any) -> torch.Tensor:
        """Return a copy of rows in RAM, contiguous, on the device once `land` was called. It begins behind an event."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if self._incoming is None:
            return target.copy_(source)
        self._incoming.wait_event(self._event(self._computing()))
        if after is not None:
            self._incoming.wait_event(after)
        with self._on(self._incoming):
            self._copy("h2d", target, source)
        return target

    def land(self) -> None:
        """Make later work wait until all that was fetched has come."""
        if self._incoming is not None:
            self._computing().wait_event(self._event(self._incoming))

    def store(self, target: torch.Tensor, rows: torch.Tensor, kind: bool = False, held: Any = None) -> Any:
        """Copy rows, contiguous, to RAM, behind those before. Returns the event that they are there.

        Of each kind one copy at a time is under way: what is computed from now on waits for the one before. What is
        `held` is let go of then.
        """
        self._settle(kind)
        if self._outgoing is None:
            target.copy_(rows)
            return None
        self._outgoing.wait_event(self._event(self._computing()))
        with self._on(self._outgoing):
            self._copy("d2h", target, rows)
        left = self._event(self._outgoing)
        self._leaving[kind] = (rows, held), left
        return left

    def settle(self) -> None:
        """Free the memory of copies to RAM that are done."""
        for kind in list(self._leaving):
            self._settle(kind)

    def _settle(self, kind: bool) -> None:
        if kind in self._leaving:
            self._computing().wait_event(self._leaving.pop(kind)[1])

    def behind_reads(self) -> None:
        """Make later copies to RAM wait until all that is being fetched has come."""
        if self._incoming is not None:
            self._outgoing.wait_event(self._event(self._incoming))

    def finish(self) -> None:
        """Wait for all copies."""
        if self._incoming is not None and not self._dry:
            self._incoming.synchronize()
            self._outgoing.synchronize()
        self.settle()

    def _copy(self, direction: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._dry:
            here = target if direction == "h2d" else source
            state.card.transfer(direction, target, here, False, clock.current_stream())
        else:
            # Of RAM that is not pinned, XPU reads at the call, whatever its stream waits for, and writes unseen.
            target.copy_(source, non_blocking=(source if direction == "h2d" else target).is_pinned())

    def _computing(self) -> Any:
        return clock.current_stream() if self._dry else self._backend.current_stream(self.device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return stream if self._dry else self._backend.stream(stream)

    def _event(self, stream: Any) -> Any:
        event = self._backend.Event()
        event.record(stream)
        return event


class Pool:
    """Flat pieces of RAM of one run, of which one at most is spare.

    Copies may still read a piece that is given back: `reused` is called when it is handed out again, `finish` before it
    goes back to the system.
    """

    def __init__(self, device: torch.device, reused: Callable[[], None], finish: Callable[[], None]) -> None:
        self._device, self._reused, self._finish = device, reused, finish
        self._spare: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a piece of at least so many bytes: a spare one if one is of about that size."""
        found = self._spare
        if found is not None and nbytes <= found.nbytes <= _WASTE * nbytes:
            self._spare = None
            self._reused()
            return found
        self.clear()
        with torch.inference_mode(False):
            made = hostbuffer.window(max(1, nbytes), self._device)
        hostbuffer.pin(made, self._device)
        return made

    def give(self, piece: torch.Tensor) -> None:
        """Take back a piece that is no longer wanted. It stays spare, in place of another."""
        self.clear()
        self._spare = piece

    def clear(self) -> None:
        """Free the spare pieces."""
        if self._spare is not None:
            self._finish()
            self._spare = None


def view(piece: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a piece."""
    return piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
