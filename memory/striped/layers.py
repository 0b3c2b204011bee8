"""Handlers of layers that read more than one row: convolution, pooling, padding, upsampling and group norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .chunked_calls import NotStripedError, handles, local, shape_of
from .enlarged import Enlarged, folded
from .lazy_tensor import LazyTensor, Window
from .materialize import find_statistics, held_bytes, materialize, recut, settle

_EAGER = 4  # a result this many times smaller than its materialized sources is materialized at once, to free these


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) * (count if len(value) == 1 else 1) if isinstance(value, list | tuple) else (value,) * count


@handles("conv2d", "conv3d")
def _convolved(
    function: Any,
    input: LazyTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> LazyTensor:
    count = weight.dim() - 2
    row = count - 2  # the dimension of a kernel that lies along rows
    if len(input.shape) != count + 2 or not isinstance(weight, torch.Tensor):
        raise NotStripedError
    input = recut(input, count)
    stride, dilation = _tuple(stride, count), _tuple(dilation, count)
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):
        if any(each * (size - 1) % 2 for each, size in zip(dilation, weight.shape[2:], strict=True)):
            raise NotStripedError
        padding = [each * (size - 1) // 2 for each, size in zip(dilation, weight.shape[2:], strict=True)]
    padding = _tuple(padding, count)
    shape = shape_of(function, (input, weight, bias, stride, padding, dilation, groups), {})
    operations = 2 * weight[0].numel()
    reach, margin = dilation[row] * (weight.shape[2 + row] - 1) + 1, padding[row]
    beside = tuple(0 if dim == row else size for dim, size in enumerate(padding))
    if reach == stride[row] == 1 and not margin:
        return _made_early(
            local(function, (input, weight, bias, stride, padding, dilation, groups), {}, operations=operations)
        )

    def make(rows: torch.Tensor, above: int, below: int) -> torch.Tensor:
        if above == below == margin:
            return function(rows, weight, bias, stride, padding, dilation, groups)
        if above or below:
            rows = F.pad(rows, (0, 0, above, below))
        return function(rows, weight, bias, stride, beside, dilation, groups)

    steps = {*stride, *dilation, groups, *padding}
    if (made := folded(input, weight, bias, shape.shape, plain=steps == {1})) is not None:
        settle(made.inputs[0])
        return made
    settle(input)
    return _made_early(
        Window(input.arena, shape.shape, shape.dtype, input.axis, input, make, reach, stride[row], margin, operations)
    )


def _made_early(node: LazyTensor) -> LazyTensor:
    if node.nbytes * _EAGER <= held_bytes(node):
        materialize(node)
    return node


@handles("avg_pool2d", "max_pool2d")
def _pooled(
    function: Any, input: LazyTensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
) -> LazyTensor:
    kernel = _tuple(kernel_size, 2)
    if input.axis != len(input.shape) - 2 or _tuple(padding, 2) != (0, 0) or args or any(kwargs.values()):
        raise NotStripedError
    step = _tuple(stride or kernel, 2)
    shape = shape_of(function, (input, kernel, step), {})

    def make(rows: torch.Tensor, above: int, below: int) -> torch.Tensor:
        return function(rows, kernel, step)

    settle(input)
    return Window(input.arena, shape.shape, shape.dtype, input.axis, input, make, kernel[0], step[0])


@handles("avg_pool1d", "max_pool1d")
def _pooled_within(function: Any, input: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    if input.axis >= len(input.shape) - 1:
        raise NotStripedError
    return local(function, (input, *args), kwargs, input.axis)


@handles("pad")
def _padded(
    function: Any, input: LazyTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> LazyTensor:
    at = 2 * (len(input.shape) - 1 - input.axis)
    pad = list(pad)
    if not any(pad):
        return input
    above, below = pad[at : at + 2] if at < len(pad) else (0, 0)
    if not above and not below:
        return local(function, (input, pad), {"mode": mode, "value": value}, input.axis)
    if above < 0 or below < 0 or mode not in ("constant", "replicate", "reflect"):
        raise NotStripedError
    shape = shape_of(function, (input, pad), {"mode": mode, "value": value})

    def make(rows: torch.Tensor, top: int, bottom: int) -> torch.Tensor:
        here = [*pad[:at], top, bottom, *pad[at + 2 :]]
        return function(rows, here, mode=mode, value=value) if any(here) else rows

    operator = _Reflected if mode == "reflect" else Window
    return operator(input.arena, shape.shape, shape.dtype, input.axis, input, make, 1, 1, above)


class _Reflected(Window):
    """A padding whose rows mirror those on the other side of the first or last row."""

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
        first, last = self._reached(start, stop)
        ((source, low, high),) = super()._sources(start, stop)
        top, bottom = max(0, -first), max(0, last - source.length)
        return [(source, min(low, source.length - 1 - bottom), max(high, top + 1))]

    def _peak_bytes(self, rows: int) -> int:
        margin = max(self._above, self.length - self.inputs[0].length - self._above)
        return super()._peak_bytes(max(rows, min(2 * margin + 1, self.length)))


@handles("interpolate")
def _resized(
    function: Any,
    input: LazyTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    **kwargs: Any,
) -> LazyTensor:
    likeness = shape_of(function, (input, size, scale_factor, mode), kwargs)
    at = input.axis
    if mode not in ("nearest", "nearest-exact") or likeness.shape[at] % input.length or at < 2:
        raise NotStripedError
    times = likeness.shape[at] // input.length
    sizes = list(likeness.shape[2:])

    def make(rows: list[torch.Tensor]) -> torch.Tensor:
        sizes_here = list(sizes)
        sizes_here[at - 2] = rows[0].shape[at] * times
        return function(rows[0], size=sizes_here, mode=mode)

    found = Enlarged(input.arena, likeness.shape, input.dtype, at, (input,), make, (times, 1))
    if at == 2 and len(sizes) == 2 and sizes[1] % input.shape[3] == 0:
        found.times = (times, sizes[1] // input.shape[3])
    return found


@handles("group_norm")
def _group_norm(
    function: Any,
    input: LazyTensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> LazyTensor:
    """Normalize with the mean and variance of all rows, merged in float64, then scale and shift in float32.

    The stock kernel accumulates in another order: see [Note: Stripe exactness] in `lazy_tensor`.
    """
    if input.shape[1] % num_groups or len(input.shape) < 3:
        raise NotStripedError
    if input.axis < 2:
        input = recut(input, max(2, len(input.shape) - 2))
    settle(input, with_statistics=True)
    statistics = find_statistics(input).merged(num_groups)
    rate = (statistics.variance + eps).rsqrt()
    each = input.shape[1] // num_groups
    wide = [*input.shape[:2], *[1] * (len(input.shape) - 2)]
    scale, shift = (
        part.repeat_interleave(each, 1).float().to(input.arena.device).reshape(wide)
        for part in (rate, -statistics.mean * rate)
    )
    along = [1, -1, *[1] * (len(input.shape) - 2)]
    if weight is not None:
        scale, shift = scale * weight.reshape(along), shift * weight.reshape(along)
    if bias is not None:
        shift = shift + bias.reshape(along)
    return local(_scaled, (input, scale, shift), {}, input.axis)


def _scaled(rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, rows.float(), scale).to(rows.dtype)
