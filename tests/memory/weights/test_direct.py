"""What is read leaves the page cache as it was, and the bytes are the same."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.weights import direct, hostbuffer, reader
from ballast.memory.weights.reader import Job, batches, chunks, extent_of, read
from ballast.memory.weights.stored import Stored
from places import ROOT
from streamed_models import Blocks, budget, noise, on_disk, put, run

MB = 2**20
SIZE = 9 * MB + 1234
can_forget = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system forgets nothing when asked")


def cached_pages(path: Path) -> list[bool]:
    """Which pages of a file the kernel has in its cache, by its own word."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        held = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        inside = ctypes.c_char.from_buffer(mapped)
        try:
            length = ctypes.c_size_t(len(mapped))
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(inside)), length, held) == 0
        finally:
            del inside
        return [bool(page & 1) for page in held]


def forget(path: Path) -> None:
    for _ in range(100):  # a page that is still being written stays
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(cached_pages(path)):
            return
        time.sleep(0.01)
    pytest.skip("a file system whose files are in RAM")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    yield path


def jobs_of(path: Path, dtype: torch.dtype = torch.uint8, start: int = 0) -> tuple[list[Job], list[torch.Tensor]]:
    """A few tensors with gaps between them, small ones and large ones, and the buffers that they go to."""
    draw, found, at = random.Random(1), [], start
    for size in (3, 70_001, 5 * MB + 8, 17, 200_000, 1, 2 * MB, 0):
        at += draw.choice((0, 8, 5000, 400_000))
        found.append(Stored(path, at, dtype, (size // dtype.itemsize,)))
        at += size
    found.append(Stored(path, SIZE - 600 * dtype.itemsize, dtype, (600,)))  # to the end
    found.append(Stored(path, start + MB, dtype, (2 * MB // dtype.itemsize,)))  # and a part of another
    buffers = [hostbuffer.allocate(max(1, 8 + stored.shape[0] * dtype.itemsize)) for stored in found]
    return [(extent_of(stored, dtype, 8), buffer) for stored, buffer in zip(found, buffers, strict=True)], buffers


def assert_read(path: Path, jobs: list[Job]) -> None:
    content = path.read_bytes()
    for extent, buffer in jobs:
        held = bytes(hostbuffer.bytes_of(buffer))
        assert held[8:] == content[extent.offset :][: extent.stored_bytes].ljust(len(held) - 8, b"\0")
        assert not any(held[:8])


@can_forget
def test_what_fills_ram_leaves_nothing_in_the_cache(file: Path) -> None:
    jobs, _ = jobs_of(file)
    forget(file)
    read(jobs)
    assert not any(cached_pages(file))
    assert_read(file, jobs)


@can_forget
def test_what_was_in_the_cache_stays_there(file: Path) -> None:
    jobs, _ = jobs_of(file)
    forget(file)
    file.read_bytes()
    read(jobs)
    assert all(cached_pages(file))
    assert_read(file, jobs)


@can_forget
def test_cache_is_looked_at_chunk_by_chunk(file: Path) -> None:
    forget(file)
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # or more would come than is asked for
        opened.read(4 * MB)
        assert direct.is_cached(opened, 5, 4 * MB)
        assert direct.is_cached(opened, 4 * MB - 1, 4 * MB)
        assert not direct.is_cached(opened, 0, 8 * MB)
        assert not direct.is_cached(opened, 6 * MB, 6 * MB + 1)
        assert not direct.is_cached(opened, SIZE, SIZE + 5), "beyond its end"
    buffer = hostbuffer.allocate(SIZE)
    read([(extent_of(Stored(file, 0, torch.uint8, (SIZE,)), torch.uint8, 0), buffer)])
    pages = cached_pages(file)
    chunk = direct.chunk_bytes(SIZE) - 2 * direct.SECTOR_BYTES
    kept = 4 * MB // chunk * chunk // mmap.PAGESIZE
    assert all(pages[: kept - 1])
    assert not any(pages[kept + 1 :])
    assert bytes(hostbuffer.bytes_of(buffer)) == file.read_bytes()


@can_forget
@pytest.mark.parametrize("is_shared", [False, True])
def test_streaming_leaves_the_cache_to_processes_that_share_it(
    is_shared: bool, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, source, truth = Blocks(), Blocks(), Blocks()
    path = tmp_path / "model.safetensors"
    found = on_disk(source, tmp_path)
    (path,) = {stored.path for stored in found.values()}
    expected = run(truth, noise().cpu())
    monkeypatch.setattr(direct, "_is_shared", threading.Event())
    if is_shared:
        direct.share_cache()
    forget(path)
    header = sum(cached_pages(path))
    placement = put(module.to("meta"), budget(truth, 0.3), source=found)
    for _ in range(3):
        assert torch.equal(run(module, noise()).cpu(), expected)
    placement.remove()
    cached = sum(cached_pages(path)) - header
    assert cached > len(cached_pages(path)) // 2 if is_shared else cached == 0


@can_forget
@pytest.mark.parametrize("refused", ["the flag", "the reads"])
def test_file_system_without_direct_reads(refused: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real, asked = fcntl.fcntl, []

    def refuse(opened: Any, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            asked.append(flags)
            if refused == "the flag":
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(opened, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    if refused == "the reads":  # by the kernel itself, for where they begin
        monkeypatch.setattr(direct, "SECTOR_BYTES", 1)
    jobs, _ = jobs_of(file)
    forget(file)
    read(jobs)
    assert asked
    assert sum(cached_pages(file)) <= (2 * len(chunks(jobs, MB)) if refused == "the reads" else 0), "pages at the edges"
    assert_read(file, jobs)


def test_file_is_read_as_usual_after_a_direct_read(file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        assert direct.read_chunk(opened, 16, 1016, 8192) in (None, file.read_bytes()[16:1016])
        assert direct.read_chunk(opened, 16, MB, 2 * MB) in (None, file.read_bytes()[16:MB]), "with more room"
        assert opened.seek(3) == 3
        assert opened.read(2) == file.read_bytes()[3:5]


def test_systems_without_such_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("O_DIRECT", "posix_fadvise", "RWF_NOWAIT", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    jobs, _ = jobs_of(file)
    read(jobs)
    assert_read(file, jobs)


@can_forget
@pytest.mark.parametrize("length", [SIZE - 1, 8 * MB, 8 * MB + 512, 0])
def test_file_that_ends_too_soon(length: int, file: Path) -> None:
    jobs, _ = jobs_of(file)
    os.truncate(file, length)
    if length:
        forget(file)
    with pytest.raises(ValueError, match=r"weights is cut short: .* Download it again\.$"):
        read(jobs)


@can_forget
@pytest.mark.parametrize(("start", "stored"), [(0, torch.bfloat16), (6, torch.float32), (3, torch.float16)])
def test_casts_are_those_of_torch_wherever_the_bytes_lie(start: int, stored: torch.dtype, file: Path) -> None:
    jobs, _ = jobs_of(file, stored, start)
    wanted = [(extent_of(Stored(file, p.offset, stored, (p.count,)), torch.float64, 0), p.count) for p, _ in jobs]
    cast = [(extent, hostbuffer.allocate(max(1, 8 * count))) for extent, count in wanted]
    forget(file)
    read(jobs)
    read(cast)
    for (extent, plain), (_, buffer) in zip(jobs, cast, strict=True):
        truth = plain[8:].view(stored).to(torch.float64) if extent.count else plain[:0].view(torch.float64)
        assert torch.equal(buffer[: 8 * extent.count].view(torch.int64), truth.view(torch.int64))


def test_each_chunk_takes_one_read_and_each_byte_is_read_once(file: Path) -> None:
    for most in (3 * 4096, 5 * 4096, MB):
        jobs, _ = jobs_of(file)
        for batch in batches(jobs):
            made = chunks(batch, most)
            flat = [extent for chunk in made for extent, _ in chunk]
            assert sum(extent.stored_bytes for extent in flat) == sum(extent.stored_bytes for extent, _ in batch)
            assert flat == sorted(flat, key=lambda extent: extent.offset)
            for chunk in made:
                begin, end = chunk[0][0].offset // 4096, -(-max(p.offset + p.stored_bytes for p, _ in chunk) // 4096)
                assert (end - begin) * 4096 <= most
                spans = [(p.offset, p.offset + p.stored_bytes) for p, _ in chunk]
                assert all(
                    after[0] - before[1] <= reader._GAP_BYTES for before, after in zip(spans, spans[1:], strict=False)
                )


@pytest.mark.parametrize("size", [1, SIZE, 20 * MB, 128 * MB, 259_236_032, 2**30, 23 * 10**9])
def test_chunks_are_a_small_part_of_what_is_read(size: int) -> None:
    """Of all readers together, however many batches there are for them; those of large files are large."""
    chunk = direct.chunk_bytes(size)
    readers = min(reader.RAM_THREADS, -(-size // reader.BATCH_BYTES))
    assert chunk % direct.SECTOR_BYTES == 0 and chunk >= MB
    assert chunk == direct.CHUNK_BYTES if size >= 2**30 else readers * chunk <= max(MB, size // 8)
    assert size < 128 * MB or readers * chunk <= size // 16


@can_forget
def test_readers_take_chunks_of_that_size(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, allocate = [], hostbuffer.allocate
    monkeypatch.setattr(direct, "allocate", lambda nbytes: (taken.append(nbytes), allocate(nbytes))[1])
    jobs, _ = jobs_of(file)
    for size in (3 * MB, 2 * MB):
        taken.clear()
        monkeypatch.setattr(direct, "chunk_bytes", lambda read_bytes, size=size: size)
        forget(file)
        read(jobs)
        assert set(taken) == {size}
        assert len(taken) <= len(batches(jobs))
    assert_read(file, jobs)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux shows them")
def test_casts_start_no_threads_of_their_own(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import conftest, os, torch
from pathlib import Path
from ballast.memory.weights import hostbuffer, reader
from ballast.memory.weights.stored import Stored
torch.set_num_threads(4)
path, count = Path({str(tmp_path / "a")!r}), 2**22
path.write_bytes(bytes(2 * count))
seen = []
whole = torch._foreach_copy_
def counted(*args):
    whole(*args)
    seen.append(len(os.listdir("/proc/self/task")))
torch._foreach_copy_ = counted
extent = reader.extent_of(Stored(path, 0, torch.bfloat16, (count,)), torch.float32, 0)
for way in (reader.read_batch, reader.read):
    seen.clear()
    before = len(os.listdir("/proc/self/task"))
    way([(extent, hostbuffer.allocate(4 * count))])
    print(torch.get_num_threads(), len(seen), max(seen) - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    for line, started in zip(ran.stdout.splitlines(), (0, 1), strict=True):
        threads, copies, more = map(int, line.split())
        assert threads == 4, "what torch has elsewhere is as it was"
        assert copies > 1
        assert more == started, "the reader of the one batch"
