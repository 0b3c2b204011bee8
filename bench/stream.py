"""Steps of the streaming engine against their bound, max(computing, streamed bytes / bandwidth): raw and encoded.

As in a run, a dry run tells what is called when and what it computes, and what stays is chosen by that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from ..pipelines.models.hidream.routing import any_routing
from . import models
from .harness import Run
from .measure import Meter, find_tokens, set_sim_bandwidth
from .models import encode

RATIOS = (0.3, 1.0, 3.0)  # seconds of computing for each second of copying all that can stream
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the weights that there is room for beside the ring
RING_GROUPS = 5  # of the largest: the room for the ring
_ROW, _ENCODING = 0.6, 1.2  # seconds that they take about for each GB of weights
_STAND_INS = {("MOEFeedForwardSwiGLU", "moe_infer"): any_routing}  # which looks at values


@dataclass(frozen=True)
class Regime:
    """A balance of computing and copying. Seconds, bytes per second."""

    tokens: int
    bandwidth: float
    compute: float
    allocations: int  # of a resident step


def measure(to: Run) -> None:
    """Add a row for each kind of weights, each ratio of computing to copying, resident and with each share."""
    request, meter = to.request, to.meter()
    module = models.build(request["size"])
    devices = [torch.device("cpu"), *([] if meter.is_sim or meter.device.type == "cpu" else [meter.device])]
    overhead = {on.type: round(python_overhead(on, 20 if to.dry else 200) * 1e6, 1) for on in devices}
    to.tell(weight_bytes=models.weight_bytes(module), overhead_us_per_group=overhead)
    gigabytes = models.weight_bytes(module) / 2**30
    truths: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        balances = regimes(meter, module, request["size"], tuple(request["ratios"]))
    for weights in request["weights"]:
        if not to.attempt(f"encoding as {weights}", _ENCODING * gigabytes, _encoded, module, weights):
            continue
        for regime in balances:
            for share in (None, *request["shares"]):
                what = f"{weights}, {regime.tokens} tokens, {'resident' if share is None else f'{share:.0%}'}"
                row = to.attempt(what, _ROW * gigabytes, _row, to, meter, module, regime, share, truths)
                if row:
                    to.row(weights=weights, **row)
                elif share is None:
                    break
                if row and share is None:  # decoding included, where these weights are encoded
                    regime = dataclasses.replace(regime, compute=row["step"])


@torch.no_grad()
def _encoded(module: nn.Module, weights: str) -> bool:
    if weights != "auto":
        encode(module, weights)
    return True


def regimes(meter: Meter, module: nn.Module, size: str, ratios: Sequence[float]) -> list[Regime]:
    """Return loads for the ratios: by the number of tokens, or by the bandwidth of a simulated card.

    The module must be on the CPU, and fit on the device as a whole.
    """
    streamable = sum(group.packed_bytes for group in sizes_in(module).groups)
    bandwidth = meter.bandwidth()
    with placed(Engine(module, meter.device), meter):
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


@contextmanager
def placed(placement: Engine, meter: Meter) -> Iterator[None]:
    """Have the module on the device meanwhile, then on the CPU again."""
    undo = place(placement)
    try:
        yield
    finally:
        for hook in undo:
            hook.remove()
        placement.remove()
        meter.accelerator.empty_cache()


def place(placement: Engine) -> list[Any]:
    """Place a module, with what the manager does before and after each call. Returns the hooks that do that."""
    placement.place()
    before = placement.module.register_forward_pre_hook(lambda *_: placement.complete())
    return [before, placement.module.register_forward_hook(lambda *_: placement.end_call(), always_call=True)]


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


@torch.inference_mode()
def _row(
    to: Run, meter: Meter, module: nn.Module, regime: Regime, share: float | None, truths: dict[int, torch.Tensor]
) -> dict[str, Any]:
    """Return the row of a share, or of the resident module. `truths` are the resident results by the tokens.

    Seconds, bytes. The module must be on the CPU, and is there afterwards. The median of the steps counts, beside those
    that begin.
    """
    size, steps = to.request["size"], 2 if to.dry else 5
    if meter.is_sim:
        set_sim_bandwidth(regime.bandwidth)
    idle_bytes, step = meter.used_bytes(), models.inputs(size, regime.tokens, meter.device)
    sizes = sizes_in(module, forecast(size, regime.tokens).call_order)
    placement, predicted = Engine(module, meter.device), None
    if share is not None:
        placement, predicted = streamed(module, size, regime, meter.device, budget(sizes, share))
    streamed_bytes = placement.layout.copied_bytes if share is not None else 0
    with placed(placement, meter):
        meter.accelerator.take_peak_bytes()
        (first,) = meter.steps(lambda: module(**step), 1)
        placement.take_bytes_in()
        allocated = simulated.stats().allocation_count if meter.is_sim else 0
        seconds = meter.steady(lambda: module(**step), steps, settle=2)
        copied_bytes, allocations = placement.take_bytes_in() // (steps + 2), None
        if meter.is_sim:
            allocations = (simulated.stats().allocation_count - allocated) // (steps + 2) - regime.allocations
        peak_bytes = meter.accelerator.take_peak_bytes()
        if regime.tokens not in truths:
            truths[regime.tokens] = module(**step)[0].cpu()
        with meter.driver_peak() as used:
            is_equal = torch.equal(module(**step)[0].cpu(), truths[regime.tokens])
    compute = seconds if share is None else regime.compute
    bound = max(compute, streamed_bytes / regime.bandwidth)
    whole = sum(group.packed_bytes for group in sizes.groups) / regime.bandwidth
    return {
        "ratio": compute / whole, "share": share, "tokens": regime.tokens, "bandwidth": regime.bandwidth,
        "compute": compute, "streamed_bytes": streamed_bytes, "first_step": first, "step": seconds,
        "predicted": seconds if share is None else predicted, "bound": bound, "over_bound": seconds / bound,
        "peak_bytes": peak_bytes, "copied_bytes": copied_bytes, "engine_allocations": allocations,
        "is_equal": is_equal, "driver_bytes": used.over(idle_bytes),
    }  # fmt: skip


def python_overhead(device: torch.device, calls: int = 200, count: int = 32) -> float:
    """Seconds of real time that the engine adds to each group's call: streamed against resident, medians.

    The groups are so small that a call of one is all Python.
    """
    module: nn.Module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))).requires_grad_(False)
    x, meter, medians = torch.ones(1, 8).to(device), Meter(device), []
    with torch.inference_mode():
        for placement in (Engine(module, device), Engine(module, device, streamed_layout(module))):
            placement.place()
            taken = []
            for _ in range(calls):
                meter.accelerator.synchronize()
                start = time.perf_counter()
                module(x)
                # The host's time: the device may still be at work.
                taken.append(time.perf_counter() - start)
            placement.remove()
            medians.append(statistics.median(taken))
    return (medians[1] - medians[0]) / count
