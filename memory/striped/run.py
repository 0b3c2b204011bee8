"""Run a function on striped tensors, and leave nothing on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..accelerator import Accelerator
from ..errors import release_frames
from ..planning.stripes import Pass
from ..rates import ASSUMED
from ..simulated.card import current_card
from .arena import StripeMemory
from .factories import LargeFactories
from .materialize import settle, to_host
from .striped_tensor import StripedTensor, striped


@dataclass
class Traffic:
    """Counters of one or more runs: peak RAM for feature maps, bytes copied each way, and the passes in order.

    `operations`, also those of `passes`, are counted in a dry run only.
    """

    host_peak_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    operations: float = 0.0
    passes: list[Pass] = field(default_factory=list)


def run(
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    device: str | torch.device,
    budget_bytes: int,
    ram_bytes: int | None = None,
    traffic: Traffic | None = None,
    on_stripe: Callable[[], None] | None = None,
    operations_per_byte: float = ASSUMED.operations_per_byte,
    every: bool = False,
) -> Any:
    """Return the result of `function(*tensors)`, with every tensor in it on the CPU.

    `tensors` are [..., H, W] of at least 3 dimensions, on the CPU or the device. Tensors computed from them are made in
    stripes of rows. The weights that `function` uses lie on `device`. For exactness see [Note: Stripe exactness] in
    `lazy_tensor`.

    `budget_bytes` of device memory are for feature maps and the work on them, beside the weights. A budget below what
    a few rows need is exceeded. Feature maps beyond it lie in RAM, in at most `ram_bytes` (None: no limit). A stripe
    that the device has no memory for is made again, lower. Nothing of the run stays on the device, after an error
    either.

    `operations_per_byte` is the number of operations that the device does while one byte crosses the bus. It decides
    which tensors are made again rather than moved. `every` makes a dry run go through all stripes, so that its clock
    tells the time of the run. `traffic` is added to. `on_stripe` is called before each stripe.

    Raises OutOfRamError beyond `ram_bytes`, torch.OutOfMemoryError if not even one row fits on the device, and what
    `function` or `on_stripe` raises.
    """
    found = torch.empty(0, device=device).device
    fuses = current_card().fuses if found.type == "meta" else Accelerator(found).fuses
    arena = StripeMemory(found, budget_bytes, settle, ram_bytes, on_stripe, operations_per_byte, every, fuses)
    try:
        with torch.inference_mode():
            with LargeFactories(arena):
                result = function(*(striped(tensor, arena) for tensor in tensors))
            return tree_map_only(torch.Tensor, _to_host, result)
    except BaseException as error:
        release_frames(error)
        raise
    finally:
        arena.finish()
        if traffic is not None:
            traffic.host_peak_bytes = max(traffic.host_peak_bytes, arena.host_peak_bytes)
            traffic.h2d_bytes += arena.h2d_bytes
            traffic.d2h_bytes += arena.d2h_bytes
            traffic.operations += arena.operations()
            traffic.passes += arena.passes


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return to_host(tensor.node) if isinstance(tensor, StripedTensor) else tensor.cpu()
