"""Pages of host buffers: private, huge where that costs nothing, and as many as are needed."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from ballast.memory.weights import hostbuffer, huge_pages
from ballast.memory.weights.hostbuffer import allocate, bytes_of
from ballast.memory.weights.huge_pages import PAGE_BYTES, RETRY_BYTES, Policy
from fault_points import FaultError, raised_at
from places import ROOT

MB = 2**20
on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages to ask for")
SIZES = [1, 4095, 4097, MB, 2 * MB - 1, 2 * MB, 2 * MB + 1, 7 * MB + 4095]


def flags_at(address: int) -> set[str]:
    """What the kernel notes of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0]
        if "-" in span and not span.endswith(":"):
            begin, end = (int(part, 16) for part in span.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("not mapped")


@pytest.mark.parametrize("nbytes", SIZES)
def test_buffer_is_as_long_as_asked_for_and_zero(nbytes: int) -> None:
    flat = allocate(nbytes)
    assert (flat.nbytes, flat.dtype, flat.is_inference()) == (nbytes, torch.uint8, False)
    assert not flat.any()
    assert flat.data_ptr() % mmap.PAGESIZE == 0
    view = bytes_of(flat)
    assert len(view) == nbytes
    view[0], view[-1] = 5, 6
    assert (flat[-1], flat.sum()) == (6, 6 if nbytes == 1 else 11)
    assert hostbuffer._pages[flat.data_ptr()].nbytes == nbytes


@on_linux
@pytest.mark.parametrize("nbytes", SIZES)
def test_pages_are_private_and_huge_where_they_are_filled(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "policy", Policy())
    flat = allocate(nbytes)
    start, whole = flat.data_ptr(), nbytes // PAGE_BYTES * PAGE_BYTES
    flags = flags_at(start)
    assert "sh" not in flags
    assert "dc" in flags, "no child gets a copy"
    assert ("hg" in flags) == bool(whole)
    if whole:
        assert start % PAGE_BYTES == 0
        assert "hg" in flags_at(start + whole - 1)
        assert {"nh", "dc"} <= flags_at(start + whole), "not where it would be had in part"


def test_huge_pages_are_taken_only_where_they_are_faster() -> None:
    policy = Policy()
    assert policy.is_trial_due
    assert policy.tried(0.3e-3, 0.7e-3).huge
    policy = policy.tried(5e-3, 0.7e-3).allocated(RETRY_BYTES - 1)
    assert not policy.huge
    assert not policy.is_trial_due
    policy = policy.allocated(1)
    assert policy.is_trial_due
    assert policy.tried(5e-3, 0.7e-3) == Policy(huge=False)
    assert policy.tried(5e-3, 5e-3) == Policy()


@on_linux
@pytest.mark.parametrize("huge_seconds", [1e-4, 1.0])
def test_buffer_lies_on_the_pages_that_were_faster(huge_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {mmap.MADV_HUGEPAGE: huge_seconds, mmap.MADV_NOHUGEPAGE: 1e-3}
    monkeypatch.setattr(huge_pages, "_touch", lambda pages, begin, advice: seconds[advice])
    monkeypatch.setattr(huge_pages, "policy", Policy())
    flat, following = allocate(16 * MB), allocate(5 * MB)
    for buffer in (flat, following):
        for address in (buffer.data_ptr(), buffer.data_ptr() + 4 * MB - 1):
            assert ("hg" in flags_at(address)) == (huge_seconds < 1e-3)
    assert huge_pages.policy.plain_bytes == (0 if huge_seconds < 1e-3 else 20 * MB)


@on_linux
def test_trial_leaves_the_buffer_zero() -> None:
    assert not allocate(16 * MB).any()


@on_linux
@pytest.mark.parametrize(("nbytes", "count"), [(40_000, 500), (MB, 40), (2 * MB + 4096, 20), (5 * MB, 8)])
def test_no_more_ram_is_taken_than_is_filled(nbytes: int, count: int) -> None:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [allocate(nbytes).fill_(1) for _ in range(count)]
    grown = process.memory_info().rss - before
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert 0.9 * count * nbytes < grown < count * pages + 2 * MB
    kept.clear()
    assert process.memory_info().rss - before < 2 * MB


@pytest.mark.parametrize("missing", [["MADV_HUGEPAGE"], ["MADV_HUGEPAGE", "MADV_DONTFORK"], ["MAP_PRIVATE"]])
def test_systems_without_such_pages(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in missing:
        monkeypatch.delattr(mmap, name, raising=False)
    for nbytes in SIZES:
        flat = allocate(nbytes)
        bytes_of(flat)[-1] = 7
        assert (flat.nbytes, flat[-1]) == (nbytes, 7)


def test_kernel_that_refuses_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(hostbuffer._Pages, "madvise", refuse, raising=False)
    flat = allocate(5 * MB)
    bytes_of(flat)[-1] = 7
    assert (flat.nbytes, flat[-1]) == (5 * MB, 7)


@pytest.mark.skipif(sys.platform != "linux", reason="asks for a limit of this process alone")
def test_limit_of_the_process_is_told_as_refused_ram() -> None:
    script = (
        "import resource, ballast\nfrom ballast.memory.weights import hostbuffer\n"
        "import psutil\nheld = psutil.Process().memory_info().vms\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + 2**28, held + 2**28))\n"
        "kept = [hostbuffer.allocate(2**27)]\n"
        "try:\n    hostbuffer.allocate(2**28)\nexcept MemoryError as error:\n    print(error)\n"
    )
    start = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport conftest\n"
    command = [sys.executable, "-c", start + script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.startswith("the system refuses 256 MB of RAM for weights (Cannot allocate memory)."), ran.stderr


def test_pages_are_unpinned_unless_the_process_ends() -> None:
    """Then the driver may be gone before them."""
    script = (
        "import torch\nfrom ballast.memory import simulated\nfrom ballast.memory.simulated import lazy\n"
        "from ballast.memory.weights import hostbuffer\nsimulated.enable(copies='cuda')\n"
        "lazy.Cudart.cudaHostUnregister = staticmethod(lambda address, write=__import__('os').write: write(1, b'u'))\n"
        "torch.kept, gone = hostbuffer.allocate(10), hostbuffer.allocate(10)\n"
        "for pages in (torch.kept, gone):\n    assert hostbuffer.pin(pages, torch.device('sim:0'))\n"
        "del pages, gone\nprint('ends', flush=True)\n"
    )
    start = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport conftest\n"
    ran = subprocess.run(
        [sys.executable, "-c", start + script], capture_output=True, text=True, timeout=120, check=True
    )
    assert (ran.stdout, ran.stderr) == ("uends\n", "")


def test_the_kernel_after_a_refused_pin_leaves_nothing(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes CUDA's last error, and whoever holds that error holds no tensor by it."""
    sim.enable(copies="cuda")
    monkeypatch.setattr(hostbuffer.host, "pin_memory", lambda tensor: False)
    error = FaultError("of the pin before")
    with raised_at("operator", 1, error):
        assert not hostbuffer.pin(allocate(10), torch.device("sim:0"))
    assert error.__traceback__ is not None, "it was not raised"
    assert sim.stats().allocated_bytes == 0
