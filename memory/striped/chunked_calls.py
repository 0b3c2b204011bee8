"""The registry of handlers for calls of torch's functions on lazy tensors, and the helpers that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .arena import Buffer, stand_in
from .lazy_tensor import LazyTensor, Local, materialized_tensor
from .materialize import recut

Handler = Callable[..., Any]
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType)
handlers: dict[str, Handler] = {}  # by the function's name, the same for torch's own and a tensor's method


class NotStripedError(Exception):
    """A call cannot be made stripe by stripe. It is then made on whole, real tensors."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a handler for torch's functions of these names.

    The handler is called with torch's function and then its arguments, with a `LazyTensor` for each `StripedTensor`. It
    returns a `LazyTensor`, several in a list or tuple, or any other value. It raises NotStripedError if it cannot.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            handlers[name] = handler
        return handler

    return register


def shape_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a `meta` tensor with the shape and dtype of a call's result. Raises NotStripedError if it is no tensor."""
    return _shape_of(function, *tree_flatten((tuple(args), dict(kwargs))))


def _shape_of(function: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec) -> torch.Tensor:
    kinds = tuple(
        (torch.Tensor, (tuple(x.shape), x.dtype)) if isinstance(x, LazyTensor | torch.Tensor) else (type(x), x)
        for x in leaves
    )
    try:
        holds_nothing = type(function) in _FUNCTIONS and not getattr(function, "__closure__", None) and hash(kinds)
    except TypeError:  # a slice
        holds_nothing = False
    made = _made if holds_nothing else _made.__wrapped__
    result = made(function, structure, kinds, torch.get_default_dtype())
    if not isinstance(result, torch.Tensor):
        raise NotStripedError
    return result


@functools.lru_cache(maxsize=2**12)
def _made(function: Callable[..., Any], structure: TreeSpec, kinds: Sequence[tuple], _: torch.dtype) -> Any:
    """Return the result of a call on `meta`: of a shape and dtype for each tensor, and a value for any other leaf."""
    args, kwargs = tree_unflatten([stand_in(*x) if kind is torch.Tensor else x for kind, x in kinds], structure)
    return function(*args, **kwargs)


def local(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axis: int | None = None,
    ratio: tuple[int, int] = (1, 1),
    operations: int = 0,
) -> LazyTensor:
    """Return the lazy result of a call that makes each row from the same row of each lazy tensor among its arguments.

    `axis` is the dimension of the rows in the result. By default it is that of the arguments, counted from the right as
    in broadcasting; real tensors with as many rows are then cut into stripes as well. `ratio` is that of `Local`.
    Raises NotStripedError if arguments have different numbers of rows.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    nodes = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
    arena, likeness = nodes[0].arena, _shape_of(function, leaves, structure)
    if axis is None:
        largest = max(nodes, key=lambda one: one.nbytes)
        behind = largest.axis - len(largest.shape)
        axis = likeness.dim() + behind
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, LazyTensor) and leaf.axis - len(leaf.shape) != behind and len(leaf.shape) + behind >= 0:
                leaves[index] = recut(leaf, len(leaf.shape) + behind)
        rows = likeness.shape[axis]
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= likeness.dim() - axis > 0 and rows > 1:
                at = leaf.dim() - likeness.dim() + axis
                if leaf.shape[at] == rows:
                    leaves[index] = materialized_tensor(arena, leaf, at, Buffer(arena, leaf, True))
        if any(isinstance(leaf, LazyTensor) and leaf.length != rows for leaf in leaves):
            raise NotStripedError
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, LazyTensor)]
    inputs = [leaves[index] for index in places]
    rest = [None if isinstance(leaf, LazyTensor) else leaf for leaf in leaves]

    def make(stripes: list[torch.Tensor]) -> torch.Tensor:
        filled = list(rest)
        for index, stripe in zip(places, stripes, strict=True):
            filled[index] = stripe
        stripes.clear()
        stripe_args, stripe_kwargs = tree_unflatten(filled, structure)
        return function(*stripe_args, **stripe_kwargs)

    return Local(arena, likeness.shape, likeness.dtype, axis, inputs, make, ratio, operations)
