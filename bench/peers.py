"""`ballast bench peers`: Ballast and other ways to offload, on the same model and the same inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import apart, charts, report
from .rivals import RIVALS


def run(
    device: str,
    size: str,
    out: Path,
    only: Sequence[str] | None,
    shares: Sequence[float],
    ratio: float,
    rivals: Path | None,
    timeout: float,
) -> int:
    """Measure, write the .json and the .png anew after each rival, print the table. Returns 0.

    `only` names the rivals to run (None: all), beside the resident one. Raises ValueError for a name that is not known,
    and RuntimeError if the resident run fails.
    """
    if unknown := set(only or ()) - set(RIVALS):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}. Known are {', '.join(RIVALS)}.")
    chosen = [name for name in RIVALS if name != "resident" and (not only or name in only)]
    runs = [(name, share) for name in chosen for share in (shares if RIVALS[name].budgeted else [0.0])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        field = Field(device, size, ratio, Path(folder), rivals)
        for row in field.rows(runs, lambda: timeout):
            rows.append(row)
            found = {"ratio": ratio, "rows": rows, **field.facts}
            report.say(f"{row['name']}: {row.get('error') or report.words('step', row['step']) + ' s'}")
            wrote = report.write("peers", found, charts.peers(found), out)
    headings = {"name": "way", "prepare": "prepare", "first_step": "first", "step": "step", "over_bound": "T/bound"}
    headings |= {"peak_bytes": "peak", "driver_bytes": "driver", "rss_bytes": "RSS", "copied_bytes": "copied"}
    report.say("\n" + report.table(headings | {"difference": "differs"}, [row for row in rows if "error" not in row]))
    report.say(wrote)
    return 0


class Field:
    """Rivals on the same weights and inputs, each in a process of its own. `facts` are of the machine and of the load.

    The resident one runs first: it finds how many tokens make the ratio of computing to copying, and its result is what
    the others are compared with. RuntimeError if it fails.
    """

    def __init__(self, device: str, size: str, ratio: float, folder: Path, rivals: Path | None = None) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._request: dict[str, Any] = {
            "device": device, "size": size, "ratio": ratio, "regime": None, "work_bytes": 0,
            "rivals": str(rivals.resolve()) if rivals else None, "truth": str(folder / "truth.safetensors"),
        }  # fmt: skip

    @property
    def work_bytes(self) -> int:
        """Bytes that a resident step takes beside the weights."""
        return self._request["work_bytes"]

    def rows(self, runs: Sequence[tuple[str, float]], timeout: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """Yield the resident row, then that of each rival with each share. One that is not installed is listed once."""
        yield self.resident(timeout())
        absent: set[str] = set()
        for name, share in runs:
            if name in absent:
                continue
            row = self.row(name, share, timeout())
            if row.get("error", "").startswith(("ModuleNotFoundError", "ImportError")):
                absent.add(name)
            yield {**row, "name": f"{name} {share:.2f}" if RIVALS[name].budgeted and name not in absent else name}

    def resident(self, timeout: float) -> dict[str, Any]:
        """Return the row of the resident one, which all others need."""
        row = apart.measure("worker", {**self._request, "rival": "resident", "share": 1.0}, self.folder, timeout)
        if "error" in row:
            raise RuntimeError(f"the resident run failed: {row['error']}")
        self._request |= {name: row.pop(name) for name in ("regime", "work_bytes")}
        self.facts = {**row.pop("environment"), "weight_bytes": row.pop("weight_bytes")}
        self.facts["regime"] = self._request["regime"]
        return self._bounded({"name": "resident", **row})

    def row(self, name: str, share: float, timeout: float, budget_bytes: int | None = None) -> dict[str, Any]:
        """Return a rival's row, or its error. With `budget_bytes` Ballast gets just that for the weights."""
        request = {**self._request, "rival": name, "share": share, "budget_bytes": budget_bytes}
        return self._bounded({"name": name, **apart.measure("worker", request, self.folder, timeout)})

    def _bounded(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with the bound for what it copies, and its step against that."""
        if row.get("copied_bytes") is None:
            return row
        regime = self._request["regime"]
        bound = max(regime["compute"], row["copied_bytes"] / regime["bandwidth"])
        return {**row, "bound": bound, "over_bound": row["step"] / bound}
