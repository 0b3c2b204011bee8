"""Figures to words."""

from __future__ import annotations

from typing import Any

from ..memory.sizes import format_bytes


def words(name: str, value: Any) -> str:
    """Return a figure for people. Names that end in `_bytes` are sizes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)
