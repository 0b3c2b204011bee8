"""How long a plan takes at full size, and how much RAM: each model in a process of its own, against 20 s and 2 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import say, table

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 2 * 10**9
_ROOT = Path(__file__).resolve().parents[1]

# On two cores whatever the machine has. The folders hold configs and headers, and no weights.
_CHILD = """
import json, pathlib, sys, time
sys.path.insert(0, "tests")
import conftest, full_size
import torch, ballast
from ballast.bench.rss import peak_rss_bytes
torch.set_num_threads(2)
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if name in full_size.BARE:
    from ballast.memory.planning.dry_run import dry_run
    module, arguments = full_size.BARE[name]()
    begun = time.perf_counter()
    def run(device):
        on_device = lambda value: torch.empty_like(value, device=device) if isinstance(value, torch.Tensor) else value
        module(**{key: on_device(value) for key, value in arguments.items()})
    dry_run({name: module}, run)
else:
    size = {"wan": dict(width=832, height=480, frames=81), "qwenimage": dict(width=1328, height=1328)}
    pipe = ballast.open_pipeline(full_size.build(name, folder / name), device="cpu", cache_dir=folder / "cache")
    begun = time.perf_counter()
    pipe.plan(**size.get(name, dict(width=1024, height=1024)), guidance=4.0, vram="12GB")
seconds = time.perf_counter() - begun
print(json.dumps([seconds, peak_rss_bytes()]))
"""


def run() -> int:
    """Plan each model. Returns 0 if all kept within the limits."""
    rows = []
    for name in ("hidream", "newbie", "pyramid", "flux", "wan", "qwenimage"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", _CHILD, name, folder]
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            rows.append({"name": name, "verdict": done.stderr.strip().splitlines()[-1][:80]})
            continue
        seconds, rss_bytes = json.loads(done.stdout.splitlines()[-1])
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
