"""Functions that only arrange elements anew. Rows stay rows, or become more or fewer of another height."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arena import Buffer, stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import Local, Map, kept_map
from .materialize import keep
from .pointwise import Joined, joined


def _view(node: Map, change: Callable[[torch.Tensor], torch.Tensor], axis: int) -> Map:
    """Return a view that leaves rows what they are. Of a map in memory it is one of that memory."""
    if node.kept is not None and node.buffer is not None:
        return kept_map(node.room, change(node.kept), axis, node.buffer)
    shape = change(stand_in(node.shape, node.dtype)).shape
    return Local(node.room, shape, node.dtype, axis, (node,), lambda rows: change(rows.pop()), shares=True)


def _dim(node: Map, dim: int, more: int = 0) -> int:
    return dim % (len(node.shape) + more)


@handles("permute")
def permuted(function: Any, x: Map, *dims: Any) -> Map:
    order = [_dim(x, dim) for dim in (dims[0] if isinstance(dims[0], list | tuple) else dims)]
    return _view(x, lambda rows: rows.permute(order), order.index(x.axis))


@handles("transpose", "swapaxes", "swapdims")
def _transposed(function: Any, x: Map, dim0: int, dim1: int) -> Map:
    order = list(range(len(x.shape)))
    one, other = _dim(x, dim0), _dim(x, dim1)
    order[one], order[other] = order[other], order[one]
    return permuted(function, x, order)


@handles("movedim", "moveaxis")
def _moved(function: Any, x: Map, source: Any, destination: Any) -> Map:
    ranks = stand_in(range(2, len(x.shape) + 2), x.dtype).movedim(source, destination).shape
    return permuted(function, x, [rank - 2 for rank in ranks])


@handles("unsqueeze")
def unsqueezed(function: Any, x: Map, dim: int) -> Map:
    at = _dim(x, dim, 1)
    return _view(x, lambda rows: rows.unsqueeze(at), x.axis + (at <= x.axis))


@handles("squeeze")
def squeezed(function: Any, x: Map, dim: Any = None) -> Map:
    if dim is None or not isinstance(dim, int) or _dim(x, dim) == x.axis:
        raise NotStripedError
    at = _dim(x, dim)
    return _view(x, lambda rows: rows.squeeze(at), x.axis - (at < x.axis)) if x.shape[at] == 1 else x


@handles("expand")
def _expanded(function: Any, x: Map, *sizes: Any) -> Map:
    wanted = sizes[0] if isinstance(sizes[0], list | tuple | torch.Size) else sizes
    axis = x.axis + len(wanted) - len(x.shape)
    if wanted[axis] not in (-1, x.length):
        raise NotStripedError
    kept = [*wanted[:axis], -1, *wanted[axis + 1 :]]
    return _view(x, lambda rows: rows.expand(kept), axis)


# Parts


def narrowed(x: Map, dim: int, start: int, length: int) -> Map:
    """`length` places of a dimension from `start` on."""
    if length == x.shape[dim]:
        return x
    if dim == x.axis:
        return _of_rows(x, start, length)
    if isinstance(x, Joined) and x.memory is None and x.dim == dim:
        return _of_parts(x, start, length)
    if x.heavy:
        keep(x)  # the other places are wanted as well, and must not be made each time
    made = _view(x, lambda rows: rows.narrow(dim, start, length), x.axis)
    if x.moments is not None and dim < x.axis:
        made.moments = x.moments.narrow(dim, start, length)
    return made


def _of_rows(x: Map, start: int, length: int) -> Map:
    if x.kept is None:
        keep(x, as_one=True)
    assert x.kept is not None
    assert x.buffer is not None
    return kept_map(x.room, x.kept.narrow(x.axis, start, length), x.axis, x.buffer)


def _of_parts(x: Joined, start: int, length: int) -> Map:
    parts, stop = [], start + length
    at = 0
    for part in x.parts:
        low, high = max(start, at), min(stop, at + part.shape[x.dim])
        if low < high:
            cut = narrowed if isinstance(part, Map) else torch.narrow
            parts.append(cut(part, x.dim, low - at, high - low))  # type: ignore[operator]
        at += part.shape[x.dim]
    if any(isinstance(part, Map) for part in parts):
        return joined(parts, x.dim)
    raise NotStripedError


@handles("narrow")
def _narrow(function: Any, x: Map, dim: int, start: int, length: int) -> Map:
    at = _dim(x, dim)
    return narrowed(x, at, start % x.shape[at] if start < 0 else start, length)


@handles("select")
def selected(function: Any, x: Map, dim: int, index: int) -> Map:
    at = _dim(x, dim)
    if at == x.axis:
        raise NotStripedError
    part = narrowed(x, at, index % x.shape[at], 1)
    made = squeezed(function, part, at)
    if part.moments is not None and at < x.axis:
        moments = part.moments
        made.moments = type(moments)(moments.count, moments.mean.squeeze(at), moments.variance.squeeze(at))
    return made


@handles("split", "split_with_sizes")
def _split(function: Any, x: Map, sizes: Any, dim: int = 0) -> tuple[Map, ...]:
    at = _dim(x, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[at] - start) for start in range(0, x.shape[at], sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(narrowed(x, at, start, size) for start, size in zip(starts, sizes, strict=True))


@handles("chunk", "tensor_split")
def _chunk(function: Any, x: Map, chunks: Any, dim: int = 0) -> tuple[Map, ...]:
    at = _dim(x, dim)
    parts = function(stand_in((x.shape[at],), x.dtype), chunks)
    return _split(function, x, [len(part) for part in parts], at)


@handles("unbind")
def _unbound(function: Any, x: Map, dim: int = 0) -> tuple[Map, ...]:
    return tuple(selected(function, x, dim, index) for index in range(x.shape[_dim(x, dim)]))


@handles("stack")
def _stacked(function: Any, tensors: Sequence[Map], dim: int = 0, **kwargs: Any) -> Map:
    at = _dim(tensors[0], dim, 1)
    return joined([unsqueezed(function, one, at) for one in tensors], at)


def _indices(x: Map, index: Any) -> list[Any]:
    """One index for each dimension, and None for each new one. Raises NotStripedError for tensors among them."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, int | slice)) for item in items):
        raise NotStripedError
    if any(isinstance(item, bool) for item in items):
        raise NotStripedError
    missing = len(x.shape) - sum(item is not None and item is not Ellipsis for item in items)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


