"""`ballast bench gpu`: all figures of one card, within minutes.

Each job is a section in a process of its own with its share of the time. What breaks, or has no time, says so in one
line, and the others go on. `--dry` runs the same code on the simulated card with tiny models: it proves the code, and
no figure.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .. import harness, report
from ..places import RESULTS
from . import page

_ABOUT = ("machine", "device", "torch", "cuda", "diffusers")  # what all sections say the same of
_GRACE = 6.0  # seconds between the time that a section has for its rows, and its end
_DRY_SECONDS = 600.0  # that any may take where it is no card's time
_ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
_STREAM = {"ratios": [0.3, 1.0], "shares": [0.0, 0.25, 0.5, 0.75], "weights": ["auto", "exact12"]}
_PEERS: dict[str, Any] = {"ratio": 1.0, "shares": [0.5], "as_large": True}  # where overlapping matters most


@dataclass(frozen=True)
class Job:
    """A section and what it is asked for; `dry`, what it is asked for then.

    `weight` is its part of the time, `least` the seconds that it is begun with.
    """

    section: str
    weight: float
    least: float
    request: Mapping[str, Any] = field(default_factory=dict)
    dry: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


# In the order of what must not be missing. The first ends the start of CUDA, the tests compile.
JOBS: dict[str, Job] = {
    "card": Job("card", 28, 15),
    "newbie": Job("stream", 75, 40, {"size": "newbie", **_STREAM}, {"size": "tiny-newbie", "ratios": [1.0]}),
    "tests": Job("tests", 120, 60, dry={"select": "encoded or survived or stripes"}),
    "codecs": Job("codecs", 24, 15, {"megaweights": 36, "rounds": 5}, {"megaweights": 0.05, "rounds": 1}),
    "plans": Job("newbie", 75, 50, {"ways": "ours", "steps": 4}, {"folder": "demo", "side": 64}),
    "ways": Job("ways", 70, 50, {}, {"side": 64}),
    "newbie-peers": Job("peers", 70, 45, {"size": "newbie", **_PEERS}, {"size": "tiny-newbie", "only": ["naive"]}),
    "decode": Job(
        "decode", 40, 25, {"sides": [1024, 2048], "budgets": [3 * 2**29, 3 * 2**30]},
        {"sides": [64, 128], "budgets": [2**20]},
    ),
    "malloc-async": Job(
        "stream", 27, 20, {"size": "newbie", "ratios": [1.0], "shares": [0.5], "weights": ["auto"]},
        {"size": "tiny-newbie"}, _ASYNC,
    ),
    "hidream": Job(
        "stream", 79, 60, {"size": "hidream", **_STREAM},
        {"size": "tiny-hidream", "ratios": [1.0], "shares": [0.0, 0.5]},
    ),
    "hidream-peers": Job("peers", 80, 60, {"size": "hidream", **_PEERS}, {"size": "tiny-hidream", "only": []}),
}  # fmt: skip


def chosen(only: Collection[str] | None) -> list[str]:
    """Return the jobs to run. What the card is belongs to all. Raises ValueError for a name that is not known."""
    if unknown := set(only or ()) - set(JOBS):
        raise ValueError(f"--only has {', '.join(sorted(unknown))}. Known are {', '.join(JOBS)}.")
    return [name for name in JOBS if not only or name in only or name == "card"]


def share(names: Sequence[str], left: float) -> float:
    """Seconds that the first of these jobs may take of those that are left: what one does not need others get."""
    return left * JOBS[names[0]].weight / sum(JOBS[name].weight for name in names)


def run(dry: bool, seconds: float, only: Collection[str] | None, out: Path | None) -> int:
    """Measure, write `<card>.json`, `.txt` and `.png` anew after each job, print the tables. Returns 0.

    Or 1 if a job broke. Sections that an earlier run wrote there stay, unless they are measured again. Results of a
    card that go where results belong are told on the page of benchmarks too.
    ValueError for a job that is not known or for no time, RuntimeError where there is no card or none begins.
    """
    names = chosen(only)
    if seconds <= 0:
        raise ValueError(f"--seconds is {seconds:g}; it takes a number above 0.")
    if not dry and not torch.cuda.is_available():  # which makes no context on the card
        raise RuntimeError("torch sees no CUDA card here. Use --dry, which runs the same code on a simulated one.")
    folder = out or (Path(tempfile.gettempdir()) / "ballast-gpu-dry" if dry else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(tempfile.gettempdir()) / "ballast-gpu.log"
    log.write_text("", "utf-8")
    found: dict[str, Any] = {"bench": "gpu", "dry": dry, "sections": {}}
    # What all processes import is read from a cold disk before the clock runs, or the first would end in it.
    for library in ("diffusers", "transformers"):
        import_module(library)
    begun = time.monotonic()
    one: dict[str, Any] = {}

    def measured(at: int) -> dict[str, Any]:
        left = seconds - (time.monotonic() - begun)
        return _measured(names[at], share(names[at:], left), dry, log)

    # A dry run's figures are of a virtual clock, which two at a time do not disturb.
    with ThreadPoolExecutor(2 if dry else 1) as pool:
        for name, one in zip(names, pool.map(measured, range(len(names))), strict=True):
            found["sections"][name] = one
            report.say(f"{name}: {len(one.get('rows', []))} rows in {one['seconds']:.0f} s")
            for line in report.lines(one):
                report.say(f"  {line}")
            found |= {key: one.pop(key) for key in _ABOUT if key in one}
            found["seconds"] = time.monotonic() - begun
            if "device" in found:  # which any section tells that comes as far
                stem = report.slug(found["device"])
                whole = {
                    **found,
                    "sections": _in_order({**_earlier(folder / f"{stem}.json", names), **found["sections"]}),
                }
                (folder / f"{stem}.txt").write_text(text(whole) + "\n", "utf-8")
                wrote = report.write(stem, whole, "card", folder)
    if "device" not in found:
        raise RuntimeError(f"no section could begin: {report.lines(one)[-1]}")
    if not dry and folder == RESULTS:
        page.write()
    report.say(f"\n{text(found)}\n\n{wrote}\nwhat the sections printed: {log}")
    return 0 if all("error" not in one for one in found["sections"].values()) else 1


def _earlier(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Return the sections of a file of results, but for those that are measured now."""
    known = json.loads(path.read_text("utf-8"))["sections"] if path.exists() else {}
    return {name: one for name, one in known.items() if name not in names}


