"""Staging buffers: the way to the device for weights in files, or in RAM that could not be pinned.

Reader threads fill a few pinned buffers (windows, in names) ahead of the running group. From a full buffer one
asynchronous copy takes the group to its slot in the ring. See [Note: Staging].
"""

from __future__ import annotations

import ctypes
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
from ..weights import direct, hostbuffer
from ..weights.encoding import Source, extents
from ..weights.reader import BATCH_BYTES, STAGING_THREADS, FileExtent, batches, extents_of, fill_batch, read_batch
from ..weights.stored import Stored
from .ring import RingSlot, WeightGroup
from .streams import Queues

# [Note: Staging]
# Weights in pageable RAM or in files cannot be copied to the device asynchronously. They pass through a few pinned
# staging buffers instead (`WINDOWS`, 3: one is read, one waits, one is copied). Reader threads fill a buffer (a
# `_Fill`), and one asynchronous copy takes it to the group's slot in the ring. The buffer is free for the next fill
# when that copy is done (`_Window.copied`).
#
# Copies are queued in the order of `load`. All share the copy stream, and a slow read must not let a later group
# overtake. `_due` holds slots until every copy before them has been queued. `_send_due` queues them in whichever thread
# completes the first one due, usually a reader.
#
# The computing thread waits on the host in two cases. `wait`: a group runs before its copy is queued, because the disk
# is the bottleneck. `bring`: no buffer is free, or its own is still being read.
#
# Buffers are filled ahead for the next groups (`ahead`). Such a prefetched content is given up if another group needs
# the buffer now (`_idle`). If all contents are already due to slots, the latest of these is given up (`_taken_back`).

_LOOK_SECONDS = 0.2  # a slow disk is waited for so long before the host is asked again whether to stop
_TAKEN_AWAY = "the model was taken off the device while it ran."

Part = FileExtent | tuple[torch.Tensor, int]  # from a file; or a tensor in RAM, and its byte in the staging buffer


@dataclass(eq=False)
class _Fill:
    """A content of a staging buffer, from the start of its reading until its copy is queued or it is given up.

    A fill with `window` None stands for a group in pinned RAM, which only has to keep its turn among the copies.
    """

    group: WeightGroup | None
    window: _Window | None
    after: _Fill | None  # the content before, which may still be being read into the same memory
    left: int = 0  # calls of the reader threads that are not done
    slot: RingSlot | None = None  # the copy's target; None for a prefetched content, or one of `bring`
    taken: bool = False  # in use by `bring`
    error: BaseException | None = None
    read: Any = None  # event of a simulated device: its disk has read the parts


@dataclass(eq=False)
class _Window:
    """One staging buffer. `fill` is None while it is free."""

    memory: torch.Tensor
    copied: Any  # event: the last copy out of it is done
    fill: _Fill | None = None


@dataclass(eq=False)
class _Chunk:
    """As much of `bringing` as one staging buffer takes: parts to read, and targets with their byte in the buffer."""

    parts: list[Part] = field(default_factory=list)
    targets: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    end: int = 0
    is_last: bool = False  # the last chunk of its group


