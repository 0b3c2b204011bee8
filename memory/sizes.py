"""Sizes in bytes, from and to words."""

from __future__ import annotations

import math
import re
from numbers import Real

_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)I?(B?)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str) -> int:
    """Return the bytes of a size such as `6442450944`, `"6GB"`, `"6 GiB"` or `"256MB"`.

    A unit is a power of 1024, as graphics cards are sold. Raises ValueError for anything else, and for a negative size.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if not match:
            raise ValueError(f"not a size: {value!r}. Write bytes, or a number with KB, MB, GB or TB, such as '6GB'.")
        prefix = match[2].upper()
        return int(float(match[1]) * _UNITS[prefix + "B" if prefix else ""])
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise ValueError(f"not a size: {value!r}. Write bytes, or a string such as '6GB'.")
    return int(value)


def format_bytes(size: int, up: bool = False) -> str:
    """Return a size for people, to three figures: `"0 B"`, `"12.3 MB"`, `"8.00 GB"`.

    With `up` it is never rounded down.
    """
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{size} B"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{math.ceil(value * 10**digits) / 10**digits if up else value:.{digits}f} {unit}"
