"""Figures to words, to a table, and to a JSON file with its picture."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..memory.charts.text_tables import format_table
from ..memory.files import replace_file
from .wording import words


def cell(name: str, row: Mapping[str, Any]) -> str:
    """Return a figure of a row in words. Resident rows have no share."""
    value = row.get(name)
    if name == "share":
        return "resident" if value is None else f"{value:.0%}"
    return words(name, value)


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns of text: the rows' values of these names, under these headings, as far as any row has them."""
    named = {
        key: heading
        for key, heading in columns.items()
        if key == "share" or any(row.get(key) is not None for row in rows)
    }
    return format_table([list(named.values()), *([cell(key, row) for key in named] for row in rows)])


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return what a section says beside its figures: what broke it or a row, what it left out."""
    broken = [f"{row['name']}: {row['error']}" for row in found.get("rows", []) if "error" in row]
    return [*found.get("notes", []), *broken, *([found["error"]] if "error" in found else [])]


def line(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"[:300]


def say(text: str) -> None:
    """Print it, now."""
    print(text, flush=True)  # noqa: T201


def slug(name: str) -> str:
    """Return a device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(stem: str, found: dict[str, Any], picture: str | None, out: Path) -> str:
    """Write the figures, and the picture that `charts` draws of them. Returns a line that names the files."""
    # Not `with_suffix`, which would cut a name at its last dot.
    files = [out / f"{stem}.json"]
    replace_file(files[0], (json.dumps(_rounded(found), indent=1) + "\n").encode())
    if picture:
        from . import charts

        files.append(out / f"{stem}.png")
        getattr(charts, picture)(found).save(files[1], optimize=True)
    return f"wrote {', '.join(map(str, files))}"


def _rounded(value: Any) -> Any:
    """Floats to five figures: more are noise."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