class StagingBuffers:
    """`WINDOWS` staging buffers of `nbytes` each, and the threads that fill them. See [Note: Staging].

    `close` must follow. One thread at a time computes, and calls `load`, `wait` and `bring`; others may cancel a copy
    with `forget`. `load` queues copies to ring slots in the order of its calls: whichever thread completes the first
    one due queues it. `bring` queues its own copies, on the stream of its caller.
    """

    def __init__(self, queues: Queues, nbytes: int) -> None:
        self.nbytes = nbytes
        self._queues = queues
        memory = [hostbuffer.window(nbytes, queues.device) for _ in range(WINDOWS)]
        self._windows = [_Window(each, queues.event(waited_for=True)) for each in memory]
        self._changed = threading.Condition()
        self._closed = False
        self._coming: list[WeightGroup] = []
        self._due: deque[RingSlot] = deque()  # slots whose copies wait for a read, or for the slots before them
        self._room = direct.chunk_bytes(nbytes * WINDOWS)
        # It starts work in the order of `submit`.
        self._pool = ThreadPoolExecutor(STAGING_THREADS, "ballast-reader-staging", queues.enter)

    @property
    def held_bytes(self) -> int:
        """Bytes of RAM that the staging buffers take."""
        return sum(window.memory.nbytes for window in self._windows)

    def pin(self) -> bool:
        """Pin the staging buffers, all or none. Return whether they are pinned."""
        if all(hostbuffer.pin(window.memory, self._queues.device) for window in self._windows):
            return True
        for window in self._windows:
            hostbuffer.unpin(window.memory)
        return False

    def has_room(self, group: WeightGroup) -> bool:
        """Return whether `load` of the group would cancel no other group's copy."""
        with self._changed:
            return not group.parts or self._fill_of(group) is not None or bool(self._idle())

    def load(self, slot: RingSlot) -> None:
        """Send a group to its slot: now if it has been read, else as soon as it is and all copies before it are queued.

        A group without `parts` is in pinned RAM, and takes no staging buffer.
        """
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
        """Cancel the copy to a slot, if it has not been queued yet."""
        with self._changed:
            if slot.pending:
                slot.pending.slot = slot.pending = None
                self._due = deque(other for other in self._due if other is not slot)
                self._send_due()

    def ahead(self, groups: Sequence[WeightGroup]) -> None:
        """Prefetch these groups in order into free staging buffers, now and whenever one becomes free.

        Replaces the groups of the call before.
        """
        with self._changed:
            self._coming = list(groups)
            self._read_ahead()

    def wait(self, slot: RingSlot) -> None:
        """Wait until the copy to a slot has been queued.

        Raises the reader's error, or RuntimeError if the model was removed from the device meanwhile. The host may stop
        the run while it waits.
        """
        with self._changed:
            fill = slot.pending
            if fill is None:
                return
            self._wait(lambda: fill.error or not fill.slot if self._queues.copying else not fill.left)
            if fill.error:
                self.forget(slot)
                slot.holds = False
                raise fill.error
            if not self._queues.copying and fill.slot:
                self._send(fill)

    def bring(self, targets: Sequence[tuple[Stored, torch.Tensor]]) -> None:
        """Read weights from files to contiguous tensors on the device. Their copies are queued on the caller's stream.

        `targets` are places in files, each with its tensor. Raises as the readers do.
        """
        for _ in self.bringing([targets]):
            pass

    def bringing(self, groups: Iterable[Sequence[tuple[Stored, torch.Tensor]]]) -> Generator[None, None, None]:
        """Bring groups one by one: yield when all copies of one are queued, while the next ones are read.

        Closing the generator gives up the rest.
        """
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
        """Begin to read a chunk. None if no staging buffer is free, unless it `waits` for one."""
        with self._changed:
            while not (idle := self._idle()):
                if not waits:
                    return None
                self._wait_for_window()
            fill = self._begin(None, chunk.parts, idle)
            fill.taken = True
            return fill

    def wait_for_reads(self) -> None:
        """Wait until nothing is being read."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not any(w.fill and w.fill.left for w in self._windows))

    def close(self) -> None:
        """End the threads, wait for copies out of the staging buffers, and free these.

        A `wait` under way in another thread raises RuntimeError.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)
        for window in self._windows:
            if window.copied:
                window.copied.synchronize()
            if window.fill and window.fill.slot:
                self.forget(window.fill.slot)
            window.fill = None  # a cycle, which only the garbage collector would free
        self._windows.clear()
        self._due.clear()

    # Staging buffers; all under the lock

    def _fill_of(self, group: WeightGroup) -> _Fill | None:
        """Return the fill that has, or will have, the group's weights."""
        fills = (window.fill for window in self._windows)
        return next((fill for fill in fills if fill and fill.group is group and not fill.error), None)

    def _idle(self) -> list[_Window]:
        """Return the staging buffers that may be filled anew: free ones, then prefetched ones, the latest first."""
        free = [window for window in self._windows if window.fill is None]
        unwanted = (w for w in reversed(self._windows) if w.fill and not w.fill.taken)
        return free + [w for w in unwanted if w.fill and (w.fill.error or not w.fill.slot)]

    def _wait_for_window(self) -> None:
        """Wait until a staging buffer may be filled anew. All are in use by others than this caller."""
        self._wait(lambda: self._idle() or (not self._queues.copying and self._read()))
        for fill in [] if self._queues.copying else self._read():
            self._send(fill)

    def _read(self) -> list[_Fill]:
        """Return the fills for slots that have been read and not been sent."""
        fills = [window.fill for window in self._windows]
        return [fill for fill in fills if fill and fill.slot and not (fill.left or fill.error)]

    def _taken_back(self) -> list[_Window]:
        """Return the staging buffer that was filled last for a slot. The copy to that slot is cancelled."""
        window = next(w for w in reversed(self._windows) if w.fill and w.fill.slot)
        if window.fill and window.fill.slot:
            window.fill.slot.holds = False
            self.forget(window.fill.slot)
        return [window]

    def _begin(self, group: WeightGroup | None, parts: Sequence[Part], idle: list[_Window]) -> _Fill:
        """Give the first of the `idle` staging buffers a new content, and submit its parts to the threads."""
        window = idle[0]
        self._windows.remove(window)
        self._windows.append(window)
        if window.fill:
            window.fill.error = window.fill.error or CancelledError()  # its readers stop; nobody waits for it
            window.fill.slot = None  # a cycle, which only the garbage collector would free
        fill = window.fill = _Fill(group, window, window.fill)
        nbytes = sum(part.stored_bytes for part in parts if isinstance(part, FileExtent))
        fill.read = self._queues.read(nbytes, window.copied)
        work = list(_work(parts, window.memory, self._room))
        fill.left = len(work)
        for each in work:
            self._pool.submit(self._run, fill, each)
        return fill

    def _read_ahead(self) -> None:
        """Prefetch the groups of `ahead`, until no staging buffer is free for the next."""
        for group in self._coming:
            if self._fill_of(group) is None:
                if not (free := [w for w in self._idle() if not w.fill or w.fill.group not in self._coming]):
                    return
                self._begin(group, group.parts or (), free)

    def _send_due(self) -> None:
        """Queue the copies whose parts have been read, up to the first that has not."""
        while self._due and not (fill := self._due[0].pending).left:
            self._due.popleft()
            if not fill.error:  # else `wait` raises it
                self._send(fill)

    def _send(self, fill: _Fill) -> None:
        """Queue the copy from a staging buffer, or from pinned RAM, to the slot that the fill is for."""
        slot, group, window = fill.slot, fill.group, fill.window
        assert slot and group
        if fill.read:
            slot.after = [*slot.after, fill.read]
        slot.receive([window.memory[: group.packed_bytes]] if window else group.hosts, self._queues)
        fill.slot = slot.pending = None
        if window:
            self._queues.mark_copy(window.copied)
            window.fill = None

    def _wait(self, is_done: Callable[[], object]) -> None:
        """Wait until `is_done`. RuntimeError once the buffers are closed; the host's error if it stops the run."""
        while not (self._closed or is_done()):
            if not self._changed.wait(_LOOK_SECONDS):
                host.throw_if_interrupted()
        if self._closed:
            raise RuntimeError(_TAKEN_AWAY)

    def _deliver(self, fill: _Fill, chunk: _Chunk) -> bool:
        """Wait until a chunk is read, and queue its copies. Return whether it is the last chunk of its group."""
        with self._changed:
            try:
                host.throw_if_interrupted()
                self._wait(lambda: not fill.left)
                if fill.error:
                    raise fill.error
                assert fill.window
                self._queues.wait(fill.read)
                try:
                    with torch.inference_mode():  # `_chunks` made the targets' views, maybe in inference mode
                        for target, at in chunk.targets:
                            target.copy_(fill.window.memory[at : at + target.nbytes], non_blocking=True)
                finally:  # an interrupt may come between the copies: those queued still read the buffer
                    self._queues.mark(fill.window.copied)
                fill.window.fill = None
                return chunk.is_last
            finally:
                fill.taken = False

    def _chunks(self, targets: Iterable[tuple[Stored, torch.Tensor]]) -> Iterator[_Chunk]:
        """Split the weights of one group into chunks of at most `nbytes`, in the order of the files."""
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
    def _run(self, fill: _Fill, work: Callable[[], object]) -> None:
        """Do one part of a fill's reading, in a reader thread. An error is kept in the fill."""
        try:
            if fill.after:
                with self._changed:  # no deadlock: the pool began the older fill's work before this
                    self._changed.wait_for(lambda: self._closed or not (fill.after and fill.after.left))
            if fill.window:
                self._queues.wait_aside(fill.window.copied)
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
        """Send what is due and prefetch, after the last part of a fill has been read."""
        try:
            if self._queues.copying and not self._closed:
                self._send_due()  # where there are no streams, the thread that computes sends
                self._read_ahead()
        except BaseException as error:
            fill.error = error
        self._changed.notify_all()


