"""`ballast bench gpu`: all figures of one card, within minutes.

Each section is a process of its own with its share of the time. What breaks, or has no time, says so in one line, and
the others go on. `--dry` runs the same code on the simulated card with tiny models: it proves the code, and no figure.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import apart, report
from ..places import RESULTS
from . import jobs, page, picture, tables

_ABOUT = ("machine", "device", "torch", "cuda", "diffusers")  # what all sections say the same of
_GRACE = 6.0  # seconds between the time that a section has for its rows, and its end
_DRY_SECTION = 600.0  # seconds that any may take where it is no card's time


def run(dry: bool, seconds: float, only: Collection[str] | None, out: Path | None) -> int:
    """Measure, write `<card>.json`, `.txt` and `.png` anew after each section, print the tables. Returns 0.

    Or 1 if a section broke. Results of a card that go where results belong are told on the page of benchmarks too.
    ValueError for a section that is not known or for no time, RuntimeError where there is no card or none begins.
    """
    names = jobs.chosen(only)
    if seconds <= 0:
        raise ValueError(f"--seconds is {seconds:g}; it takes a number above 0.")
    if not dry and not torch.cuda.is_available():  # which makes no context on the card
        raise RuntimeError("torch sees no CUDA card here. Use --dry, which runs the same code on a simulated one.")
    folder = out or (Path(tempfile.gettempdir()) / "ballast-gpu-dry" if dry else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    begun, log = time.monotonic(), Path(tempfile.gettempdir()) / "ballast-gpu.log"
    log.write_text("", "utf-8")
    found: dict[str, Any] = {"bench": "gpu", "dry": dry, "sections": {}}

    def section(at: int) -> dict[str, Any]:
        left = seconds - (time.monotonic() - begun)
        return _section(names[at], jobs.share(names[at:], left), dry, log)

    # A dry run's figures are of a virtual clock, which two at a time do not disturb.
    with ThreadPoolExecutor(2 if dry else 1) as pool:
        for name, one in zip(names, pool.map(section, range(len(names))), strict=True):
            found["sections"][name] = one
            report.say(f"{name}: {len(one.get('rows', []))} rows in {one['seconds']:.0f} s")
            for line in tables.lines(one):
                report.say(f"  {line}")
            found |= {key: one.pop(key) for key in _ABOUT if key in one}
            found["seconds"] = time.monotonic() - begun
            if "device" not in found:  # which any section tells that comes as far
                continue
            stem = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
            (folder / f"{stem}.txt").write_text(tables.text(found) + "\n", "utf-8")
            wrote = report.write_as(stem, found, picture.draw(found), folder)
    if "device" not in found:
        raise RuntimeError(f"no section could begin: {tables.lines(one)[-1]}")
    if not dry and folder == RESULTS:
        page.write()
    report.say(f"\n{tables.text(found)}\n\n{wrote}\nwhat the sections printed: {log}")
    return 0 if all("error" not in one for one in found["sections"].values()) else 1


def _section(name: str, allowed: float, dry: bool, log: Path) -> dict[str, Any]:
    """Return what a section found, with the seconds that it took; its error, if it broke or had no time."""
    job, begun = jobs.JOBS[name], time.monotonic()
    if allowed < job.least and not dry:
        return {
            "worker": job.worker, "seconds": 0.0,
            "error": f"left out: it had {max(0.0, allowed):.0f} s, and wants {job.least:.0f}",
        }  # fmt: skip
    allowed = allowed if not dry else _DRY_SECTION
    request = {**job.request, **(job.dry if dry else {}), "dry": dry, "seconds": allowed - _GRACE}
    with tempfile.TemporaryDirectory() as folder:
        one = apart.measure(f"gpu.{job.worker}", request, Path(folder), allowed, job.environment, log)
    return {"worker": job.worker, "seconds": time.monotonic() - begun, **one}
