"""Handlers of functions that only rearrange elements: permutations, slices, stacks, and assignment to slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arena import Buffer, stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import LazyTensor, Local, materialized_tensor
from .materialize import materialize
from .pointwise import Joined, joined


def _view(node: LazyTensor, change: Callable[[torch.Tensor], torch.Tensor], axis: int) -> LazyTensor:
    """Return a view whose rows are the rows of `node`. For a materialized tensor it is a view of its memory."""
    if node.materialized is not None and node.buffer is not None:
        return materialized_tensor(node.arena, change(node.materialized), axis, node.buffer)
    shape = change(stand_in(node.shape, node.dtype)).shape
    return Local(node.arena, shape, node.dtype, axis, (node,), lambda rows: change(rows.pop()), shares=True)


def _dim(node: LazyTensor, dim: int, more: int = 0) -> int:
    return dim % (len(node.shape) + more)


@handles("permute")
def permuted(function: Any, x: LazyTensor, *dims: Any) -> LazyTensor:
    order = [_dim(x, dim) for dim in (dims[0] if isinstance(dims[0], list | tuple) else dims)]
    return _view(x, lambda rows: rows.permute(order), order.index(x.axis))


@handles("transpose", "swapaxes", "swapdims")
def _transposed(function: Any, x: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(len(x.shape)))
    one, other = _dim(x, dim0), _dim(x, dim1)
    order[one], order[other] = order[other], order[one]
    return permuted(function, x, order)


@handles("movedim", "moveaxis")
def _moved(function: Any, x: LazyTensor, source: Any, destination: Any) -> LazyTensor:
    ranks = stand_in(tuple(range(2, len(x.shape) + 2)), x.dtype).movedim(source, destination).shape
    return permuted(function, x, [rank - 2 for rank in ranks])


@handles("unsqueeze")
def unsqueezed(function: Any, x: LazyTensor, dim: int) -> LazyTensor:
    at = _dim(x, dim, 1)
    return _view(x, lambda rows: rows.unsqueeze(at), x.axis + (at <= x.axis))


@handles("squeeze")
def squeezed(function: Any, x: LazyTensor, dim: Any = None) -> LazyTensor:
    if dim is None or not isinstance(dim, int) or _dim(x, dim) == x.axis:
        raise NotStripedError
    at = _dim(x, dim)
    return _view(x, lambda rows: rows.squeeze(at), x.axis - (at < x.axis)) if x.shape[at] == 1 else x


@handles("expand")
def _expanded(function: Any, x: LazyTensor, *sizes: Any) -> LazyTensor:
    wanted = sizes[0] if isinstance(sizes[0], list | tuple | torch.Size) else sizes
    axis = x.axis + len(wanted) - len(x.shape)
    if wanted[axis] not in (-1, x.length):
        raise NotStripedError
    of_rows = [*wanted[:axis], -1, *wanted[axis + 1 :]]
    return _view(x, lambda rows: rows.expand(of_rows), axis)


# Slices


def narrowed(x: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    """Return the slice `start` to `start + length` of a dimension. It may be that of the rows."""
    if length == x.shape[dim]:
        return x
    if dim == x.axis:
        return _of_rows(x, start, length)
    if isinstance(x, Joined) and x.memory is None and x.dim == dim:
        return _of_parts(x, start, length)
    if x.heavy:
        materialize(x)  # other slices will be read too, and must not make all channels each time
    made = _view(x, lambda rows: rows.narrow(dim, start, length), x.axis)
    if x.statistics is not None and dim < x.axis:
        made.statistics = x.statistics.narrow(dim, start, length)
    return made


def _of_rows(x: LazyTensor, start: int, length: int) -> LazyTensor:
    if x.materialized is None:
        materialize(x, as_one=True)
    assert x.materialized is not None
    assert x.buffer is not None
    return materialized_tensor(x.arena, x.materialized.narrow(x.axis, start, length), x.axis, x.buffer)


def _of_parts(x: Joined, start: int, length: int) -> LazyTensor:
    parts, stop = [], start + length
    at = 0
    for part in x.parts:
        low, high = max(start, at), min(stop, at + part.shape[x.dim])
        if low < high:
            cut = narrowed if isinstance(part, LazyTensor) else torch.narrow
            parts.append(cut(part, x.dim, low - at, high - low))  # type: ignore[operator]
        at += part.shape[x.dim]
    if any(isinstance(part, LazyTensor) for part in parts):
        return joined(parts, x.dim)
    raise NotStripedError


@handles("narrow")
def _narrow(function: Any, x: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    at = _dim(x, dim)
    return narrowed(x, at, start % x.shape[at] if start < 0 else start, length)


@handles("select")
def selected(function: Any, x: LazyTensor, dim: int, index: int) -> LazyTensor:
    at = _dim(x, dim)
    if at == x.axis:
        raise NotStripedError
    part = narrowed(x, at, index % x.shape[at], 1)
    made = squeezed(function, part, at)
    if part.statistics is not None and at < x.axis:
        made.statistics = part.statistics.squeeze(at)
    return made


@handles("split", "split_with_sizes")
def _split(function: Any, x: LazyTensor, sizes: Any, dim: int = 0) -> tuple[LazyTensor, ...]:
    at = _dim(x, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[at] - start) for start in range(0, x.shape[at], sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(narrowed(x, at, start, size) for start, size in zip(starts, sizes, strict=True))


@handles("chunk", "tensor_split")
def _chunk(function: Any, x: LazyTensor, chunks: Any, dim: int = 0) -> tuple[LazyTensor, ...]:
    at = _dim(x, dim)
    parts = function(stand_in((x.shape[at],), x.dtype), chunks)
    return _split(function, x, [len(part) for part in parts], at)


@handles("unbind")
def _unbound(function: Any, x: LazyTensor, dim: int = 0) -> tuple[LazyTensor, ...]:
    return tuple(selected(function, x, dim, index) for index in range(x.shape[_dim(x, dim)]))


@handles("stack")
def _stacked(function: Any, tensors: Sequence[LazyTensor], dim: int = 0, **kwargs: Any) -> LazyTensor:
    at = _dim(tensors[0], dim, 1)
    return joined([unsqueezed(function, one, at) for one in tensors], at)


def _indices(x: LazyTensor, index: Any) -> list[Any]:
    """Return an index for each dimension, and None for each new one. Raises NotStripedError for tensors and lists."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, int | slice)) for item in items):
        raise NotStripedError
    if any(isinstance(item, bool) for item in items):
        raise NotStripedError
    missing = len(x.shape) - sum(item is not None and item is not Ellipsis for item in items)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


