"""Copies between the device and RAM, on a stream each way, and pinned RAM that is reused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..simulated import clock
from ..simulated.card import current_card
from ..weights import hostbuffer

_WASTE = 1.25  # a spare piece more than 1.25 times as large as wanted is not reused
_streams: dict[torch.device, tuple[Any, Any]] = {}
_lock = threading.Lock()


class CopyStreams:
    """The copy streams of one run. A device without streams copies synchronously; a dry run only counts the time.

    Device memory is always allocated on the compute stream. A copy stream waits for the compute stream before it
    touches the memory, and the compute stream waits for the copy before the memory is used or freed. The host waits in
    `finish` only.
    """

    def __init__(self, device: torch.device, dry: bool) -> None:
        self.device, self._dry = device, dry
        self._backend: Any = clock if dry else torch.get_device_module(device)
        has_streams = dry or (device.type not in ("cpu", "mps") and hasattr(self._backend, "Stream"))
        self._incoming: Any = None
        self._outgoing: Any = None
        if has_streams:
            self._incoming, self._outgoing = self._both()
        self._leaving: dict[
            bool, tuple[Any, Any]
        ] = {}  # copies to RAM in flight, by whether they are spilled: ((rows, held), event)

    def _both(self) -> tuple[Any, Any]:
        if self._dry:
            return clock.Stream(), clock.Stream()
        with _lock:  # one pair a process: each stream takes resources of the driver
            if self.device not in _streams:
                _streams[self.device] = tuple(self._backend.Stream(device=self.device) for _ in range(2))
            return _streams[self.device]

    def fetch(self, source: torch.Tensor, after: Any) -> torch.Tensor:
        """Begin to copy rows from RAM after the event `after`. Return a contiguous tensor, valid after `land`."""
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
        """Make the compute stream wait for all rows that were fetched."""
        if self._incoming is not None:
            self._computing().wait_event(self._event(self._incoming))

    def store(self, target: torch.Tensor, rows: torch.Tensor, kind: bool = False, held: Any = None) -> Any:
        """Begin to copy contiguous rows to RAM, after earlier stores. Return the event of their arrival.

        One copy of each `kind` is in flight at a time: the compute stream waits for the one before, whose rows and
        `held` object are then freed. Returns None on a device without streams, which has copied already.
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
        """Make the compute stream wait for all stores, and free their memory."""
        for kind in list(self._leaving):
            self._settle(kind)

    def _settle(self, kind: bool) -> None:
        if kind in self._leaving:
            self._computing().wait_event(self._leaving.pop(kind)[1])

    def behind_reads(self) -> None:
        """Make later stores wait for all fetches in flight, which may read RAM that is to be overwritten."""
        if self._incoming is not None:
            self._outgoing.wait_event(self._event(self._incoming))

    def finish(self) -> None:
        """Wait on the host for all copies."""
        if self._incoming is not None and not self._dry:
            self._incoming.synchronize()
            self._outgoing.synchronize()
        self.settle()

    def _copy(self, direction: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._dry:
            here = target if direction == "h2d" else source
            current_card().transfer(direction, target, here, False, clock.current_stream())
        else:
            # From unpinned RAM, a non-blocking copy on XPU reads at the call, before the events its stream waits for.
            # To unpinned RAM it writes at an unknown time. So only pinned RAM is copied without blocking.
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
    """Flat pieces of RAM of one run, of which at most one is spare.

    Copies in flight may still read a piece that is given back. So `reused` is called before it is handed out again, and
    `finish` before it is freed.
    """

    def __init__(self, device: torch.device, reused: Callable[[], None], finish: Callable[[], None]) -> None:
        self._device, self._reused, self._finish = device, reused, finish
        self._spare: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a piece of at least `nbytes` bytes, uint8: the spare one if it is at most 1.25 times as large."""
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
        """Take back a piece. It becomes the spare one, and the former spare one is freed."""
        self.clear()
        self._spare = piece

    def clear(self) -> None:
        """Free the spare piece."""
        if self._spare is not None:
            self._finish()
            self._spare = None


def view(piece: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a shape and dtype at the start of a piece."""
    return piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