@handles("__getitem__")
def _picked(function: Any, x: Map, index: Any) -> Map:
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


def replaced(x: Map, index: Any, value: Any) -> Map:
    """`x` with `x[index] = value` done. Along one dimension that is not that of the rows."""
    items = _indices(x, index)
    wanted = [dim for dim, item in enumerate(items) if item != slice(None)]
    if len(wanted) != 1 or None in items or wanted[0] == x.axis:
        raise NotStripedError
    dim, item = wanted[0], items[wanted[0]]
    start, stop, step = item.indices(x.shape[dim]) if isinstance(item, slice) else (item % x.shape[dim], 0, 1)
    if step != 1:
        raise NotStripedError
    length = stop - start if isinstance(item, slice) else 1
    if length <= 0:
        return x
    if isinstance(value, Map):
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


def filled(like: Map, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Map:
    """Return a map of one value, with its rows where those of `like` are."""
    if len(shape) != len(like.shape) or shape[like.axis] != like.length:
        raise NotStripedError
    one = torch.full([1] * len(shape), value, dtype=dtype or like.dtype, device=like.room.device)
    return kept_map(like.room, one.expand(list(shape)), like.axis, Buffer(like.room, one, True))


@handles("new_empty", "new_zeros", "new_ones", "new_full")
def _new(function: Any, x: Map, *sizes: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Map:
    name = function.__name__
    value = 1.0 if name == "new_ones" else 0.0
    if name == "new_full":
        sizes, value = (sizes[0],), float(kwargs.get("fill_value", sizes[-1]))
    shape = sizes[0] if isinstance(sizes[0], list | tuple | torch.Size) else sizes
    return filled(x, shape, value, dtype)


@handles("zeros_like", "ones_like", "empty_like")
def _like(function: Any, x: Map, dtype: torch.dtype | None = None, **kwargs: Any) -> Map:
    return filled(x, x.shape, float(function.__name__ == "ones_like"), dtype)


@handles("repeat")
def _repeated(function: Any, x: Map, *times: Any) -> Map:
    counts = list(times[0] if isinstance(times[0], list | tuple) else times)
    axis = x.axis + len(counts) - len(x.shape)
    if counts[axis] != 1:
        raise NotStripedError
    return local(function, (x, counts), {}, axis)


@handles("repeat_interleave")
def _interleaved(function: Any, x: Map, repeats: int, dim: int | None = None, **kwargs: Any) -> Map:
    if dim is None or not isinstance(repeats, int):
        raise NotStripedError
    at = _dim(x, dim)
    return local(function, (x, repeats, at), kwargs, x.axis, (repeats if at == x.axis else 1, 1))
