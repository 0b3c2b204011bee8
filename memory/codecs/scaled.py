"""Weights of 8 bits times scales: what int8 and fp8 have in common. One scale for all, or one for each row.

The product is taken in float32 and rounded once. Kitchen (PyPI comfy-kitchen) rounds the scale of fp8 to the type of
the result first, which costs up to two units in the last place of bf16; in float32 both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeVar

import torch

from . import raw
from .codec import CHUNK_WEIGHTS, Codec, Encoded, Part, chunks, tiles, widened

S = TypeVar("S", bound="Scaled")

_LEAST_SCALE = 1e-30  # of a row of zeros


@dataclass(frozen=True)
class Scaled(Codec):
    """A matrix [rows, columns], all dimensions but the first taken together, with `scales` scales: 1, or `rows`."""

    stored: torch.dtype
    scales: int
    scale_type: torch.dtype = torch.float32
    chunk_bytes: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.scales not in (1, self.rows):
            raise ValueError(f"{self.name} of {self.shape} has {self.scales} scales, not 1 and not one for each row.")

    @property
    def rows(self) -> int:
        """Rows, as scales count them."""
        return self.shape[0] if self.shape else 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """The values, then their scales."""
        return Part("weight", self.stored, self.count), Part("scale", self.scale_type, self.scales)

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """The values of a row, and its scale where it has one."""
        return (self.count // self.rows, int(self.scales > 1)) if self.shape and self.rows > 1 else None

    def of_rows(self: S, rows: int) -> S:
        """Return the codec of `rows` of the rows, with their scales."""
        return replace(self, shape=(rows, *self.shape[1:]), scales=rows if self.scales > 1 else 1)

    @property
    def workspace_bytes(self) -> int:
        """That of a chunk, and the scales if they are widened."""
        return super().workspace_bytes + (0 if self.scale_type == torch.float32 else 4 * self.scales)

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = self.rows if self.scales > 1 else 1
        values, result = parts[0].view(rows, -1), out.view(rows, -1)
        scales = parts[1].to(torch.float32).view(-1, 1)
        for tile in tiles(*values.shape):
            tile_values = values[tile]
            if tile_values.is_floating_point():  # torch promotes integers by itself, and fp8 never
                tile_values = widened(tile_values)
            torch.mul(tile_values, scales[tile[0]], out=result[tile])


def gains(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether 8 bits and a scale a row make a weight smaller: a floating matrix, or one of more dimensions."""
    count = prod(shape)
    return dtype.is_floating_point and len(shape) > 1 and count + 4 * shape[0] < count * dtype.itemsize


def encode(
    weight: torch.Tensor, planned: Codec, largest: float, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> Encoded:
    """Encode a weight on the CPU as planned: each row is divided by its scale, so that its largest value is `largest`.

    Raw where that is planned, or where a value is not finite. `quantize` takes a float32 tensor, which it may change,
    to what is stored.
    """
    if not isinstance(planned, Scaled):
        return raw.encode(weight)
    matrix = weight.detach().reshape(planned.rows, -1)
    values, scales = torch.empty(matrix.shape, dtype=planned.stored), torch.empty(planned.scales)
    for rows in chunks(len(matrix), max(1, CHUNK_WEIGHTS // matrix.shape[1])):
        part = matrix[rows].to(torch.float32)
        scale = part.abs().amax(dim=1, keepdim=True).div_(largest).clamp_(min=_LEAST_SCALE)
        scales[rows] = scale.view(-1)
        values[rows] = quantize(part / scale)
    if not bool(scales.isfinite().all()):
        return raw.encode(weight)
    return planned, (values.view(-1), scales)
