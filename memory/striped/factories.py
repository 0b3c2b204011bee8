"""Large tensors that are made from no striped one, built lazily: masks of all positions, and maps to be filled."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .arena import Buffer, StripeMemory, stand_in
from .lazy_tensor import materialized_tensor
from .striped_tensor import StripedTensor

_LARGE = 2**20  # elements
_LEAST_DIMS = 4  # of a map: [B,C,H,W] or [B,C,F,H,W]
_VALUES = {torch.empty: 0.0, torch.zeros: 0.0, torch.ones: 1.0}


class LargeFactories(TorchFunctionMode):
    """A mode in which tensors of 2**20 elements or more that a module makes out of nothing are striped tensors.

    Video VAEs mask their attention to earlier frames by comparing the two grids of `torch.meshgrid`: a real mask of all
    positions by all positions takes more memory than all of their feature maps. Others write frame after frame into a
    map of `torch.empty`.
    """

    def __init__(self, arena: StripeMemory) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _VALUES and "out" not in kwargs and (made := self._blank(_VALUES[func], args, kwargs)) is not None:
            return made
        result = func(*args, **kwargs)
        if func is not torch.meshgrid or len(result) != 2 or result[0].numel() < _LARGE:
            return result
        if any(isinstance(grid, StripedTensor) or grid.device != self._arena.device for grid in result):
            return result
        return [self._striped(grid, grid[0], 0) for grid in result]  # expanded views: a grid takes the memory of a line

    def _blank(self, value: float, args: tuple, kwargs: dict[str, Any]) -> StripedTensor | None:
        """Return a map of one value on the run's device, or None for any other tensor."""
        shape = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
        facts = stand_in(tuple(shape), kwargs.get("dtype") or torch.get_default_dtype())
        device = kwargs.get("device")
        on_device = device is not None and torch.empty(0, device=device).device == self._arena.device
        if facts.dim() < _LEAST_DIMS or facts.numel() < _LARGE or not on_device or not facts.is_floating_point():
            return None
        one = torch.full([1] * facts.dim(), value, dtype=facts.dtype, device=self._arena.device)
        return self._striped(one.expand(facts.shape), one, facts.dim() - 2)

    def _striped(self, tensor: torch.Tensor, held: torch.Tensor, axis: int) -> StripedTensor:
        return StripedTensor(materialized_tensor(self._arena, tensor, axis, Buffer(self._arena, held, True)))
