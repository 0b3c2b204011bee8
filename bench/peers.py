"""Ballast and other ways to offload, on the same model and the same inputs, each in a process of its own.

What a rival does to torch ends with its process. `as_large` runs Ballast again in the memory that each of them took.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from . import models, report
from .harness import Run, apart
from .measure import Meter, environment, find_device, set_sim_bandwidth
from .rivals import RIVALS, Job
from .stream import Regime, budget, regimes, sizes_in
from .wording import words

_LEAST = 30  # seconds that a way is begun with
_STEPS = 5


def measure(to: Run) -> None:
    """Add the resident row, then that of each rival with each share, then Ballast's as large as each.

    `only` names the rivals to run; None is all that are installed. Raises ValueError for a name that is not known, and
    RuntimeError if the resident run fails.
    """
    only, rivals = to.request.get("only"), to.request.get("rivals")
    if unknown := set(only or ()) - set(RIVALS):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}. Known are {', '.join(RIVALS)}.")
    if rivals:
        sys.path.append(rivals)  # where packages are looked for too
    ours = "resident", "ballast" if to.request.get("as_large") else ""
    wanted = [name for name in RIVALS if name not in ours] if only is None else only
    absent = [name for name in wanted if only is None and not _version(RIVALS[name].package)]
    if absent:
        to.note(f"not installed: {', '.join(absent)}")
    with TemporaryDirectory() as folder:
        field = _Field(to, Path(folder))
        field.resident()
        found = [row for name in wanted if name not in (*absent, "resident") for row in field.rows(name)]
        for row in found if to.request.get("as_large") else ():
            if "error" not in row:
                to.attempt(f"ballast as {row['name']}", _LEAST, field.as_large, row)


class _Field:
    """Rivals on the same weights and inputs.

    The resident one runs first: it finds how many tokens make the ratio of computing to copying, and its result is what
    the others are compared with.
    """

    def __init__(self, to: Run, folder: Path) -> None:
        self.to, self.folder = to, folder
        kept = ("device", "size", "ratio", "rivals")
        self.request: dict[str, Any] = {name: to.request.get(name) for name in kept}
        self.request |= {"regime": None, "work_bytes": 0, "truth": str(folder / "truth.safetensors")}

    def resident(self) -> None:
        row = self._measured("resident", rival="resident", share=1.0)
        if "error" in row:
            raise RuntimeError(f"the resident run failed: {row['error']}")
        self.request |= {name: row.pop(name) for name in ("regime", "work_bytes")}
        facts = {**row.pop("environment"), "weight_bytes": row.pop("weight_bytes"), "regime": self.request["regime"]}
        self.to.tell(ratio=self.request["ratio"], **facts)
        self._add(row)

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Add and yield the rows of a rival. One that cannot be imported is listed once."""
        for share in self.to.request["shares"] if RIVALS[name].budgeted else [0.0]:
            title = f"{name} {share:.2f}" if RIVALS[name].budgeted else name
            row = self.to.attempt(title, _LEAST, lambda title=title, share=share: self._row(name, title, share))
            if row:
                yield row
            if row and row.get("error", "").startswith(("ModuleNotFoundError", "ImportError")):
                return

    def as_large(self, other: dict[str, Any]) -> None:
        """Ballast with as many bytes for weights as another's peak leaves beside the activations."""
        room_bytes = max(1, other["peak_bytes"] - self.request["work_bytes"])
        row = self._measured(f"ballast as {other['name']}", rival="ballast", share=0.0, budget_bytes=room_bytes)
        more = {} if "error" in row else {"times_as_fast": other["step"] / row["step"]}
        self._add({**row, **more, "room_bytes": other["peak_bytes"]})

    def _row(self, name: str, title: str, share: float) -> dict[str, Any]:
        return self._add(self._measured(title, rival=name, share=share))

    def _add(self, row: dict[str, Any]) -> dict[str, Any]:
        report.say(f"{row['name']}: {row.get('error') or words('step', row['step']) + ' s'}")
        return self.to.row(**row)

    def _measured(self, name: str, **request: Any) -> dict[str, Any]:
        """Return the row with the bound for what it copies, and its step against that; or its error."""
        timeout = min(self.to.request.get("timeout", 300.0), self.to.left())
        found = apart("peers.rival", {**self.request, **request}, self.folder, timeout)
        row = {"name": name, **(found["rows"][0] if found.get("rows") else {"error": found["error"]})}
        if row.get("copied_bytes") is None:
            return row
        regime = row.get("regime") or self.request["regime"]
        bound = max(regime["compute"], row["copied_bytes"] / regime["bandwidth"])
        return {**row, "bound": bound, "over_bound": row["step"] / bound}


def _version(package: str | None) -> str | None:
    try:
        return importlib.metadata.version(package) if package else "of torch"
    except importlib.metadata.PackageNotFoundError:
        return None


@torch.no_grad()  # not inference mode: some rivals cannot live in it
def rival(to: Run) -> None:
    """Add the row of one rival; without a regime in the request also that regime and the machine."""
    request = to.request
    if request["rivals"]:
        sys.path.append(request["rivals"])  # behind all else: what is installed comes first
    rival, size = RIVALS[request["rival"]], request["size"]
    meter = Meter(find_device(request["device"]))
    idle_bytes = meter.used_bytes()
    module = models.build(size)
    weight_bytes = models.weight_bytes(module)
    found: dict[str, Any] = {"version": _version(rival.package)}
    if request["regime"]:
        regime = Regime(**request["regime"])
    else:
        (regime,) = regimes(meter, module, size, (request["ratio"],))
        found |= {"regime": vars(regime), "environment": environment(meter, size), "weight_bytes": weight_bytes}
    if meter.is_sim:
        set_sim_bandwidth(regime.bandwidth)
        torch.set_num_threads(1)  # nothing there is large
    step = models.inputs(size, regime.tokens, meter.device)
    room_bytes = request.get("budget_bytes") or budget(sizes_in(module), request["share"])
    job = Job(module, meter.device, request["share"], room_bytes, request["work_bytes"], size, regime)
    start = time.perf_counter()
    ready = rival.prepare(job)
    meter.accelerator.synchronize()
    found["prepare"] = time.perf_counter() - start
    (found["first_step"],) = meter.steps(lambda: ready(**step), 1)
    meter.steps(lambda: ready(**step), rival.warm_up)
    meter.accelerator.take_peak_bytes()
    found["step"] = meter.steady(lambda: ready(**step), _STEPS)
    found["peak_bytes"] = meter.accelerator.take_peak_bytes()
    used_bytes = meter.used_bytes()
    found["driver_bytes"] = None if used_bytes is None or idle_bytes is None else used_bytes - idle_bytes
    found["rss_bytes"] = psutil.Process().memory_info().rss
    result = ready(**step)[0].float().cpu()
    found["copied_bytes"] = meter.copied_bytes(lambda: ready(**step))
    if request["rival"] == "resident":
        save_file({"result": result.contiguous()}, request["truth"])
        found["work_bytes"] = max(0, found["peak_bytes"] - weight_bytes)
    else:
        found["difference"] = float((result - load_file(request["truth"])["result"]).abs().max())
    to.row(**found)
