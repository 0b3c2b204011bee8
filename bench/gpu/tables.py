"""The sections' rows as columns of words: which figures, under which headings, in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...memory.charts.text_tables import format_table
from ..report import words

_ENGINE = {
    "weights": "weights", "share": "share", "ratio": "C/T", "step": "step", "bound": "bound", "over_bound": "T/bound",
    "peak_bytes": "peak", "driver_bytes": "driver", "copied_bytes": "copied", "is_equal": "equal",
}  # fmt: skip
_PEERS = {
    "name": "way", "step": "step", "over_bound": "T/bound", "peak_bytes": "peak", "driver_bytes": "driver",
    "copied_bytes": "copied", "difference": "differs", "times_as_fast": "times as fast",
}  # fmt: skip
# By the module that runs a section.
COLUMNS: dict[str, dict[str, str]] = {
    "card": {"name": "what", "rate": "rate", "unit": "unit"},
    "engine": _ENGINE,
    "tests": {"name": "test", "outcome": "outcome", "why": "why"},
    "plans": {
        "budget_bytes": "budget", "stage": "stage", "placement": "placement", "planned_bytes": "planned",
        "peak_bytes": "measured", "over_planned": "measured/planned", "driver_bytes": "driver", "is_kept": "kept",
        "planned_step": "planned step", "step": "step",
    },
    "peers": _PEERS,
    "decode": {
        "way": "way", "side": "side", "seconds": "seconds", "peak_bytes": "peak", "driver_bytes": "driver",
        "h2d_bytes": "to card", "d2h_bytes": "from card", "difference": "differs",
    },
}  # fmt: skip


def cell(name: str, row: Mapping[str, Any]) -> str:
    """Return a figure in words; resident rows have no share."""
    value = row.get(name)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if name == "share":
        return "resident" if value is None else f"{value:.0%}"
    return words(name, value)


def text(found: Mapping[str, Any]) -> str:
    """All that was found, for a terminal."""
    parts = [f"{found['device']}, torch {found['torch']}" + (": DRY RUN, the figures mean nothing" * found["dry"])]
    for name, one in found["sections"].items():
        parts.append(f"\n== {name}, {one['seconds']:.0f} s")
        if one.get("rows"):
            columns = COLUMNS[one["worker"]]
            cells = [[cell(key, row) for key in columns] for row in one["rows"]]
            parts.append(format_table([list(columns.values()), *cells]))
        parts += [f"! {line}" for line in lines(one)]
    return "\n".join(parts)


def lines(one: Mapping[str, Any]) -> list[str]:
    """Return what a section says beside its rows: what broke it, what it left out."""
    return [*one.get("notes", []), *([one["error"]] if "error" in one else [])]
