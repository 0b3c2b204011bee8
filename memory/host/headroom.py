"""The host's dynamic VRAM: how much of the card it leaves free, for as long as a block runs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_NAME = "simple_vram_headroom"
_DEFAULT_BYTES = 256 * 2**20  # of the library, where the host's command line says nothing


@dataclass(frozen=True)
class Headroom:
    """Reads and sets the bytes of VRAM that dynamic models leave free, in this process and on all its cards.

    Weights leave as soon as the next one is asked for, or anything is allocated; nothing is ever refused for it.
    """

    read: Callable[[], int]
    write: Callable[[int], None]

    @contextmanager
    def at_least(self, bytes: int) -> Iterator[None]:
        """Leave so much free, or as much as before where that is more, until the block ends, however it ends."""
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
    """Return the control of it.

    None where the host has no dynamic VRAM, or one whose headroom is fixed when it starts.
    """
    control = sys.modules.get("comfy_aimdo.control")
    if not has_dynamic_vram() or control is None:
        return None
    read, write = getattr(control, f"get_{_NAME}", None), getattr(control, f"set_{_NAME}", None)
    if read and write:  # comfy-aimdo 0.6
        return Headroom(read, write)
    library = getattr(control, "lib", None)
    write = getattr(library, f"set_{_NAME}", None)
    return Headroom(lambda: _held_by(library), write) if write else None


def _held_by(library: Any) -> int:
    """Return the value in a library that has no function to tell it."""
    try:
        return ctypes.c_int64.in_dll(library, _NAME).value
    except ValueError:  # it does not export it, as on Windows
        reserve = getattr(getattr(sys.modules.get("comfy.cli_args"), "args", None), "reserve_vram", None)
        return _DEFAULT_BYTES if reserve is None else int(reserve * 2**30)  # as the host sets it when it starts
