"""Runs a function on striped tensors, and leaves nothing behind."""

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
from ..simulated import card as state
from .arena import Room
from .grids import LargeGrids
from .materialize import settle, to_host
from .striped_tensor import StripedTensor, striped


@dataclass
class Traffic:
    """The costs of a run beside the device: the most RAM for maps, and bytes to the device and from it.

    `operations` only in a dry run, and so those of `passes`, which came one after the other.
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
    """Return what `function(*tensors)` returns, with every tensor in it on the CPU.

    `tensors` are [..., H, W] of at least 3 dimensions, on the CPU or the device; what they lead to is made in stripes
    of rows. The weights that `function` uses lie on `device`. `budget_bytes` is for feature maps and what making them
    takes, beside the weights: what exceeds it lies in RAM, at most `ram_bytes` of it, else OutOfRamError. Less than a
    few rows need is exceeded. A stripe that the device has no memory for is made again, lower: an out-of-memory error
    means that not even a row fits. Afterwards nothing of the run is left there, also after an error.

    What a device does in the time that a byte takes to come, `operations_per_byte`, tells which maps are made again
    rather than moved. A dry run of `every` stripe takes as long on its card's clock as the run will.

    `traffic` is filled in. `on_stripe` is called before each stripe, and what it raises ends the run.
    """
    found = torch.empty(0, device=device).device
    fuses = state.card.fuses if found.type == "meta" else Accelerator(found).fuses
    room = Room(found, budget_bytes, settle, ram_bytes, on_stripe, operations_per_byte, every, fuses)
    try:
        with torch.inference_mode(), LargeGrids(room):
            result = function(*(striped(tensor, room) for tensor in tensors))
            return tree_map_only(torch.Tensor, _to_host, result)
    except BaseException as error:
        release_frames(error)
        raise
    finally:
        room.finish()
        if traffic is not None:
            traffic.host_peak_bytes = max(traffic.host_peak_bytes, room.host_peak_bytes)
            traffic.h2d_bytes += room.h2d_bytes
            traffic.d2h_bytes += room.d2h_bytes
            traffic.operations += room.operations()
            traffic.passes += room.passes


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return to_host(tensor.node) if isinstance(tensor, StripedTensor) else tensor.cpu()
