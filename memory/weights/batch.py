"""Splitting a call of a transformer by its batch: the two passes of classifier-free guidance, one after the other.

An out-of-memory fallback of `stage`: activations of one part are smaller than those of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

BatchDims = Mapping[str, int]  # argument name -> its batch dimension, where that is not the first


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims) -> int:
    """Return the batch of a call; 1 if it is not clear for each argument which part of the batch takes it.

    `dims` names arguments whose batch is not their first dimension.
    """
    named = _named(args, kwargs)
    sizes = [value.shape[0] for value in named.values() if isinstance(value, torch.Tensor) and value.ndim > 2]
    lists = [len(value) for value in named.values() if _is_batch_list(value)]
    batch = (sizes + lists)[0] if sizes + lists else 1
    return batch if all(name in dims or _is_clear(value, batch) for name, value in named.items()) else 1


def _is_clear(value: Any, batch: int) -> bool:
    """Return whether a value is clearly for the whole batch, or clearly divided along its first dimension."""
    if isinstance(value, torch.Tensor):
        return value.ndim < 3 or value.shape[0] in (1, batch)
    if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        # One tensor for each member of the batch, not one for each layer with a batch dimension.
        return len(value) == batch and all(item.shape[:1] != (batch,) for item in value)
    if isinstance(value, dict):
        return all(_is_clear(item, batch) for item in value.values())
    return not (
        isinstance(value, tuple) and any(isinstance(i, torch.Tensor) and i.shape[:1] == (batch,) for i in value)
    )


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors in the arguments of a call."""
    return tuple(tuple(value.shape) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))


def in_parts(args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims, parts: int) -> list[tuple[list, dict]]:
    """Return the arguments of each of `parts` calls, which together make the batch."""
    batch = batch_of(args, kwargs, dims)
    bounds = [batch * i // parts for i in range(parts + 1)]
    made = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        part = slice(begin, end)
        made.append(
            (
                [_part(value, 0, batch, part) for value in args],
                {name: _part(value, dims.get(name, 0), batch, part) for name, value in kwargs.items()},
            )
        )
    return made


def joined(results: Sequence[Any]) -> Any:
    """Return the result of the whole call from the results of its parts."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(results))
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, tuple):
        items = [joined(items) for items in zip(*results, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if dataclasses.is_dataclass(first) and isinstance(first, Mapping):  # the output classes of diffusers, transformers
        return type(first)(**{key: joined([result[key] for result in results]) for key in first})
    return first


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {str(i): value for i, value in enumerate(args)} | dict(kwargs)


def _is_batch_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def _part(value: Any, dim: int, batch: int, part: slice) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim <= dim or value.shape[dim] != batch:
            return value
        return value.narrow(dim, part.start, part.stop - part.start)
    if isinstance(value, dict):
        return {name: _part(item, 0, batch, part) for name, item in value.items()}
    if isinstance(value, list) and len(value) == batch and not all(isinstance(item, int | float) for item in value):
        return value[part]
    return value
