"""One rival with one setting, measured in a process of its own: what it does to torch ends with it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from ..memory.weights import hostbuffer
from . import models
from .measure import Meter, environment, find_device, set_sim_bandwidth
from .rivals import RIVALS, Job
from .stream import Regime, budget, regimes, sizes_in

_STEPS = 5


def main(argv: Sequence[str]) -> None:
    """Measure what a request (JSON) asks for, and write what was found, or the error in one line, to a file."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    if request["rivals"]:
        sys.path.append(request["rivals"])  # behind all else: what is installed comes first
    try:
        found = measure(request)
    except BaseException as error:  # a rival may also exit
        lines = str(error).strip().splitlines() or ["no reason given"]
        found = {"error": f"{type(error).__name__}: {lines[0]}"}
    found["version"] = _version(RIVALS[request["rival"]].package)
    answer.write_text(json.dumps(found), "utf-8")


def _version(package: str | None) -> str | None:
    try:
        return importlib.metadata.version(package) if package else None
    except importlib.metadata.PackageNotFoundError:
        return None


@torch.no_grad()  # not inference mode: some rivals cannot live in it
def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Figures of one rival: a row's, and without a regime in the request also that regime and the machine."""
    rival, size = RIVALS[request["rival"]], request["size"]
    meter = Meter(find_device(request["device"]))
    idle_bytes = meter.used_bytes()
    module = models.build(size)
    weight_bytes = models.weight_bytes(module)
    found: dict[str, Any] = {}
    if request["regime"]:
        regime = Regime(**request["regime"])
    else:
        (regime,) = regimes(meter, module, size, (request["ratio"],))
        found = {"regime": vars(regime), "environment": environment(meter, size), "weight_bytes": weight_bytes}
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
    found["pinned_bytes"] = hostbuffer._pinned_bytes if request["rival"] == "ballast" else None
    found["rss_bytes"] = psutil.Process().memory_info().rss
    result = ready(**step)[0].float().cpu()
    found["copied_bytes"] = meter.copied_bytes(lambda: ready(**step))
    if request["rival"] == "resident":
        save_file({"result": result.contiguous()}, request["truth"])
        found["work_bytes"] = max(0, found["peak_bytes"] - weight_bytes)
    elif Path(request["truth"]).is_file():
        truth = load_file(request["truth"])["result"]
        found["difference"] = float((result - truth).abs().max())
    return found
