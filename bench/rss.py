"""How much RAM this process has had at once."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def peak_rss_bytes() -> int:
    """Most bytes of RAM that this process ever held, of itself alone."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage also knows the process that started this one
        lines = status.read_text("ascii", "replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
