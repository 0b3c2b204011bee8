"""Handlers of functions that make each element, or each row, from the same one of their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import LazyTensor
from .materialize import held_bytes, materialize, recut, to_device

_ELEMENT = (
    "add sub rsub mul div true_divide pow neg abs exp log sqrt rsqrt square reciprocal sign floor ceil round sin cos "
    "tanh sigmoid relu relu6 silu gelu mish elu leaky_relu hardtanh hardswish hardsigmoid softplus logsigmoid erf "
    "clamp clip clamp_min clamp_max addcmul addcdiv lerp where maximum minimum multiply subtract divide "
    "eq ne lt le gt ge isnan isinf isfinite nan_to_num logical_not "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__ __rpow__ "
    "__neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)
ELEMENT = _ELEMENT.split()
_DIVISIONS = ("div", "true_divide", "divide", "__truediv__")
_TYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


@handles(*ELEMENT)
def _element(function: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        raise NotStripedError
    if function.__name__ in ("__eq__", "__ne__", "eq", "ne") and isinstance(args[1], str | None):
        return function.__name__.strip("_") == "ne"  # a cache may hold a word in place of a tensor
    if function.__name__ in _DIVISIONS and len(args) == 2 and not kwargs and _is_one(args[1]):
        return args[0]  # a division by an `output_scale_factor` of 1 changes no bit: no copy
    return local(function, args, kwargs)


def _is_one(value: Any) -> bool:
    return isinstance(value, int | float) and value == 1


@handles("dropout", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout")
def _dropout(function: Any, x: LazyTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> LazyTensor:
    if training and p:
        raise NotStripedError  # stripes would draw other random numbers than the whole
    return x


@handles("contiguous", "detach", "cuda", "requires_grad_", "alias")
def _same(function: Any, x: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    return x


@handles("clone")
def _clone(function: Any, x: LazyTensor, **kwargs: Any) -> LazyTensor:
    """Return `x` itself, materialized if its sources take more bytes: a clone is made to outlive these."""
    if x.nbytes < held_bytes(x):
        materialize(x)
    return x


@handles(*_TYPES)
def _typed(function: Any, x: LazyTensor, **kwargs: Any) -> LazyTensor:
    return x if x.dtype == _TYPES[function.__name__] else local(function, (x,), kwargs)


@handles("type_as")
def _type_as(function: Any, x: Any, other: Any) -> Any:
    return x.to(other.dtype) if isinstance(x, torch.Tensor) else _to(torch.Tensor.to, x, other.dtype)


@handles("to")
def _to(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    if not isinstance(x, LazyTensor):  # a real tensor, such as a weight, cast to the dtype of a lazy one
        like = next(value for value in values if isinstance(value, LazyTensor))
        return x.to(like.arena.device, like.dtype)
    dtype = next((value for value in values if isinstance(value, torch.dtype)), x.dtype)
    device = next((value for value in values if isinstance(value, str | torch.device)), None)
    for value in values:
        if isinstance(value, LazyTensor | torch.Tensor):
            dtype, device = value.dtype, x.arena.device if isinstance(value, LazyTensor) else value.device
    if device is not None and torch.device(device).type != x.arena.device.type:
        raise NotStripedError
    return x if dtype == x.dtype else local(torch.Tensor.to, (x, dtype), {})


# Functions that combine the elements of one row


def _dims(dim: Any, x: LazyTensor) -> list[int]:
    """Return dimensions as numbers from 0 up. Raises NotStripedError if that of the rows is among them, or for None."""
    if dim is None:
        raise NotStripedError
    found = [each % len(x.shape) for each in (dim if isinstance(dim, list | tuple) else (dim,))]
    if x.axis in found:
        raise NotStripedError
    return found


@handles("mean", "sum", "amax", "amin", "var", "std", "prod", "logsumexp")
def _reduced(function: Any, x: LazyTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> LazyTensor:
    dims = _dims(dim, x)
    axis = x.axis if keepdim else x.axis - sum(each < x.axis for each in dims)
    return local(function, (x,), {"dim": dim, "keepdim": keepdim, **kwargs}, axis)


@handles("linalg_vector_norm")
def _vector_norm(
    function: Any, x: LazyTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> LazyTensor:
    dims = _dims(dim, x)
    axis = x.axis if keepdim else x.axis - sum(each < x.axis for each in dims)
    return local(function, (x, ord, dim, keepdim), kwargs, axis)


@handles("normalize")
def _normalized(
    function: Any, input: LazyTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> LazyTensor:
    _dims(dim, input)
    return local(F.normalize, (input,), {"p": p, "dim": dim, "eps": eps})


@handles("softmax", "log_softmax", "cumsum", "flip")
def _along(function: Any, x: LazyTensor, dim: Any = None, *args: Any, **kwargs: Any) -> LazyTensor:
    _dims(dim, x)
    return local(function, (x, dim, *args), kwargs)


@handles("layer_norm", "rms_norm")
def _row_norm(function: Any, input: LazyTensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> LazyTensor:
    if input.axis >= len(input.shape) - len(normalized_shape):
        raise NotStripedError
    return local(function, (input, normalized_shape, *args), kwargs)


@handles("linear")
def _linear(function: Any, input: LazyTensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LazyTensor:
    if not isinstance(weight, torch.Tensor):
        raise NotStripedError
    if input.axis == len(input.shape) - 1:
        input = recut(input, max(range(input.axis), key=lambda at: input.shape[at]))
    return local(function, (input, weight, bias), {}, input.axis, operations=2 * input.shape[-1])


@handles("matmul", "bmm", "__matmul__")
def _product(function: Any, one: Any, other: Any) -> LazyTensor:
    """Multiply stripes of the first by the whole second, or the whole first by columns that are the second's rows."""
    if isinstance(one, LazyTensor) and one.axis == len(one.shape) - 2:
        other = to_device(other) if isinstance(other, LazyTensor) else other
        axis = one.axis + max(0, len(other.shape) - len(one.shape))
        return local(function, (one, other), {}, axis, operations=2 * one.shape[-1])
    if isinstance(other, LazyTensor) and other.axis == len(other.shape) - 1 and len(one.shape) == len(other.shape):
        one = to_device(one) if isinstance(one, LazyTensor) else one
        return local(function, (one, other), {}, other.axis, operations=2 * one.shape[-1])
    raise NotStripedError


