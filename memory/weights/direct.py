"""Reads past the page cache: weights that are to lie in RAM are not to lie in the cache as well.

Only Linux has all of it; elsewhere files are read as usual.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from typing import BinaryIO

from .hostbuffer import allocate, bytes_of

if sys.platform != "win32":
    import fcntl

CHUNK_BYTES = 4 * 2**20  # of each reader at most, beside the buffers that are filled
_LEAST_CHUNK_BYTES = 2**20  # less is slower by half
_SHARE = 256  # of all that is read; of less than 1 GB large chunks would be more than a tenth of it
SECTOR_BYTES = 4096  # where direct reads begin and end: no disk has larger sectors
_PLACES = 5  # of a chunk that are looked for in the cache, where the system does not tell of all
_UNFIT = (errno.EINVAL, errno.ENOTSUP)  # what file systems say that have no direct reads

_of_thread = threading.local()


def is_cached(file: BinaryIO, begin: int, end: int) -> bool:
    """Return whether the page cache has all of that part of a file. Reads nothing, where the system tells this user."""
    if end > os.fstat(file.fileno()).st_size:
        return False
    pages = cached_pages(file, begin, end)
    return _is_read_at_once(file, begin, end) if pages is None else 0 not in pages


def cached_pages(file: BinaryIO, begin: int, end: int) -> bytes | None:
    """Return a byte for each page of that part of a file, 1 for those in the page cache. Reads nothing.

    None where the system does not tell: a user who neither owns the file nor is root would hear that all are there.
    """
    if sys.platform != "linux" or os.geteuid() not in (0, os.fstat(file.fileno()).st_uid):
        return None
    first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        try:
            told = _libc().mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), pages)
        finally:
            del start  # or the mapping could not go
    return bytes(pages) if told == 0 else None


def _is_read_at_once(file: BinaryIO, begin: int, end: int) -> bool:
    """Return whether sampled places come without waiting. May start reading them: a fast disk looks like a cache."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte, step = bytearray(1), max(1, (end - 1 - begin) // (_PLACES - 1))
    try:
        return all(os.preadv(file.fileno(), [byte], at, os.RWF_NOWAIT) for at in {*range(begin, end, step), end - 1})
    except OSError:
        return False


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def chunk_bytes(read_bytes: int) -> int:
    """Return how large the chunk of each reader is where so much is read in all: whole sectors."""
    share = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, read_bytes // _SHARE))
    return share // SECTOR_BYTES * SECTOR_BYTES


def read_nothing_ahead(file: BinaryIO) -> None:
    """Turn off the system's read-ahead for this opening of a file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def forget(file: BinaryIO, begin: int, end: int) -> None:
    """Drop that part of a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        first = begin // SECTOR_BYTES * SECTOR_BYTES
        os.posix_fadvise(file.fileno(), first, -(-end // SECTOR_BYTES) * SECTOR_BYTES - first, os.POSIX_FADV_DONTNEED)


def read_chunk(file: BinaryIO, begin: int, end: int, room: int) -> memoryview | None:
    """Read these bytes of a file directly: with whole sectors around them at most `room` bytes.

    They are this thread's until its next call. Shorter if the file ends before. None where the system has no direct
    reads; where the file system has none, the bytes come through the cache.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    if getattr(_of_thread, "room", 0) != room:
        _of_thread.chunk, _of_thread.room = allocate(room), room
    first = begin // SECTOR_BYTES * SECTOR_BYTES
    target = bytes_of(_of_thread.chunk)[: -(-end // SECTOR_BYTES) * SECTOR_BYTES - first]
    flags, done = fcntl.fcntl(file, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        done = _read(file, first, target, end - first, SECTOR_BYTES)
    except OSError as error:
        if error.errno not in _UNFIT:
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    done += _read(file, first + done, target[done:], end - first - done)  # nothing, as a rule
    return target[begin - first : min(done, end - first)]


def _read(file: BinaryIO, first: int, target: memoryview, least: int, unit: int = 1) -> int:
    """Read from byte `first` of a file until there are `least` bytes, or the file ends. Returns how many there are.

    Ends before that, too, where not a whole number of units has come: direct reads cannot go on from there.
    """
    file.seek(first)
    done = 0
    while done < least and done % unit == 0:  # one read may bring less than all
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
