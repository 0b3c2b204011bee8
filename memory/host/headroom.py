"""The headroom of the host's dynamic VRAM: the bytes of the card that it leaves free, set for the time of a block."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_NAME = "simple_vram_headroom"
_DEFAULT_BYTES = 256 * 2**20  # headroom that the library has if the host's command line sets none


@dataclass(frozen=True)
class Headroom:
    """Reads and sets the bytes of VRAM that dynamic models leave free, on all cards of this process.

    The host evicts weights for it when the next weight is asked for, or at any allocation. It never refuses memory for
    it.
    """

    read: Callable[[], int]
    write: Callable[[int], None]

    @contextmanager
    def at_least(self, bytes: int) -> Iterator[None]:
        """Leave at least `bytes` free until the block ends, then set the headroom back."""
        before = self.read()
        self.write(max(before, bytes))
        try:
            yield
        finally:
            self.write(before)


def has_dynamic_vram() -> bool:
    """Return whether the host moves the weights of its models page by page, as they are used."""
    return bool(getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", False))


def headroom() -> Headroom | None:
    """Return the control of the headroom.

    None if the host has no dynamic VRAM, or a version whose headroom is fixed at its start.
    """
    control = sys.modules.get("comfy_aimdo.control")
    if not has_dynamic_vram() or control is None:
        return None
    read, write = getattr(control, f"get_{_NAME}", None), getattr(control, f"set_{_NAME}", None)
    if read and write:  # public functions since comfy-aimdo 0.6
        return Headroom(read, write)
    library = getattr(control, "lib", None)
    write = getattr(library, f"set_{_NAME}", None)
    return Headroom(lambda: _held_by(library), write) if write else None


def _held_by(library: Any) -> int:
    """Return the headroom set in a library that has no function to read it."""
    try:
        return ctypes.c_int64.in_dll(library, _NAME).value
    except ValueError:  # the library does not export the variable, as on Windows
        reserve = getattr(getattr(sys.modules.get("comfy.cli_args"), "args", None), "reserve_vram", None)
        return _DEFAULT_BYTES if reserve is None else int(reserve * 2**30)  # the value that the host sets at its start
