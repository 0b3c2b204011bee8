"""Forecast a run in stripes by a dry run on shapes, without a device, weights or RAM for feature maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..planning.dry_run import lay_weights
from ..planning.stripes import Pass, seconds
from ..rates import ASSUMED, Rates
from ..simulated.attention import Fuses
from ..simulated.dry import DEVICE, dry_card
from .run import Traffic, run


@dataclass(frozen=True)
class StripedForecast:
    """Bytes and operations of a run in stripes.

    `peak_bytes` is the peak on the device beside the weights, `host_peak_bytes` the peak of feature maps in RAM beside
    the result of `result_bytes`. `h2d_bytes` and `d2h_bytes` are copied to the device and from it. `operations` are
    those of convolutions and products.
    """

    peak_bytes: int
    host_peak_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    operations: float
    result_bytes: int = 0
    passes: tuple[Pass, ...] = ()

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of the run. In a pass, copies each way and computing in float32 overlap."""
        return seconds(self.passes, rates.float32_operations_per_second, rates.pinned_bytes_per_second)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StripedForecast:
        """Return the forecast of plain data from a file. Raises KeyError, TypeError or ValueError for anything else."""
        passes = tuple(Pass(**one) for one in data["passes"])
        numbers = {key: value for key, value in data.items() if key != "passes"}
        told = [*numbers.values(), *(number for one in passes for number in astuple(one))]
        if not all(type(number) in (int, float) and 0 <= number < math.inf for number in told):
            raise ValueError("there are facts that are not numbers from 0 up")
        return cls(**numbers, passes=passes)


def forecast(
    module: nn.Module,
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    budget_bytes: int,
    operations_per_byte: float = ASSUMED.operations_per_byte,
    fuses: Fuses | None = None,
) -> tuple[StripedForecast, Any]:
    """Dry-run `run(function, *tensors)`. Return its forecast, and a result of the right shapes and dtypes.

    `module` is the structure whose weights `function` uses, with parameters on `meta`. It is modified and cannot be
    used afterwards. `tensors` are on the CPU; their values do not matter. `fuses` tells which attention calls have a
    fused kernel on the real device, by default all. Raises RuntimeError if `function` depends on values.
    """
    with torch.inference_mode(), dry_card(fuses) as card:
        lay_weights(module, card)
        traffic = Traffic()
        result = run(
            function,
            *tensors,
            device=DEVICE,
            budget_bytes=budget_bytes,
            traffic=traffic,
            operations_per_byte=operations_per_byte,
        )
        peak = card.peak_bytes()
    made = sum(each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor))
    moved = traffic.h2d_bytes, traffic.d2h_bytes
    return StripedForecast(
        peak, traffic.host_peak_bytes, *moved, traffic.operations, made, tuple(traffic.passes)
    ), result
