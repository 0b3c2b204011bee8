"""Functions that give the same elements other dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .arena import Buffer, stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import Local, Map, kept_map
from .materialize import keep


@handles("view", "reshape", "unflatten", "flatten", "view_as", "reshape_as")
def _reshaped(function: Any, x: Map, *args: Any, **kwargs: Any) -> Map:
    if isinstance(args[0] if args else None, torch.dtype):
        raise NotStripedError
    shape = function(stand_in(x.shape, x.dtype), *args, **kwargs).shape
    return reshaped(x, shape)


def reshaped(x: Map, shape: Sequence[int]) -> Map:
    """Return the same elements in the same order. Raises NotStripedError where rows would be torn."""
    if 0 in shape:  # as of the frames behind the first, where there are none
        raise NotStripedError
    before, inside = math.prod(x.shape[: x.axis]), math.prod(x.shape[x.axis + 1 :])
    axis = next((at for at in range(len(shape) - 1, -1, -1) if math.prod(shape[:at]) == before and shape[at] > 1), None)
    if axis is None:  # nothing but rows of one element, or rows that are not the outermost of what they end up in
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

    x_axis, kept = x.axis, x.kept
    if kept is not None and x.buffer is not None and _is_view(kept, shape):
        return kept_map(x.room, kept.view(*shape), axis, x.buffer)
    return Local(x.room, shape, x.dtype, axis, (x,), lambda rows: change(rows.pop()), ratio)


def _is_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    try:
        tensor.view(*shape)
    except RuntimeError:
        return False
    return True


def _torn(x: Map, shape: Sequence[int]) -> Map:
    """Rows would not stay together: the map is kept, and cut another way from there."""
    keep(x, as_one=True)
    assert x.kept is not None
    assert x.buffer is not None
    axis = max(range(len(shape)), key=lambda at: shape[at])
    if _is_view(x.kept, shape):
        return kept_map(x.room, x.kept.view(*shape), axis, x.buffer)
    copied = x.kept.reshape(*shape)
    return kept_map(x.room, copied, axis, Buffer(x.room, copied, x.buffer.on_device))


@handles("pixel_shuffle")
def _shuffled(function: Any, input: Map, upscale_factor: int) -> Map:
    _is_image(input)
    return local(function, (input, upscale_factor), {}, input.axis, (upscale_factor, 1))


@handles("pixel_unshuffle")
def _unshuffled(function: Any, input: Map, downscale_factor: int) -> Map:
    _is_image(input)
    return local(function, (input, downscale_factor), {}, input.axis, (1, downscale_factor))


def _is_image(x: Map) -> None:
    if x.axis != len(x.shape) - 2:
        raise NotStripedError