def _in_order(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sections[name] for name in JOBS if name in sections}


def _measured(name: str, allowed: float, dry: bool, log: Path) -> dict[str, Any]:
    """Return what a job found, with the seconds that it took; its error, if it broke or had no time."""
    job, begun = JOBS[name], time.monotonic()
    if allowed < job.least and not dry:
        error = f"left out: it had {max(0.0, allowed):.0f} s, and wants {job.least:.0f}"
        return {"section": job.section, "seconds": 0.0, "error": error}
    allowed = allowed if not dry else _DRY_SECONDS
    request = {**job.request, **(job.dry if dry else {}), "dry": dry, "seconds": allowed - _GRACE}
    request["device"] = "sim" if dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        one = harness.apart(job.section, request, Path(folder), allowed, job.environment, log)
    return {"section": job.section, "seconds": time.monotonic() - begun, **one}


def text(found: Mapping[str, Any]) -> str:
    """All that was found, for a terminal."""
    parts = [f"{found['device']}, torch {found['torch']}" + (": DRY RUN, the figures mean nothing" * found["dry"])]
    for name, one in found["sections"].items():
        parts.append(f"\n== {name}, {one['seconds']:.0f} s")
        if one.get("rows"):
            parts.append(report.table(harness.SECTIONS[one["section"]].columns, one["rows"]))
        parts += [f"! {line}" for line in report.lines(one)]
    return "\n".join(parts)
