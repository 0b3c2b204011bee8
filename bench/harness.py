"""The harness of all sections: rows in a file that is written anew after each, in this process or in one of its own.

A section is a module of bench. Its `measure` gets a `Run`: what is asked for, the device, the time that is left, and
where rows go. SECTIONS has the columns of each, the name of its file, its picture, and what `--dry` asks for.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..memory.errors import release_frames
from . import report
from .places import RESULTS

if TYPE_CHECKING:
    from .measure import Meter

_T = TypeVar("_T")
_ENTRY = Path(__file__).with_name("__main__.py")


@dataclass(frozen=True)
class Section:
    """Columns of a section's table, the name of its files, its picture in `charts`, and what a dry run asks for."""

    columns: Mapping[str, str]
    stem: str
    picture: str | None = None
    dry: Mapping[str, Any] = field(default_factory=dict)


_ON_SIM = {"device": "sim", "size": "tiny"}
SECTIONS: dict[str, Section] = {
    "card": Section({"name": "what", "rate": "rate", "unit": "unit"}, "card-{device}"),
    "stream": Section(
        {
            "weights": "weights", "share": "share", "ratio": "C/T", "step": "step", "predicted": "predicted",
            "bound": "bound", "over_bound": "T/bound", "peak_bytes": "peak", "driver_bytes": "driver",
            "copied_bytes": "copied", "is_equal": "equal",
        },
        "stream-{device}-{size}", "stream", {**_ON_SIM, "ratios": [1.0]},
    ),
    "published": Section(
        {
            "model": "model", "residency": "residency", "compute_over_transfer": "C/T", "ram_share": "RAM share",
            "step_seconds": "step", "bound_seconds": "bound", "over_bound": "T/bound",
        },
        "stream", "published", {"models": ["Pyramid-Flow miniFlux"], "residencies": [0.0, 0.5], "ratios": [1.0]},
    ),
    "peers": Section(
        {
            "name": "way", "prepare": "prepare", "step": "step", "over_bound": "T/bound", "peak_bytes": "peak",
            "driver_bytes": "driver", "rss_bytes": "RSS", "copied_bytes": "copied", "difference": "differs",
            "times_as_fast": "times as fast",
        },
        "peers-{device}-{size}", "peers", {**_ON_SIM, "only": ["ballast", "naive"], "shares": [0.5]},
    ),
    "newbie": Section(
        {
            "name": "row", "stage": "stage", "placement": "placement", "planned_bytes": "planned",
            "peak_bytes": "measured", "over_planned": "measured/planned", "driver_bytes": "driver", "is_kept": "kept",
            "planned_step": "planned step", "step": "step", "recompiles": "recompiled", "article": "article",
            "note": "note",
        },
        "newbie-{device}", "newbie", {"device": "sim", "folder": "demo", "side": 64},
    ),
    "plans": Section(
        {
            "name": "model", "imports": "stock imports", "open": "open", "first": "first plan",
            "kept": "next process", "again": "again", "rss_bytes": "RAM", "verdict": "",
        },
        "plans", dry={"models": ["newbie"]},
    ),
    "caches": Section(
        {
            "name": "cache", "times_as_fast": "times as fast", "most": "at most", "psnr": "PSNR", "best": "at best",
            "verdict": "",
        },
        "caches", dry={"prompts": 1, "kinds": ["static:2"], "steps": 6},
    ),
    "load": Section(
        {
            "name": "way", "seconds": "seconds", "least": "least", "most": "most", "gbps": "GB/s",
            "peak_bytes": "RAM peak", "over_weights": "of weights", "cached_bytes": "left in cache",
        },
        "load", dry={"gb": 0.01, "rounds": 1},
    ),
    "codecs": Section(
        {
            "name": "codec", "bits": "bits", "encoded_gbps": "encoded GB/s", "decoded_gbps": "decoded GB/s",
            "seconds": "seconds", "counted": "as counted", "launches_per_million": "launches/M",
            "workspace_bytes": "workspace", "verdict": "",
        },
        "codecs", dry={"device": "cpu", "megaweights": 0.05, "rounds": 1},
    ),
    "decode": Section(
        {
            "way": "way", "side": "side", "seconds": "seconds", "peak_bytes": "peak", "driver_bytes": "driver",
            "h2d_bytes": "to card", "d2h_bytes": "from card", "difference": "differs",
        },
        "decode-{device}",
    ),
    "ways": Section(
        {
            "model": "model", "way": "way", "first_step": "first step", "step": "step", "planned_step": "planned step",
            "peak_bytes": "peak", "planned_bytes": "planned", "over_planned": "measured/planned",
            "copied_bytes": "copied", "is_equal": "equal",
        },
        "ways-{device}",
    ),
    "tests": Section({"name": "test", "outcome": "outcome", "why": "why"}, "tests"),
}  # fmt: skip


