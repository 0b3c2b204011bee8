"""The way to the device for weights that are not in pinned memory: reader threads, pinned windows, the ring's slots.

The source is files, or RAM that could not be pinned. Threads read it into a few windows, ahead of what runs; from a
window one asynchronous copy brings a group to its slot. Only here may the thread that computes wait on the host.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..host import management as host
from ..planning.ring_offsets import WINDOWS
from ..weights import hostbuffer
from ..weights.encoding import Source, extents
from ..weights.reader import BATCH_BYTES, READERS, FileExtent, batches, extents_of, read_batch
from ..weights.stored import Stored
from .ring import RingSlot, WeightGroup
from .streams import Queues

# [Note: Staging]
# Weights in pageable RAM or in files cannot be copied to the device asynchronously. They come through a few pinned
# windows instead: reader threads fill a window (a `_Fill`), one asynchronous copy takes it to the group's slot in the
# ring, and the window is free again when that copy is done (`_Window.copied`).
#
# Copies must be queued in the order in which they were asked for, since all share one stream and a late read must not
# let a later group overtake: `_due` holds slots until everything before them has been sent. Whichever thread comes
# last queues them (`_send_due`), usually the reader that completed the first one.
#
# The host waits in two places only: `StagingBuffers.wait`, for a group that runs before its copy is queued (the disk
# is the bottleneck then), and `StagingBuffers.bring`, when no window is free. Windows are filled ahead for the groups
# that come next (`ahead`); a window that was read for later is taken back if a group needs it now (`_taken_back`).

_TAKEN_AWAY = "the model was taken off the device while it ran."

Part = FileExtent | tuple[torch.Tensor, int]  # from a file; or a tensor in RAM, and the byte where it goes


@dataclass(eq=False)
class _Fill:
    """The content of a window, now or when its parts are read. One without a window is of a group in pinned RAM."""

    group: WeightGroup | None
    window: _Window | None
    after: _Fill | None  # what was still being read into the window when this came
    left: int = 0
    slot: RingSlot | None = None  # where it is to go
    taken: bool = False  # by `bring`
    error: BaseException | None = None
    read: Any = None  # event of a simulated device: the parts have come from its disk


@dataclass(eq=False)
class _Window:
    memory: torch.Tensor
    copied: Any  # event: the last copy out of it is done
    fill: _Fill | None = None


@dataclass(eq=False)
class _Chunk:
    """As much as a window takes: what is read into it, and which bytes of it go where on the device."""

    parts: list[Part] = field(default_factory=list)
    targets: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    end: int = 0
    is_last: bool = False  # of its group


class StagingBuffers:
    """Windows of `nbytes` each, and the threads that fill them. `close` must follow. See [Note: Staging].

    One thread computes and calls this; the copies to slots are queued in the order in which they were asked for, by
    whichever thread comes last, the copies of `bring` by its caller.
    """

    def __init__(self, queues: Queues, nbytes: int) -> None:
        self.nbytes = nbytes
        self._queues = queues
        memory = [hostbuffer.window(nbytes, queues.device) for _ in range(WINDOWS)]
        self._windows = [_Window(each, queues.event(waited_for=True)) for each in memory]
        self._changed = threading.Condition()
        self._closed = False
        self._coming: list[WeightGroup] = []
        self._due: deque[RingSlot] = deque()  # whose copies wait for what is read, and for each other
        self._pool = ThreadPoolExecutor(READERS, "ballast-reader")  # starts work in the order in which it is given

    @property
    def held_bytes(self) -> int:
        """RAM that the windows take."""
        return sum(window.memory.nbytes for window in self._windows)

    def pin(self) -> bool:
        """Pin the windows. False if not all could be, in which case none is."""
        if all(hostbuffer.pin(window.memory, self._queues.device) for window in self._windows):
            return True
        for window in self._windows:
            hostbuffer.unpin(window.memory)
        return False

    def has_room(self, group: WeightGroup) -> bool:
        """Return whether a group is in RAM or has been read, or there is a window for it."""
        with self._changed:
            return not group.parts or self._fill_of(group) is not None or bool(self._idle())

    def load(self, slot: RingSlot) -> None:
        """Send a group to its slot: now if it has been read, else as soon as it is."""
        group = slot.group
        with self._changed:
            self.forget(slot)
            if group.parts:
                self._coming = [other for other in self._coming if other is not group]
                fill = self._fill_of(group) or self._begin(group, group.parts, self._idle() or self._taken_back())
            else:
                fill = _Fill(group, None, None)
            fill.slot, slot.pending = slot, fill
            if self._queues.copying:
                self._due.append(slot)
                self._send_due()
            elif not fill.left:
                self._send(fill)

    def forget(self, slot: RingSlot) -> None:
        """Cancel the copy to a slot if it has not been sent yet."""
        with self._changed:
            if slot.pending:
                slot.pending.slot = slot.pending = None
                self._due = deque(other for other in self._due if other is not slot)
                self._send_due()

    def ahead(self, groups: Sequence[WeightGroup]) -> None:
        """Read so many of the groups, in order, as there are windows for, now and when more become free."""
        with self._changed:
            self._coming = list(groups)
            self._read_ahead()

    def wait(self, slot: RingSlot) -> None:
        """Wait until the copy to a slot has been queued. Raises what the reader raised."""
        with self._changed:
            fill = slot.pending
            if fill is None:
                return
            if self._queues.copying:
                self._changed.wait_for(lambda: self._closed or fill.error or not fill.slot)
            else:
                self._changed.wait_for(lambda: self._closed or not fill.left)
            if self._closed:
                raise RuntimeError(_TAKEN_AWAY)
            if fill.error:
                self.forget(slot)
                slot.holds = False
                raise fill.error
            if not self._queues.copying and fill.slot:
                self._send(fill)

    def bring(self, targets: Sequence[tuple[Stored, torch.Tensor]]) -> None:
        """Read weights to contiguous tensors on the device; their copies are queued where the caller computes."""
        for _ in self.bringing([targets]):
            pass

    def bringing(self, groups: Iterable[Sequence[tuple[Stored, torch.Tensor]]]) -> Generator[None, None, None]:
        """Bring groups one by one: one has come at each step, while others are read into idle windows."""
        under_way: deque[tuple[_Fill, _Chunk]] = deque()
        try:
            for targets in groups:
                for chunk in self._chunks(targets):
                    while not (fill := self._begin_chunk(chunk, not under_way)):
                        if self._deliver(*under_way.popleft()):
                            yield
                    under_way.append((fill, chunk))
            while under_way:
                if self._deliver(*under_way.popleft()):
                    yield
        finally:
            for fill, _ in under_way:
                fill.taken = False

    def _begin_chunk(self, chunk: _Chunk, waits: bool) -> _Fill | None:
        """Begin to read a chunk, if there is a window for it, or it waits for one."""
        with self._changed:
            while not (idle := self._idle()):
                if not waits:
                    return None
                self._wait_for_window()
            fill = self._begin(None, chunk.parts, idle)
            fill.taken = True
            return fill

    def settle(self) -> None:
        """Wait until nothing is being read."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not any(w.fill and w.fill.left for w in self._windows))

    def close(self) -> None:
        """End the threads and let go of the windows, when the copies out of them are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)
        for window in self._windows:
            if window.copied:
                window.copied.synchronize()
            if window.fill and window.fill.slot:
                self.forget(window.fill.slot)
            window.fill = None  # each knows the other, and would wait for the collector
        self._windows.clear()
        self._due.clear()

    # Windows; all under the lock

    def _fill_of(self, group: WeightGroup) -> _Fill | None:
        fills = (window.fill for window in self._windows)
        return next((fill for fill in fills if fill and fill.group is group and not fill.error), None)

    def _idle(self) -> list[_Window]:
        """Return the windows that may be filled anew: free ones first, then those that were read for later."""
        free = [window for window in self._windows if window.fill is None]
        unwanted = (w for w in reversed(self._windows) if w.fill and not w.fill.taken)
        return free + [w for w in unwanted if w.fill and (w.fill.error or not w.fill.slot)]

    def _wait_for_window(self) -> None:
        """Wait until one may be filled anew, of those that others than this caller have filled."""
        self._changed.wait_for(lambda: self._closed or self._idle() or (not self._queues.copying and self._read()))
        if self._closed:
            raise RuntimeError(_TAKEN_AWAY)
        for fill in [] if self._queues.copying else self._read():
            self._send(fill)

    def _read(self) -> list[_Fill]:
        """Return what has been read for slots."""
        fills = [window.fill for window in self._windows]
        return [fill for fill in fills if fill and fill.slot and not (fill.left or fill.error)]

    def _taken_back(self) -> list[_Window]:
        """Return the window that was last filled for a slot, which gets nothing now."""
        window = next(w for w in reversed(self._windows) if w.fill and w.fill.slot)
        if window.fill and window.fill.slot:
            window.fill.slot.holds = False
            self.forget(window.fill.slot)
        return [window]

    def _begin(self, group: WeightGroup | None, parts: Sequence[Part], idle: list[_Window]) -> _Fill:
        window = idle[0]
        self._windows.remove(window)
        self._windows.append(window)
        if window.fill:
            window.fill.error = window.fill.error or CancelledError()  # nobody waits for it, unless it failed
            window.fill.slot = None  # each knows the other, and would wait for the collector
        fill = window.fill = _Fill(group, window, window.fill)
        nbytes = sum(part.stored_bytes for part in parts if isinstance(part, FileExtent))
        fill.read = self._queues.read(nbytes, window.copied)
        work = list(_work(parts, window.memory))
        fill.left = len(work)
        for each in work:
            self._pool.submit(self._run, fill, each)
        return fill

    def _read_ahead(self) -> None:
        for group in self._coming:
            if self._fill_of(group) is None:
                if not (free := [w for w in self._idle() if not w.fill or w.fill.group not in self._coming]):
                    return
                self._begin(group, group.parts or (), free)

    def _send_due(self) -> None:
        """Queue the copies of what is there, up to the first that is not."""
        while self._due and not (fill := self._due[0].pending).left:
            self._due.popleft()
            if not fill.error:  # or whoever waits for it is told
                self._send(fill)

    def _send(self, fill: _Fill) -> None:
        """Queue the copy to the slot that a fill is for."""
        slot, group, window = fill.slot, fill.group, fill.window
        assert slot and group
        if fill.read:
            slot.after = [*slot.after, fill.read]
        slot.receive([window.memory[: group.packed_bytes]] if window else group.hosts, self._queues)
        fill.slot = slot.pending = None
        if window:
            self._queues.mark_copy(window.copied)
            window.fill = None

    def _wait_for(self, fill: _Fill) -> None:
        self._changed.wait_for(lambda: self._closed or not fill.left)
        if self._closed:
            raise RuntimeError(_TAKEN_AWAY)

    def _deliver(self, fill: _Fill, chunk: _Chunk) -> bool:
        """Wait for a chunk and queue its copies. Returns whether it is the last of its group."""
        with self._changed:
            try:
                host.throw_if_interrupted()
                self._wait_for(fill)
                if fill.error:
                    raise fill.error
                assert fill.window
                self._queues.wait(fill.read)
                try:
                    with torch.inference_mode():  # where the targets were cut up, whoever asks for what comes
                        for target, at in chunk.targets:
                            target.copy_(fill.window.memory[at : at + target.nbytes], non_blocking=True)
                finally:  # also of those copies that were queued before an interrupt
                    self._queues.mark(fill.window.copied)
                fill.window.fill = None
                return chunk.is_last
            finally:
                fill.taken = False

    def _chunks(self, targets: Iterable[tuple[Stored, torch.Tensor]]) -> Iterator[_Chunk]:
        chunk = _Chunk()
        for stored, target in sorted(targets, key=lambda item: (item[0].path, item[0].offset)):
            flat = target.reshape(-1).view(torch.uint8)
            most = self.nbytes // target.dtype.itemsize * stored.dtype.itemsize
            for extent in (part for run in extents_of(stored, target.dtype, 0) for part in run.split(most)):
                size = extent.count * target.dtype.itemsize
                if chunk.end + size > self.nbytes:
                    yield chunk
                    chunk = _Chunk()
                chunk.parts.append(replace(extent, at=chunk.end))
                chunk.targets.append((flat[extent.at : extent.at + size], chunk.end))
                chunk.end += -(-size // hostbuffer.ALIGNMENT_BYTES) * hostbuffer.ALIGNMENT_BYTES
        chunk.is_last = True
        yield chunk

    # In the threads

    @torch.inference_mode()
    def _run(self, fill: _Fill, work: Callable[[], None]) -> None:
        try:
            if fill.after:
                with self._changed:  # its work began before this, or this would not have begun
                    self._changed.wait_for(lambda: self._closed or not (fill.after and fill.after.left))
            if fill.window and fill.window.copied and not fill.read:  # a simulated disk has waited itself
                fill.window.copied.synchronize()
            if not (self._closed or fill.error):
                work()
        except BaseException as error:
            fill.error = fill.error or error
        finally:
            with self._changed:
                fill.left -= 1
                if not fill.left:
                    fill.after = None
                    self._finish(fill)

    def _finish(self, fill: _Fill) -> None:
        try:
            if self._queues.copying and not self._closed:
                self._send_due()  # where there are no streams, the thread that computes sends
                self._read_ahead()
        except BaseException as error:
            fill.error = error
        self._changed.notify_all()


def parts_of(group: WeightGroup, found: Mapping[int, Source]) -> list[Part]:
    """Return what makes up a group: its weights as they lie in the files, by `id`, and its buffers as they are in RAM.

    A group that is packed already comes from its buffers in RAM.
    """
    parts: list[Part] = []
    if group.hosts:
        begins = (0, group.stored_bytes)
        for begin, host in zip(begins, group.hosts, strict=False):
            parts += [(part, begin + i * BATCH_BYTES) for i, part in enumerate(host.split(BATCH_BYTES))]
        return parts
    tensors = group.tensors()
    for tensor, at in zip(tensors, hostbuffer.layout(tensors)[0], strict=True):
        if id(tensor) not in found:
            parts.append((tensor, at))
            continue
        for stored, begin in extents(found[id(tensor)]):
            parts += extents_of(stored, tensor.dtype, at + begin)
    return parts


def _work(parts: Sequence[Part], memory: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Yield what must be done to fill a window, each for one thread."""
    for part in parts:
        if not isinstance(part, FileExtent):
            yield partial(_copy, *part, memory)
    for batch in batches((part, memory) for part in parts if isinstance(part, FileExtent)):
        yield partial(read_batch, batch)


def _copy(tensor: torch.Tensor, at: int, memory: torch.Tensor) -> None:
    hostbuffer.view_of(memory, at, tensor).copy_(tensor)
