"""A 3 x 3 convolution after a twofold nearest upsampling, computed from the small map in 4/9 of the operations.

Each pixel of the small map is four equal pixels of the large one. A 3 x 3 window there covers 2 x 2 pixels here, so
that taps on equal pixels can be summed: one 2 x 2 kernel for each of the four positions of a result's pixel. The sums
are another order of float32 addition, hence not the same bits: see [Note: Stripe exactness] in `lazy_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .arena import Buffer, StripeMemory
from .lazy_tensor import LazyTensor, Local

_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))  # by position: the taps of three on the first pixel, and on the second


class Enlarged(Local):
    """A nearest upsampling: each pixel of the input is repeated `times[0]` by `times[1]` times."""

    times = (1, 1)


class EnlargedConv(LazyTensor):
    """The result [B,C,2H,2W] of [B,K,H,W], upsampled twofold and convolved by [C,K,3,3] with a padding of 1."""

    grain = 2

    def __init__(
        self,
        arena: StripeMemory,
        shape: Sequence[int],
        source: LazyTensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(arena, shape, source.dtype, 2, (source,), 8 * weight.shape[1])
        self._kernels, self._bias = _kernels(weight), bias
        self._counted = [Buffer(arena, kernel, True) for kernel in self._kernels]

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
        first, last = self._reached(start, stop)
        return [(self.inputs[0], max(first, 0), min(last, self.inputs[0].length))]

    def _reached(self, start: int, stop: int) -> tuple[int, int]:
        return start // 2 - 1, -(-stop // 2) + 1

    def _make(self, start: int, stop: int) -> torch.Tensor:
        first, last = self._reached(start, stop)
        ((source, low, high),) = self._sources(start, stop)
        rows = F.pad(source.rows(low, high), (1, 1, low - first, last - high))
        height, width = rows.shape[2] - 2, rows.shape[3] - 2
        made = rows.new_empty(*self.shape[:2], 2 * height, 2 * width)
        for place, kernel in enumerate(self._kernels):
            down, right = divmod(place, 2)
            part = rows[:, :, down : down + height + 1, right : right + width + 1]
            made[:, :, down::2, right::2] = F.conv2d(part, kernel, self._bias)
        return made if height * 2 == stop - start else made.narrow(2, start % 2, stop - start)

    def _phase(self, start: int, stop: int) -> tuple[int, ...]:
        first, last = self._reached(start, stop)
        return start % 2, first - max(0, first), last - min(last, self.inputs[0].length)

    def _taken(self, rows: int) -> tuple[int, int]:
        """Return how many rows of the input `rows` rows need, and how many rows these make."""
        pairs = min(rows // 2 + 1, self.inputs[0].length)
        return min(pairs + 2, self.inputs[0].length), 2 * pairs

    def _fresh_bytes(self, rows: int) -> int:
        return self._taken(rows)[1] * self.row_bytes

    def _peak_bytes(self, rows: int) -> int:
        source, (taken, made) = self.inputs[0], self._taken(rows)
        # The input; a padded copy and a kernel's workspace; the result, and a quarter of it for one position.
        beside = source.fresh_bytes(taken) + 2 * (taken + 2) * source.row_bytes * 9 // 8
        return max(source.peak_bytes(taken), beside + made * self.row_bytes * 5 // 4)

    def _let_go(self) -> None:
        self._kernels, self._counted = [], []


def _kernels(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the 2 x 2 kernels of the four positions of a pixel: above left, above right, below left, below right."""
    found = []
    for down in _TAPS:
        rows = torch.stack([weight[:, :, list(taps)].sum(2) for taps in down], 2)
        for right in _TAPS:
            found.append(torch.stack([rows[..., list(taps)].sum(-1) for taps in right], -1))
    return found


def folded(input: LazyTensor, weight: torch.Tensor, bias: Any, shape: Sequence[int], plain: bool) -> LazyTensor | None:
    """Return the lazy convolution if `input` is a twofold upsampling and the kernel is 3 x 3 in float32, else None.

    Only float32: in 16 bits the sums of taps would be rounded. `plain` says that stride, dilation, groups and padding
    are all 1.
    """
    if not isinstance(input, Enlarged) or input.memory is not None or input.times != (2, 2) or not plain:
        return None
    if tuple(weight.shape[2:]) != (3, 3) or weight.dtype != torch.float32 or weight.shape[1] != input.shape[1]:
        return None
    return EnlargedConv(input.arena, shape, input.inputs[0], weight, bias)
