"""Handlers of functions that give the same elements other dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .arena import Buffer, stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import LazyTensor, Local, materialized_tensor
from .materialize import materialize


@handles("view", "reshape", "unflatten", "flatten", "view_as", "reshape_as")
def _reshaped(function: Any, x: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    if isinstance(args[0] if args else None, torch.dtype):
        raise NotStripedError
    shape = function(stand_in(x.shape, x.dtype), *args, **kwargs).shape
    return reshaped(x, shape)


def reshaped(x: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """Return the same elements in the same order in another shape.

    If rows would not stay whole, the tensor is materialized. Raises NotStripedError for a shape without elements.
    """
    if 0 in shape:  # such as the frames after the first of a video of one frame
        raise NotStripedError
    before, inside = math.prod(x.shape[: x.axis]), math.prod(x.shape[x.axis + 1 :])
    axis = next((at for at in range(len(shape) - 1, -1, -1) if math.prod(shape[:at]) == before and shape[at] > 1), None)
    if axis is None:  # rows of one element, or rows that become an inner dimension
        axis = next((at for at in range(len(shape)) if math.prod(shape[:at]) == before and shape[at] == x.length), -1)
    if axis < 0:
        return _torn(x, shape)
    wide = math.prod(shape[axis + 1 :])
    if inside % wide == 0:
        ratio = (inside // wide, 1)
    elif wide % inside == 0:
        ratio = (1, wide // inside)
    else:
        return _torn(x, shape)
    front, back = list(shape[:axis]), list(shape[axis + 1 :])

    def change(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*front, rows.shape[x_axis] * ratio[0] // ratio[1], *back)

    x_axis, materialized = x.axis, x.materialized
    if materialized is not None and x.buffer is not None and _is_view(materialized, shape):
        return materialized_tensor(x.arena, materialized.view(*shape), axis, x.buffer)
    return Local(x.arena, shape, x.dtype, axis, (x,), lambda rows: change(rows.pop()), ratio)


def _is_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    try:
        tensor.view(*shape)
    except RuntimeError:
        return False
    return True


def _torn(x: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """Materialize a tensor whose rows do not stay whole, and cut it along the longest dimension of the new shape."""
    materialize(x, as_one=True)
    assert x.materialized is not None
    assert x.buffer is not None
    axis = max(range(len(shape)), key=lambda at: shape[at])
    if _is_view(x.materialized, shape):
        return materialized_tensor(x.arena, x.materialized.view(*shape), axis, x.buffer)
    copied = x.materialized.reshape(*shape)
    return materialized_tensor(x.arena, copied, axis, Buffer(x.arena, copied, x.buffer.on_device))


@handles("pixel_shuffle")
def _shuffled(function: Any, input: LazyTensor, upscale_factor: int) -> LazyTensor:
    _is_image(input)
    return local(function, (input, upscale_factor), {}, input.axis, (upscale_factor, 1))


@handles("pixel_unshuffle")
def _unshuffled(function: Any, input: LazyTensor, downscale_factor: int) -> LazyTensor:
    _is_image(input)
    return local(function, (input, downscale_factor), {}, input.axis, (1, downscale_factor))


def _is_image(x: LazyTensor) -> None:
    if x.axis != len(x.shape) - 2:
        raise NotStripedError
