"""`ballast bench stream`: the engine's steps against T_bound = max(computing, streamed bytes / bandwidth)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..memory import simulated
from ..memory.streaming.placement import Resident
from ..memory.streaming.stream import Streamed
from ..memory.units import hostbuffer
from . import charts, models, report
from .measure import Meter, environment, find_device, find_tokens, set_sim_bandwidth

RATIOS = (0.3, 1.0, 3.0)  # seconds of computing for each second of copying all that can stream
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the blocks' weights that is resident
_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One regime with one share resident. Times in seconds, sizes in bytes."""

    ratio: float  # computing / copying, as it came out
    share: float
    tokens: int
    bandwidth: float  # bytes per second
    compute: float  # of a resident step
    streamed_bytes: int
    first_step: float
    step: float
    bound: float
    over_bound: float
    peak_bytes: int
    copied_bytes: int  # weights, in a steady step
    engine_allocations: int | None  # on the device in a steady step, on the simulated one


def run(device: str, size: str, out: Path) -> int:
    """Measure, write the .json and the .png anew after each row, print the table. Returns 0."""
    meter = Meter(find_device(device))
    devices = [torch.device("cpu"), *([] if meter.is_sim or meter.device.type == "cpu" else [meter.device])]
    overhead = {on.type: round(python_overhead(on) * 1e6, 1) for on in devices}
    module = models.build(size)
    found = environment(meter, size)
    found |= {"weight_bytes": models.weight_bytes(module), "overhead_us_per_block": overhead, "rows": []}
    with torch.inference_mode():
        for regime in regimes(meter, module, size):
            for share in SHARES:
                row = _measure(meter, module, size, regime, share)
                found["rows"].append(dataclasses.asdict(row))
                found["pinned_bytes"] = hostbuffer._pinned_bytes
                wrote = report.write("stream", found, charts.stream(found), out)
    headings = {"ratio": "C/T", "share": "r", "tokens": "tokens", "first_step": "first", "step": "step"}
    headings |= {"bound": "bound", "over_bound": "T/bound", "peak_bytes": "peak", "copied_bytes": "copied"}
    headings |= {"engine_allocations": "allocs"}
    report.say(report.table(headings, found["rows"]))
    report.say(f"\nPython per block: {', '.join(f'{value} us on {kind}' for kind, value in overhead.items())}\n{wrote}")
    return 0


@dataclass(frozen=True)
class Regime:
    """A balance of computing and copying. Seconds, bytes per second."""

    tokens: int
    bandwidth: float
    compute: float
    allocations: int  # of a resident step


def regimes(meter: Meter, module: nn.Module, size: str, ratios: tuple[float, ...] = RATIOS) -> list[Regime]:
    """Loads for the ratios: by the number of tokens, or by the bandwidth where the card is a simulated one.

    The module must be on the CPU, and fit on the device as a whole.
    """
    streamable = Streamed(module, torch.device("cpu")).streamed_bytes
    bandwidth = meter.bandwidth()
    resident = Resident(module, meter.device)
    resident.place()
    try:
        if not meter.is_sim:
            goals = [ratio * streamable / bandwidth for ratio in ratios]
            found = [find_tokens(meter, module, size, goal) for goal in goals]
            return [Regime(tokens, bandwidth, compute, 0) for tokens, compute in found]
        tokens = models.SIZES[size].tokens
        step = models.inputs(size, tokens, meter.device)
        module(**step)
        simulated.reset_stats()
        module(**step)
        stats = simulated.stats()
        compute, allocations = stats.compute_seconds, stats.allocation_count
        return [Regime(tokens, ratio * streamable / compute, compute, allocations) for ratio in ratios]
    finally:
        resident.remove()
        meter.accelerator.empty_cache()


def budget(module: nn.Module, share: float) -> int:
    """Bytes for the weights on the device with such a share of the blocks resident: beside them the ring and the rest.

    The module must be on the CPU.
    """
    room = share * Streamed(module, torch.device("cpu")).streamed_bytes
    return min(models.weight_bytes(module), Streamed.least_bytes(module) + math.ceil(room))


def _measure(meter: Meter, module: nn.Module, size: str, regime: Regime, share: float) -> Row:
    if meter.is_sim:
        set_sim_bandwidth(regime.bandwidth)
    step = models.inputs(size, regime.tokens, meter.device)
    placement = Streamed(module, meter.device, budget(module, share))
    streamed_bytes = placement.streamed_bytes
    placement.place()
    try:
        meter.accelerator.take_peak_bytes()
        (first,) = meter.steps(lambda: module(**step), 1)
        placement.take_bytes_in()
        allocated = simulated.stats().allocation_count if meter.is_sim else 0
        seconds = meter.steady(lambda: module(**step), _STEPS, settle=2)
        calls = _STEPS + 2
        copied_bytes = placement.take_bytes_in() // calls
        allocations = None
        if meter.is_sim:
            allocations = (simulated.stats().allocation_count - allocated) // calls - regime.allocations
        peak_bytes = meter.accelerator.take_peak_bytes()
    finally:
        placement.remove()
        meter.accelerator.empty_cache()
    bound = max(regime.compute, streamed_bytes / regime.bandwidth)
    whole = Streamed(module, torch.device("cpu")).streamed_bytes / regime.bandwidth
    return Row(
        regime.compute / whole, share, regime.tokens, regime.bandwidth, regime.compute, streamed_bytes, first, seconds,
        bound, seconds / bound, peak_bytes, copied_bytes, allocations,
    )  # fmt: skip


class _Many(nn.Module):
    """Blocks so small that a call of one is all Python."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(count)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def python_overhead(device: torch.device, count: int = 200, calls: int = 30) -> float:
    """Seconds of real time that the engine adds to each block's call: streamed against resident, medians."""
    module, backend = _Many(count), Meter(device).accelerator
    x = torch.ones(1, 8).to(device)
    medians = []
    with torch.inference_mode():
        for placement in (Resident(module, device), Streamed(module, device)):
            placement.place()
            taken = []
            for _ in range(calls):
                backend.synchronize()
                start = time.perf_counter()
                module(x)
                # The host's time: the device may still be at work.
                taken.append(time.perf_counter() - start)
            placement.remove()
            medians.append(statistics.median(taken))
    return (medians[1] - medians[0]) / count
