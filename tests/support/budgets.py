"""Budgets that are just enough."""

from __future__ import annotations

from pathlib import Path

import ballast
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.planner import window_bytes


def ram_for_windows(folder: Path) -> int:
    """RAM in which each model of a folder can be run from disk, whatever the order of its calls, and hardly more."""
    pipe = ballast.open_pipeline(folder, device="sim")
    units = (*pipe.encoders, *pipe.denoisers, pipe.decoder)
    return int(1.3 * max(window_bytes(sizes_of(unit), "streamed") for unit in units))
