"""Other ways to offload on the same weights and inputs, and Ballast again in the memory that each of them took."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..peers import Field
from ..rivals import RIVALS
from . import section
from .section import Section

_RATIO = 1.0  # of computing to copying: where overlapping matters most
_SHARE = 0.5  # of the weights, for those that take a budget
_LEAST = 30  # seconds that a way is begun with


def main(argv: Sequence[str]) -> None:
    """Run as a process of its own."""
    section.run(argv, _measure)


def _measure(to: Section) -> None:
    field = Field(to.kind, to.request["size"], _RATIO, Path.cwd())
    resident = field.resident(to.left())
    to.tell(**field.facts)
    to.row(**resident)
    wanted = to.request.get("ways", [name for name in RIVALS if name not in ("resident", "ballast")])
    names = [name for name in wanted if _is_installed(name)]
    if absent := set(wanted) - set(names):
        to.note(f"not installed: {', '.join(sorted(absent))}")
    found = [to.attempt(name, _LEAST, partial(_row, to, field), name) for name in names]
    for row in filter(None, found):
        to.attempt(f"ballast as {row['name']}", _LEAST, partial(_as_large, to, field), row)


def _is_installed(name: str) -> bool:
    package = RIVALS[name].package
    try:
        return not package or bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _row(to: Section, field: Field, name: str) -> dict[str, Any]:
    return _told(to, field.row(name, _SHARE if RIVALS[name].budgeted else 0.0, to.left()))


def _as_large(to: Section, field: Field, other: dict[str, Any]) -> None:
    """Ballast with as many bytes for weights as another's peak leaves beside the activations."""
    room_bytes = max(1, other["peak_bytes"] - field.work_bytes)
    row = field.row("ballast", 0.0, to.left(), room_bytes)
    more = {} if "error" in row else {"times_as_fast": other["step"] / row["step"]}
    _told(to, {**row, **more, "name": f"ballast as {other['name']}", "room_bytes": other["peak_bytes"]})


def _told(to: Section, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row, once it is told. RuntimeError for one that has only an error."""
    if "error" in row:
        raise RuntimeError(row["error"])
    to.row(**row)
    return row
