"""Large attention masks (all positions by all positions), built lazily from `torch.meshgrid`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .arena import Buffer, StripeMemory
from .lazy_tensor import materialized_tensor
from .striped_tensor import StripedTensor

_LARGE = 2**20  # elements of a grid


class LargeGrids(TorchFunctionMode):
    """A mode in which two grids of `torch.meshgrid` with 2**20 elements or more are striped tensors.

    Video VAEs mask their attention to earlier frames by comparing such grids. A real mask of all positions by all
    positions takes more memory than all of their feature maps.
    """

    def __init__(self, arena: StripeMemory) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.meshgrid or len(result) != 2 or result[0].numel() < _LARGE:
            return result
        if any(isinstance(grid, StripedTensor) or grid.device != self._arena.device for grid in result):
            return result
        return [  # expanded views: a grid takes the memory of one line
            StripedTensor(materialized_tensor(self._arena, grid, 0, Buffer(self._arena, grid[0], True)))
            for grid in result
        ]
