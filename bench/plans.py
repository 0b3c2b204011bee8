"""CPU seconds of opening and planning at full size, and RAM: each model in processes of its own, against limits.

Opening is held against the imports of torch, diffusers and transformers that the model's stock pipeline needs, in the
same run: how fast a machine imports says nothing of Ballast.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .apart import measure
from .report import say, table
from .rss import peak_rss_bytes

OPEN_RATIO = 1.15  # of the imports
FIRST_SECONDS, KEPT_SECONDS, AGAIN_SECONDS = 20.0, 4.0, 1.0  # of CPU; `again` for all budgets together
LIMIT_BYTES = 2 * 10**9
BUDGETS = ("6GB", "8GB", "12GB", "16GB")
MODELS = ("hidream", "newbie", "pyramid", "flux", "wan", "qwenimage")
_SIZES: dict[str, dict[str, Any]] = {
    "wan": {"width": 832, "height": 480, "frames": 81},
    "pyramid": {"width": 640, "height": 384, "frames": 121},
    "qwenimage": {"width": 1328, "height": 1328},
}
_SIZE: dict[str, Any] = {"width": 1024, "height": 1024}
_SECONDS = 600  # for one process


def run(names: Sequence[str] = MODELS) -> int:
    """Open and plan each model: with nothing kept, then in another process. Returns 0 if all kept within the limits."""
    rows = [_row(name) for name in names]
    headings = {"name": "model", "imports": "stock imports", "open": f"open (< {OPEN_RATIO:g} x)"}
    headings |= {"first": f"first plan (< {FIRST_SECONDS:g})", "kept": f"next process (< {KEPT_SECONDS:g})"}
    headings |= {"again": f"again (< {AGAIN_SECONDS:g})", "rss_bytes": "RAM (< 2 GB)", "verdict": ""}
    say(table(headings, rows))
    return 0 if all(row["verdict"] == "ok" for row in rows) else 1


def _row(name: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        request = {"name": name, "folder": str(folder / name)}
        for step in ("build", "imports", "fresh", "kept"):
            found[step] = measure("plans", {**request, "step": step}, folder, _SECONDS, {"XDG_CACHE_HOME": work})
            if "error" in found[step]:
                return {"name": name, "verdict": found[step]["error"][:80]}
    fresh, kept = found["fresh"], found["kept"]
    row = {"name": name, "imports": found["imports"]["seconds"], "open": kept["open"], "first": fresh["first"]}
    row |= {"kept": kept["first"], "again": kept["again"], "rss_bytes": fresh["rss_bytes"]}
    return row | {"verdict": verdict(row)}


def verdict(row: dict[str, Any]) -> str:
    """Return "ok", or which figures of a row are over their limits."""
    limits = {"open": OPEN_RATIO * row["imports"], "first": FIRST_SECONDS, "kept": KEPT_SECONDS}
    limits |= {"again": AGAIN_SECONDS, "rss_bytes": LIMIT_BYTES}
    over = [name for name, limit in limits.items() if row[name] >= limit]
    return f"TOO MUCH: {', '.join(over)}" if over else "ok"


def main(argv: Sequence[str]) -> None:
    """Do one step of a request (JSON), and write what it took to a file."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    folder = Path(request["folder"])
    steps = {"build": _build, "imports": _imports, "fresh": _plan, "kept": _plan}
    answer.write_text(json.dumps(steps[request["step"]](request["name"], folder)), "utf-8")


def _build(name: str, folder: Path) -> dict[str, float]:
    """Write its configs and headers, and no weights."""
    from . import full_size

    own = {"newbie": full_size.build_newbie, "pyramid": full_size.build_pyramid}
    own[name](folder) if name in own else full_size.build(name, folder)
    return {"seconds": time.process_time()}


def _imports(name: str, folder: Path) -> dict[str, float]:
    """Import the libraries and the classes that the folder's configs name, as far as these have them."""
    import diffusers
    import transformers

    for file in (folder / "model_index.json", *folder.glob("*/config.json")):
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        for cls in (config.get("_class_name", ""), *(config.get("architectures") or ())):
            getattr(diffusers, cls, None) or getattr(transformers, cls, None)
    return {"seconds": time.process_time()}


def _plan(name: str, folder: Path) -> dict[str, float]:
    import torch

    from ..pipelines import open_pipeline

    torch.set_num_threads(2)  # on two cores whatever the machine has
    pipe = open_pipeline(folder, device="cpu", cache_dir=folder / "cache")
    size = _SIZES.get(name, _SIZE)
    marks = [time.process_time()]
    for budgets in (BUDGETS, BUDGETS):
        for vram in budgets:
            pipe.plan(**size, guidance=4.0, vram=vram)
            marks += [time.process_time()] if vram in (budgets[0], budgets[-1]) else []
    first, again = marks[1] - marks[0], marks[-1] - marks[-3]
    return {"open": marks[0], "first": first, "again": again, "rss_bytes": peak_rss_bytes()}
