"""How long a plan takes at full size, and how much RAM: each model in a process of its own, against 20 s and 2 GB."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..memory.planning.dry_run import dry_run
from ..pipelines import open_pipeline
from . import full_size
from .apart import measure
from .report import say, table
from .rss import peak_rss_bytes

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 2 * 10**9
_SIZES: dict[str, dict[str, Any]] = {
    "wan": {"width": 832, "height": 480, "frames": 81},
    "qwenimage": {"width": 1328, "height": 1328},
}
_SIZE: dict[str, Any] = {"width": 1024, "height": 1024}
_SECONDS = 600  # for one model, its folder made


def run() -> int:
    """Plan each model. Returns 0 if all kept within the limits."""
    rows = []
    for name in ("hidream", "newbie", "pyramid", "flux", "wan", "qwenimage"):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"XDG_CACHE_HOME": folder}
            found = measure("plans", {"name": name}, Path(folder), _SECONDS, environment)
        if "error" in found:
            rows.append({"name": name, "verdict": found["error"][:80]})
            continue
        seconds, rss_bytes = found["seconds"], found["rss_bytes"]
        kept = seconds < LIMIT_SECONDS and rss_bytes < LIMIT_BYTES
        rows.append({"name": name, "seconds": seconds, "rss_bytes": rss_bytes, "verdict": "ok" if kept else "TOO MUCH"})
    headings = {
        "name": "model",
        "seconds": f"seconds (< {LIMIT_SECONDS:.0f})",
        "rss_bytes": "RAM (< 2 GB)",
        "verdict": "",
    }
    say(table(headings, rows))
    return 0 if all(row["verdict"] == "ok" for row in rows) else 1


def main(argv: Sequence[str]) -> None:
    """Plan the model that a request (JSON) names, and write what that took to a file."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    torch.set_num_threads(2)  # on two cores whatever the machine has
    plan = _bare(request["name"]) if request["name"] in full_size.BARE else _pipeline(request["name"], answer.parent)
    begun = time.perf_counter()
    plan()
    seconds = time.perf_counter() - begun
    answer.write_text(json.dumps({"seconds": seconds, "rss_bytes": peak_rss_bytes()}), "utf-8")


def _bare(name: str) -> Callable[[], object]:
    module, arguments = full_size.BARE[name]()

    def run(device: torch.device) -> None:
        module(**{key: torch.empty_like(value, device=device) for key, value in arguments.items()})

    return lambda: dry_run({name: module}, run)


def _pipeline(name: str, folder: Path) -> Callable[[], object]:
    """Its folder holds configs and headers, and no weights."""
    pipe = open_pipeline(full_size.build(name, folder / name), device="cpu", cache_dir=folder / "cache")
    return lambda: pipe.plan(**_SIZES.get(name, _SIZE), guidance=4.0, vram="12GB")
