"""Masks of all places by all places, which need not exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .arena import Buffer, Room
from .lazy_tensor import kept_map
from .striped_tensor import StripedTensor

_LARGE = 2**20  # places


class LargeGrids(TorchFunctionMode):
    """While this is entered, the large grids that `torch.meshgrid` makes are striped tensors, and what is made of them.

    Video VAEs attend to the frames before by a mask of all by all, which takes more than all of their maps.
    """

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.meshgrid or len(result) != 2 or result[0].numel() < _LARGE:
            return result
        if any(isinstance(grid, StripedTensor) or grid.device != self._room.device for grid in result):
            return result
        return [  # views of a line, which is all that they take
            StripedTensor(kept_map(self._room, grid, 0, Buffer(self._room, grid[0], True))) for grid in result
        ]
