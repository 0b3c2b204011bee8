"""The results on docs/benchmarks.md and its Chinese twin: what lies between two marks there follows from the files.

The words around them are each language's own. What is written between is code to Markdown, and so the same in both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import report
from ..harness import SECTIONS
from ..places import RESULTS

_DOCS = RESULTS.parents[1] / "docs"
PAGES = (_DOCS / "benchmarks.md", _DOCS / "zh" / "benchmarks.md")


def write() -> None:
    """Write both pages anew, from the results that are there."""
    for path in PAGES:
        path.write_text(fill(path.read_text("utf-8"), path, RESULTS), "utf-8")


def fill(text: str, path: Path, results: Path) -> str:
    """Return the text of a page, with what the results say between its marks."""
    found = list(read(results))
    names = ", ".join(f"`{one['device']}`" for _, one in found) or "`none`"
    text = _between(text, "cards", names)
    return _between(text, "results", "\n\n" + "".join(_card(file, one, path) for file, one in found))


def read(results: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the results of cards in a folder, by their names. A dry run has none."""
    for file in sorted(results.glob("*.json")):
        found = json.loads(file.read_text("utf-8"))
        if found.get("bench") == "gpu" and not found["dry"]:
            yield file, found


def _between(text: str, mark: str, new: str) -> str:
    """ValueError for a text without the marks."""
    text, count = re.subn(
        rf"(<!-- {mark} -->).*?(<!-- /{mark} -->)", lambda m: m[1] + new + m[2], text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"a page of benchmarks has {count} places for {mark}, not one")
    return text


def _card(file: Path, found: Mapping[str, Any], page: Path) -> str:
    image = os.path.relpath(file.with_suffix(".png"), page.parent).replace(os.sep, "/")
    about = " ".join(_code(found.get(key)) for key in ("machine", "torch", "cuda", "diffusers"))
    parts = [f"## {found['device']}\n\n{about}\n\n![{found['device']}]({image})\n\n"]
    for name, one in found["sections"].items():
        columns = SECTIONS[one["section"]].columns
        rows = [[_code(report.cell(key, row)) for key in columns] for row in one.get("rows", [])]
        parts.append(f"### `{name}`\n\n")
        if rows:
            parts.append(_table([_code(heading) for heading in columns.values()], rows) + "\n")
        parts += [f"- {_code(line)}\n" for line in report.lines(one)]
        parts.append("\n" * bool(report.lines(one)))
    return "".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(value: Any) -> str:
    """As code, with nothing in it that a table or a list would take for its own."""
    words = " ".join(str(value).split()).replace("`", "'").replace("|", "/")
    return f"`{words or '-'}`"
