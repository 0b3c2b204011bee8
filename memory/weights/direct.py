"""Reads past the page cache, which weights would fill for no use.

Only Linux has all of it. Elsewhere files are read as usual.
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

CHUNK_BYTES = 4 * 2**20  # largest chunk of a reader, beside the buffers that it fills
_LEAST_CHUNK_BYTES = 2**20  # smaller chunks are slower by half
_SHARE = 256  # a chunk is 1/256 of all bytes read: eight large ones would be much beside a small model
SECTOR_BYTES = 4096  # direct reads begin and end at its multiples: no disk has larger sectors
_PLACES = 5  # sample bytes of a chunk, to guess if it is cached
_UNFIT = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems without direct reads

_of_thread = threading.local()
_is_shared = threading.Event()  # set by `share_cache`


def share_cache() -> None:
    """Let weights that stream from disk stay in the page cache, for other processes that stream the same ones."""
    _is_shared.set()


def shares_cache() -> bool:
    """Return whether `share_cache` has been called in this process."""
    return _is_shared.is_set()


def is_cached(file: BinaryIO, begin: int, end: int) -> bool:
    """Return whether the page cache holds bytes `begin` to `end` of a file.

    Reads nothing where the system reports pages to this user; else it reads sample bytes (`_is_read_at_once`).
    """
    if end > os.fstat(file.fileno()).st_size:
        return False
    pages = cached_pages(file, begin, end)
    return _is_read_at_once(file, begin, end) if pages is None else 0 not in pages


def cached_pages(file: BinaryIO, begin: int, end: int) -> bytes | None:
    """Return one byte for each page of that part of a file, 1 if it is in the page cache. Reads nothing.

    None where the system does not report it. To a user who neither owns the file nor is root, `mincore` reports every
    page as cached.
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
            del start  # an exported buffer would keep the mapping from being closed
    return bytes(pages) if told == 0 else None


def _is_read_at_once(file: BinaryIO, begin: int, end: int) -> bool:
    """Return whether sample bytes can be read without waiting.

    This may start reads, so that a fast disk looks like a cache.
    """
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
    """Return the bytes of each reader's chunk, whole sectors, where `read_bytes` are read in all."""
    share = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, read_bytes // _SHARE))
    return share // SECTOR_BYTES * SECTOR_BYTES


def read_nothing_ahead(file: BinaryIO) -> None:
    """Turn the system's read-ahead off for this open file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def forget(file: BinaryIO, begin: int, end: int) -> None:
    """Drop that part of a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        first = begin // SECTOR_BYTES * SECTOR_BYTES
        os.posix_fadvise(file.fileno(), first, -(-end // SECTOR_BYTES) * SECTOR_BYTES - first, os.POSIX_FADV_DONTNEED)


def read_chunk(file: BinaryIO, begin: int, end: int, room: int) -> memoryview | None:
    """Read bytes `begin` to `end` of a file directly. Return them, or fewer if the file ends before.

    The whole sectors around them must fit in `room` bytes. The memory is reused at this thread's next call. None where
    the system has no direct reads. Where only the file system has none, the bytes come through the cache.
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
    done += _read(file, first + done, target[done:], end - first - done)  # usually 0 bytes
    return target[begin - first : min(done, end - first)]


def _read(file: BinaryIO, first: int, target: memoryview, least: int, unit: int = 1) -> int:
    """Read from byte `first` of a file, at least `least` bytes or to its end. Return the number of bytes read.

    Stops early after a read that is not a whole number of units: direct reads cannot continue from there.
    """
    file.seek(first)
    done = 0
    while done < least and done % unit == 0:  # a read may return fewer bytes than asked for
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
