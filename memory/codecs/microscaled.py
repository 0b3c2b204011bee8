"""mxfp8 and nvfp4: small floats with a scale for each block of a row, the native formats of NVIDIA's Blackwell.

The formats are those of the OCP Microscaling specification and of NVFP4, in files as Kitchen (PyPI comfy-kitchen)
writes them. Matrices are padded to whole blocks of rows and columns. The scales are in cuBLAS order: consecutive tiles
of 128 rows by 4 columns. Decoding computes in float32 and rounds once. Kitchen first rounds the scales of nvfp4 to the
dtype of the result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch

from .codec import CHUNK_WEIGHTS, Codec, Part, chunks, pair_table, table_of, widened

M = TypeVar("M", bound="Microscaled")

_TILE_ROWS, _TILE_COLUMNS = 128, 4  # of a tile of scales

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the values of e2m1 times 2, to be integers


@dataclass(frozen=True)
class Microscaled(Codec):
    """A matrix in blocks of `block` columns, padded to multiples of `padding` rows and columns."""

    block: ClassVar[int]
    padding: ClassVar[int]

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or not self.count:
            raise ValueError(f"{self.name} of {self.shape} is no matrix.")

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns as stored, padding included."""
        rows, columns = (-(-size // self.padding) * self.padding for size in self.shape)
        return rows, columns

    @property
    def scales(self) -> int:
        """Number of scales as stored, in whole tiles."""
        rows, columns = self.padded
        return -(-rows // _TILE_ROWS) * _TILE_ROWS * -(-columns // (self.block * _TILE_COLUMNS)) * _TILE_COLUMNS

    def taken(self: M, begin: int, end: int) -> tuple[M, tuple[slice, ...]]:
        """Return what `Codec.taken` does. A tile mixes the scales of 128 rows, so only whole tiles are separable."""
        if not 0 <= begin < end <= self.shape[0] or begin % _TILE_ROWS or (end % _TILE_ROWS and end < self.shape[0]):
            raise ValueError(f"{self.name} of {self.shape} has no rows {begin} to {end} that lie apart.")
        codec = replace(self, shape=(end - begin, self.shape[1]))
        values, scales, *others = zip(self.parts, codec.parts, strict=True)
        first = begin * values[0].count // self.padded[0], begin // _TILE_ROWS * self._tile_scales
        taken = (slice(at, at + part.count) for at, (_, part) in zip(first, (values, scales), strict=True))
        return codec, (*taken, *(slice(0, part.count) for _, part in others))

    @property
    def _tile_scales(self) -> int:
        return self.scales // -(-self.padded[0] // _TILE_ROWS)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates. A chunk has at least 128 rows."""
        return min(self.padded[0], self._rows_at_once(CHUNK_WEIGHTS)) * self.padded[1] * self.chunk_bytes + 4096

    def _rows_at_once(self, most: int) -> int:
        return max(1, most // self.padded[1] // _TILE_ROWS) * _TILE_ROWS

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows, _ = self.padded
        values, result = parts[0].view(rows, -1), out.view(self.shape)
        scales = parts[1].view(torch.uint8).view(-(-rows // _TILE_ROWS), -1, 32, 4, _TILE_COLUMNS)
        for some in chunks(self.shape[0], self._rows_at_once(CHUNK_WEIGHTS)):
            tiles = scales[some.start // _TILE_ROWS : -(-some.stop // _TILE_ROWS)]
            result[some] = self._scaled(values[some], tiles, parts)[:, : self.shape[1]]

    def _scaled(self, values: torch.Tensor, tiles: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return padded rows in float32, scaled. `tiles` are their scales; the first row begins the first tile."""
        rows, columns = len(values), self.padded[1]
        # Within a tile, [i, j] holds the 4 scales of row 32 j + i.
        straight = tiles.permute(0, 3, 2, 1, 4).reshape(len(tiles) * _TILE_ROWS, -1)
        chunk = self._widened(values).view(rows, -1, self.block)
        chunk *= self._scale(straight[:rows, : columns // self.block], parts).unsqueeze(-1)
        return chunk.view(rows, columns)

    @abstractmethod
    def _widened(self, values: torch.Tensor) -> torch.Tensor:
        """Return rows of stored values in float32, not yet scaled."""

    @abstractmethod
    def _scale(self, scales: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the scales of blocks in float32. `scales` are their bytes."""


@dataclass(frozen=True)
class Mxfp8(Microscaled):
    """e4m3 in blocks of 32. Scales are powers of two, stored as 8-bit exponents."""

    name: ClassVar[str] = "mxfp8"
    chunk_bytes: ClassVar[int] = 5
    block: ClassVar[int] = 32
    padding: ClassVar[int] = 32

    @property
    def parts(self) -> tuple[Part, ...]:
        """The padded values and the scales."""
        rows, columns = self.padded
        return Part("weight", torch.float8_e4m3fn, rows * columns), Part("scale", torch.uint8, self.scales)

    def _widened(self, values: torch.Tensor) -> torch.Tensor:
        return widened(values)

    def _scale(self, scales: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return (scales.to(torch.int32) << 23).view(torch.float32)


@dataclass(frozen=True)
class Nvfp4(Microscaled):
    """e2m1 in blocks of 16 with e4m3 scales, and one float32 scale for all. The first of two codes is the high half."""

    name: ClassVar[str] = "nvfp4"
    chunk_bytes: ClassVar[int] = 7
    block: ClassVar[int] = 16
    padding: ClassVar[int] = 16

    @property
    def parts(self) -> tuple[Part, ...]:
        """The padded values, the scales of blocks, and the scale of the matrix."""
        rows, columns = self.padded
        return (
            Part("weight", torch.uint8, rows * columns // 2),
            Part("block_scale", torch.float8_e4m3fn, self.scales),
            Part("scale", torch.float32, 1),
        )

    def _widened(self, values: torch.Tensor) -> torch.Tensor:
        halves = table_of(_HALVES, values.device)
        pairs = pair_table(halves, halves).flip(1).view(torch.int16).view(-1)
        found = pairs.index_select(0, values.view(-1).to(torch.int32))
        return found.view(torch.int8).to(torch.float32)

    def _scale(self, scales: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return widened(scales.view(torch.float8_e4m3fn)) * parts[2] * 0.5
