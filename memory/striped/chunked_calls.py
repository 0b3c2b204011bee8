"""Calls of torch's functions on maps: what a handler is given, and what it may ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .arena import Buffer, stand_in
from .lazy_tensor import Local, Map, kept_map
from .materialize import recut

Handler = Callable[..., Any]
handlers: dict[str, Handler] = {}  # by a function's name, whether it is torch's own or a tensor's method


class NotStripedError(Exception):
    """A call cannot be made stripe by stripe; it is then made on the whole maps."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator: the function answers calls of torch's functions of these names.

    It is called as that function is, with the function itself before the arguments and a Map for each map, and
    returns a Map, several in a list or tuple, or anything else as it is. It raises NotStripedError where it cannot.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            handlers[name] = handler
        return handler

    return register


def shape_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor of the shape and dtype that a call gives, found without making it."""
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    shapes = [stand_in(x.shape, x.dtype) if isinstance(x, Map | torch.Tensor) else x for x in leaves]
    stand_args, stand_kwargs = tree_unflatten(shapes, structure)
    result = function(*stand_args, **stand_kwargs)
    if not isinstance(result, torch.Tensor):
        raise NotStripedError
    return result


def local(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axis: int | None = None,
    ratio: tuple[int, int] = (1, 1),
    operations: int = 0,
) -> Map:
    """Return the map of a call that makes each row from the same row of each map among its arguments.

    `axis` is where the rows lie in the result; by default where they lie in the arguments, counted from the right as
    tensors are broadcast. Tensors among the arguments that have a row for each are cut as well.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    maps = [leaf for leaf in leaves if isinstance(leaf, Map)]
    room, likeness = maps[0].room, shape_of(function, args, kwargs)
    if axis is None:
        largest = max(maps, key=lambda one: one.nbytes)
        behind = largest.axis - len(largest.shape)
        axis = likeness.dim() + behind
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Map) and leaf.axis - len(leaf.shape) != behind and len(leaf.shape) + behind >= 0:
                leaves[index] = recut(leaf, len(leaf.shape) + behind)
        rows = likeness.shape[axis]
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= likeness.dim() - axis > 0 and rows > 1:
                at = leaf.dim() - likeness.dim() + axis
                if leaf.shape[at] == rows:
                    leaves[index] = kept_map(room, leaf, at, Buffer(room, leaf, True))
        if any(isinstance(leaf, Map) and leaf.length != rows for leaf in leaves):
            raise NotStripedError
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Map)]
    inputs = [leaves[index] for index in places]
    rest = [None if isinstance(leaf, Map) else leaf for leaf in leaves]

    def make(stripes: list[torch.Tensor]) -> torch.Tensor:
        filled = list(rest)
        for index, stripe in zip(places, stripes, strict=True):
            filled[index] = stripe
        stripes.clear()
        stripe_args, stripe_kwargs = tree_unflatten(filled, structure)
        return function(*stripe_args, **stripe_kwargs)

    return Local(room, likeness.shape, likeness.dtype, axis, inputs, make, ratio, operations)
