"""The RAM of this process: the machine's, or what the limits of its container leave of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from .host import management as host

_MEMBERSHIP = Path("/proc/self/cgroup")  # only Linux has control groups
_CGROUPS = Path("/sys/fs/cgroup")
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")  # limits, used bytes, droppable cache in them
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def total_bytes() -> int:
    """Return the RAM in bytes that this process could have in all."""
    total = _machine()[0]
    return min([total, *(limit for limit, _ in limits(_MEMBERSHIP, _CGROUPS, total))])


def available_bytes() -> int:
    """Return the RAM in bytes that this process could take now without swapping, and without being killed for it."""
    total, available = _machine()
    left = [limit - used for limit, used in limits(_MEMBERSHIP, _CGROUPS, total)]
    return max(0, min([available, *left]))


def give_back_heap() -> None:
    """Give freed memory of the heap back to the system, if the C library can. It keeps it otherwise."""
    if trim := _trim():
        trim(0)


@functools.cache
def _trim() -> Any | None:
    """Return glibc's `malloc_trim`; None if the C library has none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl and macOS; Windows takes no None
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def _machine() -> tuple[int, int]:
    """Return RAM in all and available RAM of the machine, by the host's count if it has one."""
    memory = psutil.virtual_memory()
    return host.ram_bytes() or (memory.total, memory.available)


def limits(membership: Path, root: Path, machine_bytes: int) -> list[tuple[int, int]]:
    """Return the limits that hold for a process, as (limit, used) in bytes.

    Cache that goes first does not count as used. `membership` is the process's /proc/self/cgroup, `root` the folder
    where control groups are mounted. Cgroup v1 and v2 are read alike, and each group on the way up counts. A file that
    cannot be read sets no limit, nor does a limit of `machine_bytes` or more.
    """
    found = []
    for group, (caps, usage, cache) in _groups(membership, root):
        named = [limit for name in caps if (limit := _number(group / name)) is not None and limit < machine_bytes]
        if named:
            used = _number(group / usage) or 0
            found.append((min(named), max(0, used - _statistic(group / "memory.stat", cache))))
    return found


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, tuple[tuple[str, ...], str, str]]]:
    """Yield each group that a process is in and those above it, with the names of their files."""
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        top = root / "memory" if controllers else root / "unified" if (root / "unified").is_dir() else root
        # In a container the path may be that of the machine, while only the container's own group is mounted, as the
        # root: so the root itself is read too.
        parts = [part for part in path.split("/") if part]
        parts = [] if ".." in parts else parts
        for depth in range(len(parts) + 1):
            yield top.joinpath(*parts[:depth]), names


def _number(file: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it says "max"."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _statistic(file: Path, name: str) -> int:
    """Return the value of a line "name value" in a file, 0 if there is none."""
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(file: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return file.read_text("ascii", "replace")
    except OSError:
        return ""
