"""`ballast bench stream`, the part on a device: steps against T_bound = max(computing, streamed bytes / bandwidth).

As in a run, a dry run tells what is called when and what it computes, and what stays is chosen by that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..memory import simulated
from ..memory.engine.engine import Engine
from ..memory.planning.dry_run import dry_run
from ..memory.planning.fit import sizes_in, streamed_layout
from ..memory.planning.forecast import UnitForecast
from ..memory.planning.planner import UnitSizes
from ..memory.rates import Rates
from ..memory.weights import hostbuffer
from ..pipelines.models.hidream.routing import any_routing
from . import charts, models, report
from .measure import Meter, environment, find_device, find_tokens, set_sim_bandwidth
from .published import RING_GROUPS

RATIOS = (0.3, 1.0, 3.0)  # seconds of computing for each second of copying all that can stream
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the weights that there is room for beside the ring
_STEPS = 5
_STAND_INS = {("MOEFeedForwardSwiGLU", "moe_infer"): any_routing}  # which looks at values


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
    predicted: float  # by the solver
    bound: float
    over_bound: float
    peak_bytes: int
    copied_bytes: int  # weights, in a steady step
    engine_allocations: int | None  # on the device in a steady step, on the simulated one
    is_equal: bool | None = None  # bit for bit, to the resident result
    driver_bytes: int | None = None  # more than before, as the driver counts


def run(device: str, size: str, out: Path) -> int:
    """Measure, write the .json and the .png anew after each row, print the table. Returns 0."""
    meter = Meter(find_device(device))
    devices = [torch.device("cpu"), *([] if meter.is_sim or meter.device.type == "cpu" else [meter.device])]
    overhead = {on.type: round(python_overhead(on) * 1e6, 1) for on in devices}
    module = models.build(size)
    found = environment(meter, size)
    found |= {"weight_bytes": models.weight_bytes(module), "overhead_us_per_group": overhead, "rows": []}
    with torch.inference_mode():
        for regime in regimes(meter, module, size):
            for share in SHARES:
                row = measure(meter, module, size, regime, share)
                found["rows"].append(dataclasses.asdict(row))
                found["pinned_bytes"] = hostbuffer._pinned_bytes
                wrote = report.write("stream", found, charts.stream(found), out)
    headings = {"ratio": "C/T", "share": "r", "tokens": "tokens", "first_step": "first", "step": "step"}
    headings |= {"predicted": "predicted", "bound": "bound", "over_bound": "T/bound", "peak_bytes": "peak"}
    headings |= {"copied_bytes": "copied", "engine_allocations": "allocs"}
    report.say(report.table(headings, found["rows"]))
    python = ", ".join(f"{value} us on {kind}" for kind, value in overhead.items())
    report.say(f"\nPython per group: {python}\n{wrote}")
    return 0


@dataclass(frozen=True)
class Regime:
    """A balance of computing and copying. Seconds, bytes per second."""

    tokens: int
    bandwidth: float
    compute: float
    allocations: int  # of a resident step


def regimes(meter: Meter, module: nn.Module, size: str, ratios: tuple[float, ...] = RATIOS) -> list[Regime]:
    """Return loads for the ratios: by the number of tokens, or by the bandwidth of a simulated card.

    The module must be on the CPU, and fit on the device as a whole.
    """
    streamable = sum(group.packed_bytes for group in sizes_in(module).groups)
    bandwidth = meter.bandwidth()
    resident = Engine(module, meter.device)
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


@functools.lru_cache(maxsize=4)
def forecast(size: str, tokens: int) -> UnitForecast:
    """Return what one call computes, and the order of the calls inside, by a dry run."""
    module, step = models.empty(size), models.inputs(size, tokens, torch.device("cpu"))

    def call(device: torch.device) -> None:
        module(**tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), step))

    return dry_run({size: module}, call, _STAND_INS)[0].units[size]


def budget(sizes: UnitSizes, share: float) -> int:
    """Bytes for the weights on the device with room for such a share of them, a ring, and what has to be there."""
    room = math.ceil(share * sum(group.held_bytes for group in sizes.groups))
    ring = RING_GROUPS * max(group.packed_bytes for group in sizes.groups)
    return min(sizes.resident_bytes, sizes.fixed_bytes + ring + room)


def streamed(
    module: nn.Module, size: str, regime: Regime, device: torch.device, room_bytes: int
) -> tuple[Engine, float]:
    """Return the placement that a run would choose with so much room for weights, and its seconds as the solver says.

    The module must be on the CPU. Raises ValueError if the room is too little to stream it.
    """
    work = forecast(size, regime.tokens)
    sizes = sizes_in(module, work.call_order)
    rate = regime.bandwidth
    speed = work.operations.total / regime.compute  # as measured, in whatever type the module computes
    loads = sizes.loads(work, Rates(rate, rate, rate, speed, float32=speed, float16=speed))
    layout = streamed_layout(module, room_bytes, work.call_order, loads)
    return Engine(module, device, layout, calls=work.call_order), layout.seconds


def measure(
    meter: Meter,
    module: nn.Module,
    size: str,
    regime: Regime,
    share: float,
    truth: torch.Tensor | None = None,
    steps: int = _STEPS,
) -> Row:
    """Return the row of a share. With a resident step's result, also tell whether it is the same, and the peak.

    The module must be on the CPU, and is there afterwards. The median of `steps` counts, beside those that begin.
    """
    if meter.is_sim:
        set_sim_bandwidth(regime.bandwidth)
    idle_bytes, step = meter.used_bytes(), models.inputs(size, regime.tokens, meter.device)
    sizes = sizes_in(module, forecast(size, regime.tokens).call_order)
    placement, predicted = streamed(module, size, regime, meter.device, budget(sizes, share))
    streamed_bytes = placement.layout.copied_bytes
    placement.place()
    is_equal, driver_bytes = None, None
    try:
        meter.accelerator.take_peak_bytes()
        (first,) = meter.steps(lambda: module(**step), 1)
        placement.take_bytes_in()
        allocated = simulated.stats().allocation_count if meter.is_sim else 0
        seconds = meter.steady(lambda: module(**step), steps, settle=2)
        calls = steps + 2
        copied_bytes = placement.take_bytes_in() // calls
        allocations = None
        if meter.is_sim:
            allocations = (simulated.stats().allocation_count - allocated) // calls - regime.allocations
        peak_bytes = meter.accelerator.take_peak_bytes()
        if truth is not None:
            with meter.driver_peak() as used:
                is_equal = torch.equal(module(**step)[0].cpu(), truth)
            driver_bytes = used.over(idle_bytes)
    finally:
        placement.remove()
        meter.accelerator.empty_cache()
    bound = max(regime.compute, streamed_bytes / regime.bandwidth)
    whole = sum(group.packed_bytes for group in sizes.groups) / regime.bandwidth
    return Row(
        regime.compute / whole, share, regime.tokens, regime.bandwidth, regime.compute, streamed_bytes, first, seconds,
        predicted, bound, seconds / bound, peak_bytes, copied_bytes, allocations, is_equal, driver_bytes,
    )  # fmt: skip


class _Many(nn.Module):
    """Groups so small that a call of one is all Python."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def python_overhead(device: torch.device, count: int = 32, calls: int = 200) -> float:
    """Seconds of real time that the engine adds to each group's call: streamed against resident, medians."""
    module, backend = _Many(count), Meter(device).accelerator
    x = torch.ones(1, 8).to(device)
    medians = []
    with torch.inference_mode():
        for placement in (Engine(module, device), Engine(module, device, streamed_layout(module))):
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
