"""Reads weights from files into flat buffers: in parallel, in the order of the files, cast on the way.

A plan of file extents tells which bytes go where; making it touches no file. Files are read by plain reads and never
mapped: a page fault can be neither prefetched, nor cancelled, nor reported.

Reads leave the page cache as it was (`fill_batch`). For weights that stay in RAM, a second copy there would push out
files of other programs. Weights that pass through staging buffers are wanted again in the next step, but they are more
than RAM has room for: the cache would drop each part before its turn comes again. Only several processes that stream
the same weights use it (`direct.share_cache`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import is_out_of_ram, release_frames
from ..speeds import observe_disk
from . import direct
from .hostbuffer import bytes_of
from .stored import Stamp, Stored, check_unchanged, disk_number

STAGING_THREADS = 8  # threads that fill staging buffers: direct reads have no read-ahead, so several are under way
RAM_THREADS = 8  # threads that fill RAM
BATCH_BYTES = 16 * 2**20
CAST_BYTES = 2 * 2**20  # buffer of each reader for bytes that must be cast
_CAST_ELEMENTS = 2**15 - 2**10  # cast at once: from 2**15 on torch would start a team of threads in each reader
_GAP_BYTES = 2**17  # bytes without weights up to this size are read over, in one direct read instead of two
_LOOK_SECONDS = 0.2  # between calls of `look`, at most
_CUT_SHORT = "{} is cut short: it ended while it was read. Download it again."


@dataclass(frozen=True)
class FileExtent:
    """A run of `count` elements in a file: of type `stored`, from byte `offset`.

    They go to byte `at` of a buffer, cast to `dtype`. If there is a `stamp`, the file must still have it.
    """

    path: Path
    offset: int
    count: int
    stored: torch.dtype
    dtype: torch.dtype
    at: int
    stamp: Stamp | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes to read."""
        return self.count * self.stored.itemsize

    def split(self, stored_bytes: int) -> Iterator[FileExtent]:
        """Yield the same as extents of at most `stored_bytes` to read, and at least one element."""
        step = max(1, stored_bytes // self.stored.itemsize)
        for first in range(0, self.count, step):
            yield FileExtent(
                self.path,
                self.offset + first * self.stored.itemsize,
                min(step, self.count - first),
                self.stored,
                self.dtype,
                self.at + first * self.dtype.itemsize,
                self.stamp,
            )


Job = tuple[FileExtent, torch.Tensor]  # an extent, and the flat buffer that it goes to
Look = Callable[[int], None]  # called now and then with the bytes read so far; an error in it ends the reading


def extent_of(stored: Stored, dtype: torch.dtype, at: int) -> FileExtent:
    """Return the extent of a whole tensor, which must be one run in its file, to byte `at` of a buffer."""
    (extent,) = extents_of(stored, dtype, at)
    return extent


def extents_of(stored: Stored, dtype: torch.dtype, at: int) -> Iterator[FileExtent]:
    """Yield the extents of a whole tensor, one for each run in its file, to byte `at` of a buffer."""
    for offset, count in stored.runs or ((stored.offset, prod(stored.shape)),):
        yield FileExtent(stored.path, offset, count, stored.dtype, dtype, at, stored.stamp)
        at += count * dtype.itemsize


def batches(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in the order of the files, in batches of one file each and `BATCH_BYTES` at most.

    Large jobs are split, small ones are put together.
    """
    split = [(part, buffer) for extent, buffer in jobs for part in extent.split(BATCH_BYTES)]
    made: list[list[Job]] = []
    held = 0
    for job in sorted(split, key=lambda job: (job[0].path, job[0].offset)):
        if not made or made[-1][0][0].path != job[0].path or held + job[0].stored_bytes > BATCH_BYTES:
            made.append([])
            held = 0
        made[-1].append(job)
        held += job[0].stored_bytes
    return made


def chunks(batch: list[Job], room: int) -> list[list[Job]]:
    """Return the jobs of a batch in lists, each of which one direct read of at most `room` bytes covers."""
    made: list[list[Job]] = []
    begin = end = 0
    most = room - 2 * direct.SECTOR_BYTES  # a direct read begins and ends at whole sectors
    split = [(part, buffer) for extent, buffer in batch for part in extent.split(most)]
    for part, buffer in sorted(split, key=lambda job: job[0].offset):
        stop = part.offset + part.stored_bytes
        if not made or stop - begin > most or part.offset - end > _GAP_BYTES:
            made.append([])
            begin, end = part.offset, stop
        made[-1].append((part, buffer))
        end = max(end, stop)
    return made


def read_batch(batch: list[Job]) -> None:
    """Read the jobs of one batch through the page cache. Raises OSError or ValueError, in one line naming the file."""
    with _opened(batch) as file:
        for extent, buffer in batch:
            _read_extent(file, extent, buffer)


def fill_batch(batch: list[Job], room: int) -> bool:
    """Read the jobs of one batch, past the page cache unless it has them. Raises as `read_batch` does.

    Uses a chunk of `room` bytes for this thread: see `direct.chunk_bytes`. Return whether all bytes came from the disk.
    """
    from_disk = True
    with _opened(batch) as file:
        direct.read_nothing_ahead(file)
        for jobs in chunks(batch, room):
            begin, end = jobs[0][0].offset, max(extent.offset + extent.stored_bytes for extent, _ in jobs)
            was_cached = direct.is_cached(file, begin, end)
            from_disk = from_disk and not was_cached
            held = None if was_cached else direct.read_chunk(file, begin, end, room)
            for extent, buffer in jobs:
                if held is None:
                    _read_extent(file, extent, buffer, room)
                else:
                    _put(held[extent.offset - begin :][: extent.stored_bytes], extent, buffer)
            if not was_cached:  # sampling the cache, or reads that could not be direct, have filled it
                direct.forget(file, begin, end)
    return from_disk


@contextmanager
def _opened(batch: list[Job]) -> Iterator[BinaryIO]:
    """Open the file of a batch, and check before and after the block that it is unchanged.

    An OSError becomes one that names the file, unless it tells that the system is out of RAM.
    """
    path, stamp = batch[0][0].path, batch[0][0].stamp
    try:
        with torch.inference_mode(), path.open("rb", buffering=0) as file:
            check_unchanged(path, stamp, os.fstat(file.fileno()))
            yield file  # type: ignore[misc]
            check_unchanged(path, stamp, os.fstat(file.fileno()))  # it may have been written to meanwhile
    except OSError as error:
        if is_out_of_ram(error):
            raise
        raise OSError(f"{path} cannot be read ({error.strerror or error}). Check the disk, and try again.") from error


def read(jobs: Iterable[Job], look: Look = lambda read: None) -> None:
    """Read all jobs in several threads, which have ended when this returns or raises.

    `look` is called between batches with the bytes read so far; an error that it raises ends the reading. Raises
    OSError or ValueError, in one line that names the file. After an error the content of the buffers is undefined.
    """
    reading = Reading([list(jobs)], look)
    try:
        reading.wait()
    finally:
        reading.close()


class Reading:
    """Jobs that several threads read, group after group, while others use the weights that are there already.

    It starts with `begin`, or when somebody waits. `look` is called in the thread that waits, with the bytes read so
    far; an error that it raises goes there. `close` ends it.
    """

    def __init__(self, groups: Iterable[Sequence[Job]], look: Look = lambda read: None) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._left: Counter[int] = Counter()  # address of a buffer -> batches that still have to fill it
        self._error: BaseException | None = None
        self._closed = False
        self._so_far = 0
        self._start = 0.0
        work = [batch for jobs in groups for batch in batches(jobs)]
        self._disks: set[int | None] = {disk_number(path) for path in {batch[0][0].path for batch in work}}
        for batch in work:
            self._left.update(_buffers(batch))
        self._room = direct.chunk_bytes(sum(extent.stored_bytes for batch in work for extent, _ in batch))
        self._order = [(sum(extent.stored_bytes for extent, _ in batch), _buffers(batch)) for batch in work]
        self._work = work  # empty once the threads have been started
        self._pool = ThreadPoolExecutor(RAM_THREADS, "ballast-reader-ram")

    def begin(self) -> None:
        """Start the threads, if they have not been started."""
        with self._changed:
            work, self._work = self._work, []
            if not work or self._closed:
                return
            self._start = time.perf_counter()
        for batch in work:
            self._pool.submit(self._fill, batch)
        self._pool.shutdown(wait=False)  # the threads end when all is read

    @property
    def done(self) -> bool:
        """Return whether everything has been read. False for ever after an error."""
        return not self._left

    @property
    def so_far(self) -> int:
        """Bytes of files that have been read."""
        return self._so_far

    @property
    def failed(self) -> bool:
        """Return whether a read has failed. Weights that are not there by then will never be."""
        return self._error is not None

    @property
    def order(self) -> list[tuple[int, set[int]]]:
        """The batches in the order of reading: the bytes of each, and the addresses of its buffers."""
        return self._order

    def has(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether these tensors have been read. True for tensors that are not read here."""
        return not self._left or not any(address_of(tensor) in self._left for tensor in tensors)

    def wait(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until these tensors have been read; by default, all. Raises the error of the reading.

        RuntimeError if it was closed before.
        """
        self.begin()
        wanted = None if tensors is None else {address_of(tensor) for tensor in tensors}
        seen, look = 0, self._look  # `_fill` replaces it after the last batch
        while True:
            with self._changed:
                if self._error:
                    raise self._error
                if not (self._left if wanted is None else any(address in self._left for address in wanted)):
                    break
                if self._closed:
                    raise RuntimeError("the weights were given up while they were read.")
                if seen == self._so_far:
                    self._changed.wait(_LOOK_SECONDS)
                seen = self._so_far
            look(seen)
        if wanted is None:
            look(self._so_far)

    def close(self) -> None:
        """End the reading, and wait until no thread writes to a buffer any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)
        self._look = lambda read: None

    def _fill(self, batch: list[Job]) -> None:
        """Read one batch, in a thread. After the last, note the speed of the disk."""
        try:
            if self._closed or self._error:
                return
            from_disk = fill_batch(batch, self._room)
        except BaseException as error:
            release_frames(error)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            if not from_disk:
                self._disks.add(None)  # from the page cache: the time tells nothing of the disk
            self._so_far += sum(extent.stored_bytes for extent, _ in batch)
            for address in _buffers(batch):
                self._left[address] -= 1
                if not self._left[address]:
                    del self._left[address]
            self._changed.notify_all()
            last = not self._left
        if last:
            self._look = lambda read: None  # it may refer to the unit, which should not live on through this reading
            only = self._disks.pop() if len(self._disks) == 1 else None
            observe_disk(self._so_far, time.perf_counter() - self._start, only)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the buffer that a tensor is a view into."""
    return tensor.untyped_storage().data_ptr()


def _buffers(batch: list[Job]) -> set[int]:
    return {address_of(buffer) for _, buffer in batch}


def _read_extent(file: BinaryIO, extent: FileExtent, buffer: torch.Tensor, room: int = CAST_BYTES) -> None:
    """Read one extent to its place in the buffer, through a small buffer of `room` bytes if it must be cast."""
    file.seek(extent.offset)
    if extent.stored == extent.dtype:
        _read_exactly(file, bytes_of(buffer)[extent.at : extent.at + extent.stored_bytes], extent.path)
        return
    room = min(CAST_BYTES, room)
    staging = memoryview(bytearray(min(room, extent.stored_bytes)))
    for part in extent.split(room):
        _read_exactly(file, staging[: part.stored_bytes], part.path)
        _put(staging[: part.stored_bytes], part, buffer)


def _put(source: memoryview, extent: FileExtent, buffer: torch.Tensor) -> None:
    """Put the bytes of an extent where they belong. ValueError if some are missing."""
    if len(source) < extent.stored_bytes:
        raise ValueError(_CUT_SHORT.format(extent.path))
    stored = torch.frombuffer(source, dtype=extent.stored, count=extent.count)
    target = buffer[extent.at : extent.at + extent.count * extent.dtype.itemsize].view(extent.dtype)
    if extent.stored == extent.dtype and stored.nbytes == target.nbytes:
        ctypes.memmove(target.data_ptr(), stored.data_ptr(), stored.nbytes)  # releases the GIL
        return
    # One call for all: between many small ones the readers would compete for the GIL.
    torch._foreach_copy_(target.split(_CAST_ELEMENTS), stored.split(_CAST_ELEMENTS))


def _read_exactly(file: BinaryIO, target: memoryview, path: Path) -> None:
    while target:  # a read may return fewer bytes than asked for
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(_CUT_SHORT.format(path))
        target = target[count:]