def parts_of(group: WeightGroup, found: Mapping[int, Source]) -> list[Part]:
    """Return the parts that a staging buffer is filled with for a group.

    Weights that `found` has, by `id`, are file extents; other tensors are copied from RAM. A packed group is copied
    from its host buffers, in parts of `BATCH_BYTES`.
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


def _work(parts: Sequence[Part], memory: torch.Tensor, room: int) -> Iterator[Callable[[], object]]:
    """Yield the calls that fill a staging buffer, each for one thread. `room` is that of `fill_batch`."""
    for part in parts:
        if not isinstance(part, FileExtent):
            yield partial(_copy, *part, memory)
    for batch in batches((part, memory) for part in parts if isinstance(part, FileExtent)):
        yield partial(read_batch, batch) if direct.shares_cache() else partial(fill_batch, batch, room)


def _copy(tensor: torch.Tensor, at: int, memory: torch.Tensor) -> None:
    """Copy a tensor to byte `at` of a staging buffer, in this thread alone: torch would start a team of threads."""
    if hostbuffer.can_pack(tensor):
        ctypes.memmove(memory.data_ptr() + at, tensor.data_ptr(), tensor.nbytes)  # releases the GIL
    else:
        hostbuffer.view_of(memory, at, tensor).copy_(tensor)