class Run:
    """Rows and notes of one section, and the time that it has. `request` is what it is asked for.

    What is there is saved after each change. Until the section is done an `error` says so: a process that dies leaves
    its rows, and what it was at.
    """

    def __init__(self, request: Mapping[str, Any], save: Callable[[dict[str, Any]], None]) -> None:
        self.request = request
        self.dry: bool = request.get("dry", False)
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.error: str | None = "it ended as it began"
        self._save, self._begun = save, time.monotonic()

    @property
    def found(self) -> dict[str, Any]:
        """All that there is to write."""
        more = {"notes": self.notes, "error": self.error}
        return {**self.facts, "rows": self.rows, **{key: value for key, value in more.items() if value}}

    def meter(self) -> Meter:
        """Return a meter of the device, which is there and warm from then on, and told what it is."""
        from .measure import Meter, environment, find_device

        meter = Meter(find_device(self.request["device"]))
        torch.ones(1, device=meter.device).add_(1)
        if meter.is_sim:
            torch.set_num_threads(1)  # nothing there is large
        # What runs, or where there is no such thing what was asked for.
        asked = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "native").removeprefix("backend:")
        allocator = torch.cuda.get_allocator_backend() if meter.device.type == "cuda" else asked
        self.tell(**environment(meter, self.request.get("size", "")), allocator=allocator)
        return meter

    def left(self) -> float:
        """Seconds until it should be done."""
        return self.request.get("seconds", float("inf")) - (time.monotonic() - self._begun)

    def tell(self, **facts: Any) -> None:
        """Note what is true of all rows."""
        self.facts |= facts
        self._save(self.found)

    def note(self, line: str) -> None:
        """Say something in one line."""
        self.notes.append(line)
        self._save(self.found)

    def row(self, **figures: Any) -> dict[str, Any]:
        """Add a row, and return it."""
        self.add([figures])
        return figures

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add rows that are written at once."""
        self.rows += rows
        self._save(self.found)

    def attempt(self, what: str, seconds: float, call: Callable[..., _T], *of: Any) -> _T | None:
        """Return what a call returns. None where it fails, or where fewer `seconds` are left: then a note says so.

        A dry run has the time that it takes.
        """
        if self.left() < seconds and not self.dry:
            self.note(f"{what}: left out, {max(0.0, self.left()):.0f} s were left")
            return None
        self.error = f"it ended in: {what}"
        self._save(self.found)
        try:
            return call(*of)
        except Exception as error:
            traceback.print_exc()
            self.note(f"{what}: {report.line(error)}")
            release_frames(error)
            return None
        finally:
            gc.collect()

    def measure(self, call: Callable[[Run], None]) -> None:
        """Call it; what it raises becomes the section's error, as does a section without rows."""
        try:
            call(self)
            self.error = None if self.rows else "no row could be measured"
        except BaseException as error:  # a library may also exit
            traceback.print_exc()
            self.error = report.line(error)
        self._save(self.found)


def show(name: str, request: Mapping[str, Any], out: Path | None) -> int:
    """Measure a section in this process: write its files anew after each row, print its table.

    Returns 0, or 1 where something could not be measured or is not as it should be. What the section itself raises is
    raised.
    """
    section, wrote = SECTIONS[name], ""
    folder = out or (Path(tempfile.gettempdir()) / "ballast-bench-dry" if request.get("dry") else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)

    def save(found: dict[str, Any]) -> None:
        nonlocal wrote
        if found["rows"]:
            found = {key: value for key, value in found.items() if key != "error"}
            stem = section.stem.format(device=report.slug(found.get("device", "")), size=found.get("size", ""))
            wrote = report.write(stem, found, section.picture, folder)

    run = Run({**request, **(section.dry if request.get("dry") else {})}, save)
    import_module(f".{name}", __package__).measure(run)
    if run.rows:
        report.say("\n" + report.table(section.columns, run.rows))
    for line in report.lines({"rows": run.rows, "notes": run.notes}):
        report.say(f"! {line}")
    report.say(wrote)
    bad = [row for row in run.rows if row.get("verdict", "ok") not in ("ok", "same bits")]
    return 1 if bad or not run.rows else 0


def apart(
    worker: str,
    request: Mapping[str, Any],
    folder: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Return what a section found in a process of its own, which works in `folder`, or `error`: one line.

    `worker` is a module of bench, or one of its functions, such as "peers.rival". What was found until the time is over
    is there then, with the error. What the process prints goes to the end of `log`. Those that it started end with it.
    """
    answer, said = folder / "answer.json", folder / "said.txt"
    answer.unlink(missing_ok=True)
    command = [sys.executable, str(_ENTRY), "--worker", worker, json.dumps(request), str(answer)]
    late = None
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(environment or {})}, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = {"error": f"not done after {timeout:.0f} s"}
        finally:
            _end(process)
    text = said.read_text("utf-8", errors="replace")
    if log:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {worker}\n{text}\n")
    found = json.loads(answer.read_text("utf-8")) if answer.is_file() else {}
    if found or late:
        return {**found, **(late or {})}
    last = (text.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"ended with status {process.returncode}: {last}"}


def _end(process: subprocess.Popen) -> None:
    """End a process that still runs, and on POSIX all that it started: tests start some of their own."""
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def work(worker: str, request: str, answer: str) -> None:
    """Be the process that `apart` starts."""
    path = Path(answer)

    def save(found: dict[str, Any]) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found), "utf-8")
        os.replace(part, path)

    run = Run(json.loads(request), save)
    module, _, function = worker.partition(".")
    run.measure(lambda run: getattr(import_module(f".{module}", __package__), function or "measure")(run))
