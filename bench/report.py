"""Figures to a table, a JSON file and a picture's file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..memory.charts.text_tables import format_table
from ..memory.files import replace_file
from ..memory.sizes import format_bytes


def words(name: str, value: Any) -> str:
    """Return a figure for people. Names that end in `_bytes` are sizes."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)


def table(headings: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """Columns of text: the rows' values of these names, under these headings."""
    return format_table([list(headings.values()), *([words(name, row.get(name)) for name in headings] for row in rows)])


def say(text: str) -> None:
    """Print it, now."""
    print(text, flush=True)  # noqa: T201


def write(bench: str, found: dict[str, Any], picture: Image.Image, out: Path) -> str:
    """Write both files, named after what was measured. Returns a line that names them."""
    device = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    return write_as(f"{bench}-{device}-{found['size']}", found, picture, out)


def write_as(name: str, found: dict[str, Any], picture: Image.Image, out: Path) -> str:
    """Write both files under a name. Returns a line that names them."""
    stem = out / name
    # Not `with_suffix`, which would cut a name at its last dot.
    json_path, png_path = Path(f"{stem}.json"), Path(f"{stem}.png")
    write_json(found, json_path)
    picture.save(png_path, optimize=True)
    return f"wrote {json_path}, {png_path}"


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write the figures, for people to read too."""
    replace_file(path, (json.dumps(_rounded(found), indent=1) + "\n").encode())


def _rounded(value: Any) -> Any:
    """Floats to five figures: more are noise."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
