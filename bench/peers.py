"""`ballast bench peers`: Ballast and other ways to offload, on the same model and the same inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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

    `only` names the rivals to run (None: all). The resident one always runs, first: it finds how many tokens make the
    ratio, and its result is what the others are compared with. Raises ValueError for a name that is not known, and
    RuntimeError if the resident run fails.
    """
    if unknown := set(only or ()) - set(RIVALS):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}. Known are {', '.join(RIVALS)}.")
    chosen = [name for name in RIVALS if name != "resident" and (not only or name in only)]
    runs = [("resident", 1.0)]
    runs += [(name, share) for name in chosen for share in (shares if RIVALS[name].budgeted else [0.0])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        request: dict[str, Any] = {
            "device": device, "size": size, "ratio": ratio, "regime": None, "work_bytes": 0,
            "rivals": str(rivals.resolve()) if rivals else None, "truth": str(Path(folder) / "truth.safetensors"),
        }  # fmt: skip
        found: dict[str, Any] = {"ratio": ratio, "rows": rows}
        absent: set[str] = set()
        for name, share in runs:
            if name in absent:
                continue
            row = apart.measure("worker", {**request, "rival": name, "share": share}, Path(folder), timeout)
            if name == "resident":
                if "error" in row:
                    raise RuntimeError(f"the resident run failed: {row['error']}")
                found |= row.pop("environment") | {"weight_bytes": row.pop("weight_bytes")}
                request["regime"], request["work_bytes"] = row.pop("regime"), row.pop("work_bytes")
                found["regime"] = request["regime"]
            if row.get("error", "").startswith(("ModuleNotFoundError", "ImportError")):
                absent.add(name)  # listed once, whatever the share
            told = RIVALS[name].budgeted and name not in absent
            row = {"name": f"{name} {share:.2f}" if told else name, **row}
            rows.append(_bounded(row, request["regime"]))
            report.say(f"{row['name']}: {row.get('error') or report.words('step', row['step']) + ' s'}")
            wrote = report.write("peers", found, charts.peers(found), out)
    headings = {"name": "way", "prepare": "prepare", "first_step": "first", "step": "step", "over_bound": "T/bound"}
    headings |= {"peak_bytes": "peak", "driver_bytes": "driver", "rss_bytes": "RSS", "copied_bytes": "copied"}
    report.say("\n" + report.table(headings | {"difference": "differs"}, [row for row in rows if "error" not in row]))
    report.say(wrote)
    return 0


def _bounded(row: dict[str, Any], regime: dict[str, Any]) -> dict[str, Any]:
    """The row with the bound for what it copies, and its step against that."""
    if row.get("copied_bytes") is None:
        return row
    bound = max(regime["compute"], row["copied_bytes"] / regime["bandwidth"])
    return {**row, "bound": bound, "over_bound": row["step"] / bound}
