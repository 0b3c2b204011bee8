"""Weights in 8-bit integers, with a scale for each row, or one for all.

Files hold them as `int8_tensorwise` of ComfyUI, which despite its name may have a scale for each row. Its variant
"convrot" (grouped Hadamard, as in QuaRot, arXiv 2404.00456) multiplies each group of columns by an orthogonal matrix
before rounding, which spreads outliers over the group. Decoding undoes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import scaled
from .codec import CHUNK_WEIGHTS, Codec, Encoded, chunks
from .raw import Raw
from .scaled import Scaled

LARGEST = 127


@dataclass(frozen=True)
class Int8(Scaled):
    """int8 values times scales. Decoding is one kernel, which converts the integers as it reads them."""

    name: ClassVar[str] = "int8"
    chunk_bytes: ClassVar[int] = 0


@dataclass(frozen=True)
class RotatedInt8(Scaled):
    """int8 values times scales, rotated by a regular Hadamard matrix in groups of `group` columns, a power of 4.

    Rotating the integers is exact in float32, and in TF32 as well: they and the entries of the matrix have few bits,
    and so have their sums. Only the product with the scale is rounded. Kitchen rounds before it rotates. Raises
    ValueError if the columns are not whole groups.
    """

    group: int = 256
    name: ClassVar[str] = "int8 convrot"
    chunk_bytes: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_group(self.group) or not self.shape or self.shape[-1] % self.group or len(self.shape) != 2:
            raise ValueError(f"{self.name} of {self.shape} cannot be turned in groups of {self.group} columns.")

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, of the scales, and of the matrix with its inputs."""
        return super().workspace_bytes + 12 * self.group**2 + 4 * self.scales

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        values, result = (tensor.view(self.rows, -1, self.group) for tensor in (parts[0], out))
        matrix = _hadamard(self.group, out.device)
        scales = (parts[1].to(torch.float32) / self.group**0.5).view(-1, 1, 1).expand(self.rows, 1, 1)
        for rows in chunks(self.rows, max(1, CHUNK_WEIGHTS // self.shape[1])):
            torch.mul(values[rows].to(torch.float32) @ matrix, scales[rows], out=result[rows])


def is_group(size: int) -> bool:
    """Return whether Kitchen makes a regular Hadamard matrix of that size: 4, 16, 64, 256, 1024 or 4096."""
    return size in (4, 16, 64, 256, 1024, 4096)


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return a regular, symmetric Hadamard matrix of 1 and -1, float32 [size, size].

    Its square is `size` times the identity, so that divided by `sqrt(size)` it is its own inverse.
    """
    four = 1 - 2 * torch.eye(4, device=device).flip(0)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix


def planned(shape: tuple[int, ...], dtype: torch.dtype) -> Codec:
    """Return the codec that `encode` gives a weight of finite values.

    It has a scale for each row, or is raw if that would not make the weight smaller.
    """
    return Int8(shape, dtype, torch.int8, shape[0]) if scaled.gains(shape, dtype) else Raw(shape, dtype, dtype)


def encode(weight: torch.Tensor) -> Encoded:
    """Encode a weight on the CPU. Each row is scaled so that its largest absolute value becomes 127."""
    made = planned(tuple(weight.shape), weight.dtype)
    return scaled.encode(weight, made, LARGEST, lambda values: values.round_().to(torch.int8))