@handles("cat", "concat", "concatenate")
def _cat(function: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> LazyTensor:
    return joined([part for part in tensors if not (len(part.shape) == 1 and part.shape[0] == 0)], dim)


def joined(parts: list[Any], dim: int) -> LazyTensor:
    """Return the concatenation of lazy and real tensors along `dim`.

    Expensive parts are materialized if their sources take more bytes. Raises NotStripedError along the rows.
    """
    nodes = [part for part in parts if isinstance(part, LazyTensor)]
    dim %= len(nodes[0].shape)
    axis = nodes[0].axis
    if dim == axis:
        raise NotStripedError
    parts = [recut(part, axis) if isinstance(part, LazyTensor) else part for part in parts]
    nodes = [part for part in parts if isinstance(part, LazyTensor)]
    if len(parts) == 1:
        return nodes[0]
    for part in nodes:
        if part.heavy and part.nbytes < held_bytes(part):
            materialize(part)
    flat: list[Any] = []
    for part in parts:
        flat += part.parts if isinstance(part, Joined) and part.dim == dim and part.memory is None else [part]
    flat = [part for part in flat if part.shape[dim]]
    if len(flat) == 1 and isinstance(flat[0], LazyTensor):
        return flat[0]
    return Joined(flat, dim, nodes[0])


class Joined(LazyTensor):
    """A concatenation of lazy tensors and device tensors along `dim`, which is not that of the rows."""

    def __init__(self, parts: list[Any], dim: int, like: LazyTensor) -> None:
        shape = list(like.shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        self.parts, self.dim = parts, dim
        nodes = [part for part in parts if isinstance(part, LazyTensor)]
        super().__init__(like.arena, shape, like.dtype, like.axis, nodes)
        self.grain = max([1, *(part.grain for part in nodes)])

    def _make(self, start: int, stop: int) -> torch.Tensor:
        stripes = [
            part.rows(start, stop) if isinstance(part, LazyTensor) else part.narrow(self.axis, start, stop - start)
            for part in self.parts
        ]
        return torch.cat(stripes, self.dim)

    def _peak_bytes(self, rows: int) -> int:
        held = most = 0
        for part in self.inputs:
            most = max(most, held + part.peak_bytes(rows))
            held += part.fresh_bytes(rows)
        return max(most, held + rows * self.row_bytes)

    def _let_go(self) -> None:
        self.parts = []
