"""The streams of a device: the one that computes, the copy stream, and the events between them."""

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
    """The streams and events of one device.

    On the CPU, without streams in the backend, or with the host's flag for blocking copies, `copying` is None: copies
    then block, and all events are None. Every method takes that into account.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = torch.get_device_module(device)
        # `torch.cpu` has classes of these names too, which do nothing.
        names = ("Stream", "Event", "current_stream", "stream")
        has_streams = device.type != "cpu" and all(hasattr(self.backend, name) for name in names)
        self._flushes = is_wddm(device.type)
        self.copying = self._copy_stream() if has_streams and not host_flags().blocking else None

    def _copy_stream(self) -> Any:
        """Return the copy stream of the device, made once for the process."""
        # The caching allocator keeps freed memory for the stream that it was allocated on: a second stream could not
        # reuse it.
        with _copy_streams_lock:
            if self.device not in _copy_streams:
                _copy_streams[self.device] = self.backend.Stream(device=self.device)
            return _copy_streams[self.device]

    def event(self, waited_for: bool = False) -> Any:
        """Return a new event; None without a copy stream.

        With `waited_for` the host sleeps while it waits for the event. On CUDA it would otherwise keep a core busy.
        """
        if not self.copying:
            return None
        return self.backend.Event(blocking=True) if waited_for and self.device.type == "cuda" else self.backend.Event()

    def enter(self) -> None:
        """Make the device the current one of this thread, which begins. Else card 0 would get a context by its work."""
        if self.copying:
            self.backend.set_device(self.device)

    def timer(self) -> Any:
        """Return a new event that records the time; None without a copy stream."""
        return self.backend.Event(enable_timing=True) if self.copying else None

    def mark(self, event: Any) -> None:
        """Record the event on the current stream, behind the work that this thread has queued."""
        if event:
            event.record(self.backend.current_stream(self.device))

    def wait(self, event: Any) -> None:
        """Make the current stream wait for the event, before work that this thread queues from now on."""
        if event:
            self.backend.current_stream(self.device).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], done: Any) -> None:
        """Queue a copy to the device on the copy stream, behind the events in `after`. Record `done` behind it.

        Without a copy stream the copy is done when this returns. `source` must be pinned to make the copy asynchronous.
        """
        if self.copying is None:
            target.copy_(source)
            return
        for event in after:
            self.copying.wait_event(event)
        # Without `device`, leaving the stream would make card 0 current, and give it a CUDA context of some hundred MB.
        with self.backend.device(self.device), self.backend.stream(self.copying):
            target.copy_(source, non_blocking=True)
        done.record(self.copying)
        if self._flushes:
            self.copying.query()  # WDDM batches commands: without a query it may hold the copy back until more come

    def read(self, nbytes: int, after: Any) -> Any:
        """Return the event of a simulated disk that it has read `nbytes`, beginning when `after` has happened.

        None on a real device: there a reader thread knows itself when its file is read.
        """
        simulated = getattr(self.backend, "read_from_disk", None)
        return simulated(nbytes, after) if simulated and self.copying and nbytes else None

    def wait_aside(self, event: Any) -> None:
        """Make a reader thread wait for the event. The clock of a simulated device, which is the caller's, stays."""
        if event:
            getattr(event, "wait_aside", event.synchronize)()

    def mark_copy(self, event: Any) -> None:
        """Record the event on the copy stream, behind the copies that are queued."""
        if event:
            event.record(self.copying)

    def finish(self) -> None:
        """Make the host wait for all copies that are queued."""
        if self.copying:
            self.copying.synchronize()
