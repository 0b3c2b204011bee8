"""CPU seconds of opening and planning at full size, and RAM: each model in processes of its own, against limits.

Opening is held against the imports of torch, diffusers and transformers that the model's stock pipeline needs, in the
same run: how fast a machine imports says nothing of Ballast.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from .harness import Run, apart
from .rss import peak_rss_bytes

OPEN_RATIO = 1.15  # of the imports
FIRST_SECONDS, KEPT_SECONDS, AGAIN_SECONDS = 10.0, 3.0, 1.0  # of CPU; `again` for all budgets together
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


def measure(to: Run) -> None:
    """Open and plan each model: with nothing kept, then in another process."""
    for name in to.request.get("models", MODELS):
        to.row(**_row(name))


def _row(name: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for step in ("build", "imports", "fresh", "kept"):
            worker = f"plans.{'plan' if step in ('fresh', 'kept') else step}"
            one = apart(worker, {"name": name}, folder, _SECONDS, {"XDG_CACHE_HOME": work})
            if "error" in one:
                return {"name": name, "verdict": one["error"][:80]}
            found[step] = one["rows"][0]
    fresh, kept = found["fresh"], found["kept"]
    row = {"name": name, "imports": found["imports"]["seconds"], "open": kept["open"], "first": fresh["first"]}
    row |= {"kept": kept["first"], "again": kept["again"], "rss_bytes": fresh["rss_bytes"]}
    return row | {"verdict": verdict(row)}


def verdict(row: dict[str, Any]) -> str:
    """Return "ok", or which figures of a row are over their limits."""
    limits = {"open": OPEN_RATIO * row["imports"], "first": FIRST_SECONDS, "kept": KEPT_SECONDS}
    limits |= {"again": AGAIN_SECONDS, "rss_bytes": LIMIT_BYTES}
    over = [f"{name} (< {limit:.3g})" for name, limit in limits.items() if row[name] >= limit]
    return f"TOO MUCH: {', '.join(over)}" if over else "ok"


def build(to: Run) -> None:
    """Write a model's configs and headers, and no weights."""
    from .downloads import full_size

    full_size.build(to.request["name"], Path(to.request["name"]))
    to.row(seconds=time.process_time())


def imports(to: Run) -> None:
    """Import the libraries and the classes that the folder's configs name, as far as these have them."""
    import diffusers
    import transformers

    folder = Path(to.request["name"])
    for file in (folder / "model_index.json", *folder.glob("*/config.json")):
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        for cls in (config.get("_class_name", ""), *(config.get("architectures") or ())):
            getattr(diffusers, cls, None) or getattr(transformers, cls, None)
    to.row(seconds=time.process_time())


def plan(to: Run) -> None:
    """Open the folder, and plan it for all budgets twice."""
    import torch

    from ..pipelines import open_pipeline

    torch.set_num_threads(2)  # on two cores whatever the machine has
    name = to.request["name"]
    pipe = open_pipeline(Path(name).resolve(), device="cpu", cache_dir=Path("cache").resolve())
    marks = [time.process_time()]
    for vram in BUDGETS * 2:
        pipe.plan(**_SIZES.get(name, _SIZE), guidance=4.0, vram=vram)
        marks.append(time.process_time())
    again = marks[-1] - marks[len(BUDGETS)]
    to.row(open=marks[0], first=marks[1] - marks[0], again=again, rss_bytes=peak_rss_bytes())
