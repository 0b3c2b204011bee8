"""A convolution of a map that was enlarged twofold: made from the small map, in four ninths of the operations.

Each pixel of the small map is four of the large one, so a window of 3 x 3 there covers 2 x 2 pixels here, whose weights
are sums: one kernel of 2 x 2 for each of the four places that a pixel of the result may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .arena import Buffer, Room
from .lazy_tensor import Local, Map

_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))  # of three, that fall on the first and on the second pixel, by place


class Enlarged(Local):
    """A map of which each pixel is one of the input's, `times` by `times` of them alike."""

    times = (1, 1)


class EnlargedConv(Map):
    """[B,C,2H,2W]: a map [B,.,H,W], enlarged twofold and convolved by a weight [C,.,3,3] with one row of padding."""

    grain = 2

    def __init__(
        self, room: Room, shape: Sequence[int], source: Map, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(room, shape, source.dtype, 2, (source,), 8 * weight.shape[1])
        self._kernels, self._bias = _kernels(weight), bias
        self._counted = [Buffer(room, kernel, True) for kernel in self._kernels]

    def _sources(self, start: int, stop: int) -> list[tuple[Map, int, int]]:
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
        """Rows of the input for so many, and rows that these make."""
        pairs = min(rows // 2 + 1, self.inputs[0].length)
        return min(pairs + 2, self.inputs[0].length), 2 * pairs

    def _fresh_bytes(self, rows: int) -> int:
        return self._taken(rows)[1] * self.row_bytes

    def _peak_bytes(self, rows: int) -> int:
        source, (taken, made) = self.inputs[0], self._taken(rows)
        # The input; that padded, and once more as a kernel's workspace; the result, and a quarter of it.
        beside = source.fresh_bytes(taken) + 2 * (taken + 2) * source.row_bytes * 9 // 8
        return max(source.peak_bytes(taken), beside + made * self.row_bytes * 5 // 4)

    def _let_go(self) -> None:
        self._kernels, self._counted = [], []


def _kernels(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the kernels of the four places (above or below, left or right) of a pixel among those that were one."""
    found = []
    for down in _TAPS:
        rows = torch.stack([weight[:, :, list(taps)].sum(2) for taps in down], 2)
        for right in _TAPS:
            found.append(torch.stack([rows[..., list(taps)].sum(-1) for taps in right], -1))
    return found


def folded(input: Map, weight: torch.Tensor, bias: Any, shape: Sequence[int], plain: bool) -> Map | None:
    """Return the convolution's map, where it is one of a map enlarged twofold.

    `plain`: stride 1, one row of padding.
    """
    if not isinstance(input, Enlarged) or input.memory is not None or input.times != (2, 2) or not plain:
        return None
    if tuple(weight.shape[2:]) != (3, 3) or weight.dtype != torch.float32 or weight.shape[1] != input.shape[1]:
        return None
    return EnlargedConv(input.room, shape, input.inputs[0], weight, bias)