@handles("__getitem__")
def _picked(function: Any, x: LazyTensor, index: Any) -> LazyTensor:
    dim = 0
    for item in _indices(x, index):
        if item is None:
            x = unsqueezed(function, x, dim)
        elif isinstance(item, slice):
            start, stop, step = item.indices(x.shape[dim])
            if step != 1:
                raise NotStripedError
            x = narrowed(x, dim, start, max(0, stop - start))
        else:
            x = selected(function, x, dim, item)
            continue
        dim += 1
    return x


def replaced(x: LazyTensor, index: Any, value: Any) -> LazyTensor:
    """Return `x` with `x[index] = value` done.

    Raises NotStripedError unless the index selects along one dimension, which is not that of the rows, or all of it.
    """
    items = _indices(x, index)
    wanted = [dim for dim, item in enumerate(items) if item != slice(None)]
    if not wanted and isinstance(value, int | float):
        return filled(x, x.shape, float(value))
    if not wanted and isinstance(value, LazyTensor) and (value.shape, value.dtype) == (x.shape, x.dtype):
        return value
    if len(wanted) != 1 or None in items or wanted[0] == x.axis:
        raise NotStripedError
    dim, item = wanted[0], items[wanted[0]]
    start, stop, step = item.indices(x.shape[dim]) if isinstance(item, slice) else (item % x.shape[dim], 0, 1)
    if step != 1:
        raise NotStripedError
    length = stop - start if isinstance(item, slice) else 1
    if length <= 0:
        return x
    if isinstance(value, LazyTensor):
        value = value if isinstance(item, slice) else unsqueezed(None, value, dim)
        if value.axis != x.axis or value.shape[dim] != length or value.length != x.length:
            raise NotStripedError
    elif isinstance(value, torch.Tensor):
        raise NotStripedError
    else:
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        value = filled(x, shape, float(value))
    after = start + length
    parts = [narrowed(x, dim, 0, start)] if start else []
    parts += [value]
    parts += [narrowed(x, dim, after, x.shape[dim] - after)] if after < x.shape[dim] else []
    return joined(parts, dim)


def filled(like: LazyTensor, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> LazyTensor:
    """Return a lazy tensor of one value, with rows as `like`. Raises NotStripedError if `shape` has other rows."""
    if len(shape) != len(like.shape) or shape[like.axis] != like.length:
        raise NotStripedError
    one = torch.full([1] * len(shape), value, dtype=dtype or like.dtype, device=like.arena.device)
    return materialized_tensor(like.arena, one.expand(list(shape)), like.axis, Buffer(like.arena, one, True))


@handles("new_empty", "new_zeros", "new_ones", "new_full")
def _new(function: Any, x: LazyTensor, *sizes: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> LazyTensor:
    name = function.__name__
    value = 1.0 if name == "new_ones" else 0.0
    if name == "new_full":
        sizes, value = (sizes[0],), float(kwargs.get("fill_value", sizes[-1]))
    shape = sizes[0] if isinstance(sizes[0], list | tuple | torch.Size) else sizes
    return filled(x, shape, value, dtype)


@handles("zeros_like", "ones_like", "empty_like")
def _like(function: Any, x: LazyTensor, dtype: torch.dtype | None = None, **kwargs: Any) -> LazyTensor:
    return filled(x, x.shape, float(function.__name__ == "ones_like"), dtype)


@handles("repeat")
def _repeated(function: Any, x: LazyTensor, *times: Any) -> LazyTensor:
    counts = list(times[0] if isinstance(times[0], list | tuple) else times)
    axis = x.axis + len(counts) - len(x.shape)
    if counts[axis] != 1:
        raise NotStripedError
    return local(function, (x, counts), {}, axis)


@handles("repeat_interleave")
def _interleaved(function: Any, x: LazyTensor, repeats: int, dim: int | None = None, **kwargs: Any) -> LazyTensor:
    if dim is None or not isinstance(repeats, int):
        raise NotStripedError
    at = _dim(x, dim)
    return local(function, (x, repeats, at), kwargs, x.axis, (repeats if at == x.axis else 1, 1))
