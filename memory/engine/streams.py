"""The queues of a device: where it computes, where it copies, and the events between them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..accelerator import is_wddm
from ..host.flags import host_flags

_copy_streams: dict[torch.device, Any] = {}
_copy_streams_lock = threading.Lock()


class Queues:
    """The device's streams and events; where there are none, copies block and the events are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = torch.get_device_module(device)
        # `torch.cpu` has such classes too, which do nothing.
        names = ("Stream", "Event", "current_stream", "stream")
        has_streams = device.type != "cpu" and all(hasattr(self.backend, name) for name in names)
        self._flushes = is_wddm(device.type)
        self.copying = self._copy_stream() if has_streams and not host_flags().blocking else None

    def _copy_stream(self) -> Any:
        # One for the process: the memory that an allocator has given to a stream stays with it.
        with _copy_streams_lock:
            if self.device not in _copy_streams:
                _copy_streams[self.device] = self.backend.Stream(device=self.device)
            return _copy_streams[self.device]

    def event(self, waited_for: bool = False) -> Any:
        """Return a new event, None where there are none. One that the host waits for lets it sleep meanwhile."""
        if not self.copying:
            return None
        return self.backend.Event(blocking=True) if waited_for and self.device.type == "cuda" else self.backend.Event()

    def timer(self) -> Any:
        """Return a new event that tells the time to another such."""
        return self.backend.Event(enable_timing=True) if self.copying else None

    def mark(self, event: Any) -> None:
        """Record the event behind the work that this thread has queued."""
        if event:
            event.record(self.backend.current_stream(self.device))

    def wait(self, event: Any) -> None:
        """Make work that this thread queues from now on wait for the event."""
        if event:
            self.backend.current_stream(self.device).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], done: Any) -> None:
        """Queue a copy to the device behind some events, and let another happen when it is there."""
        if self.copying is None:
            target.copy_(source)
            return
        for event in after:
            self.copying.wait_event(event)
        with self.backend.stream(self.copying):
            target.copy_(source, non_blocking=True)
        done.record(self.copying)
        if self._flushes:
            self.copying.query()  # or the driver may keep the copy back until more is queued

    def read(self, nbytes: int, after: Any) -> Any:
        """Return the event that so many bytes have come from a simulated disk, begun when `after` has happened.

        None on a real device, whose files are read when they have been.
        """
        simulated = getattr(self.backend, "read_from_disk", None)
        return simulated(nbytes, after) if simulated and self.copying and nbytes else None

    def mark_copy(self, event: Any) -> None:
        """Record the event behind the copies that are queued."""
        if event:
            event.record(self.copying)

    def finish(self) -> None:
        """Wait on the host for the copies under way."""
        if self.copying:
            self.copying.synchronize()
