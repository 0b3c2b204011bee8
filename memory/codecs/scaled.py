"""The common base of int8 and fp8: 8-bit values times one scale for all, or one for each row.

The product is computed in float32 and rounded once. Kitchen (PyPI comfy-kitchen) first rounds the scale of fp8 to the
dtype of the result, which costs up to two units in the last place of bf16. In float32 both give the same bits.
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

_LEAST_SCALE = 1e-30  # the scale of a row of zeros


@dataclass(frozen=True)
class Scaled(Codec):
    """A matrix [rows, columns], with all dimensions but the first flattened, and 1 or `rows` scales."""

    stored: torch.dtype
    scales: int
    scale_type: torch.dtype = torch.float32
    chunk_bytes: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.scales not in (1, self.rows):
            raise ValueError(f"{self.name} of {self.shape} has {self.scales} scales, not 1 and not one for each row.")

    @property
    def rows(self) -> int:
        """Size of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """The values and their scales."""
        return Part("weight", self.stored, self.count), Part("scale", self.scale_type, self.scales)

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Elements of a row, and 1 scale, or 0 if one scale is shared by all rows."""
        return (self.count // self.rows, int(self.scales > 1)) if self.shape and self.rows > 1 else None

    def of_rows(self: S, rows: int) -> S:
        """Return the codec of a weight with `rows` rows, with as many scales if each row has its own."""
        return replace(self, shape=(rows, *self.shape[1:]), scales=rows if self.scales > 1 else 1)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, and of the scales if they are converted to float32."""
        return super().workspace_bytes + (0 if self.scale_type == torch.float32 else 4 * self.scales)

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = self.rows if self.scales > 1 else 1
        values, result = parts[0].view(rows, -1), out.view(rows, -1)
        scales = parts[1].to(torch.float32).view(-1, 1)
        for tile in tiles(rows, values.shape[1], CHUNK_WEIGHTS):
            tile_values = values[tile]
            if tile_values.is_floating_point():  # torch.mul converts integers itself, but not fp8
                tile_values = widened(tile_values)
            torch.mul(tile_values, scales[tile[0]], out=result[tile])


def gains(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether 8 bits a weight and a float32 scale a row are fewer bytes. Only floats of 2 or more dimensions."""
    count = prod(shape)
    return dtype.is_floating_point and len(shape) > 1 and count + 4 * shape[0] < count * dtype.itemsize


def encode(
    weight: torch.Tensor, planned: Codec, largest: float, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> Encoded:
    """Encode a weight on the CPU as `planned`. Each row is scaled so that its largest absolute value is `largest`.

    The result is raw if that is planned, or if a value is not finite. `quantize` converts a float32 tensor, which it
    may overwrite, to the stored dtype.
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
