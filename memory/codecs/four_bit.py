"""bitsandbytes' 4-bit weights in flat blocks with a scale each: nf4 (arXiv 2305.14314) and fp4.

The file holds the values of the 16 codes. With "double quantization" the scales are 8-bit codes too, in blocks of 256
with a scale each, and one offset for all. Decoding computes in float32, as bitsandbytes does, and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from .codec import CHUNK_WEIGHTS, Codec, Part, chunks

NESTED_BLOCK = 256  # scales
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # sizes of blocks, in weights


@dataclass(frozen=True)
class FourBit(Codec):
    """Two codes a byte, the first in the high half, and a scale for each `block` weights.

    `offset` is that of double-quantized scales; None means float32 scales. Raises ValueError for an unknown block size.
    """

    block: int
    offset: float | None = None
    name: ClassVar[str] = "4 bit"
    chunk_bytes: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if self.block not in _BLOCKS:
            raise ValueError(f"{self.name} of {self.shape} is in blocks of {self.block!r}, not of 32 to 4096.")

    @property
    def blocks(self) -> int:
        """Number of blocks, and so of scales."""
        return -(-self.count // self.block)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, scales of blocks, 16 values; with double quantization also the scales' own scales and 256 values."""
        plain = self.offset is None
        scales = Part("absmax", torch.float32 if plain else torch.uint8, self.blocks)
        first = (Part("weight", torch.uint8, -(-self.count // 2)), scales, Part("quant_map", torch.float32, 16))
        nested = Part("nested_absmax", torch.float32, -(-self.blocks // NESTED_BLOCK))
        return first if plain else (*first, nested, Part("nested_quant_map", torch.float32, NESTED_BLOCK))

    @property
    def alike(self) -> FourBit:
        """The same codec with an offset of 0, since decoding costs the same with any."""
        return self if self.offset is None else replace(self, offset=0.0)

    def taken(self, begin: int, end: int) -> tuple[FourBit, tuple[slice, ...]]:
        """Return what `Codec.taken` does.

        Row `begin` must start a block, and a block of scales if these are codes. `end` must start a block, or be the
        number of rows.
        """
        row = prod(self.shape[1:])
        lot = self.block * (1 if self.offset is None else NESTED_BLOCK)
        rows = self.shape[0] if self.shape else 0
        if not 0 <= begin < end <= rows or begin * row % lot or (end < rows and end * row % self.block):
            raise ValueError(f"{self.name} of {self.shape} has no rows {begin} to {end} that lie apart.")
        codec, first = replace(self, shape=(end - begin, *self.shape[1:])), begin * row
        starts = (first // 2, first // self.block, 0, first // self.block // NESTED_BLOCK, 0)
        return codec, tuple(slice(at, at + part.count) for at, part in zip(starts, codec.parts, strict=False))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, of its scales if they are codes, and of the table of pairs."""
        scales = 0 if self.offset is None else min(self.blocks, CHUNK_WEIGHTS // self.block)
        return super().workspace_bytes + scales * 12 + 4096

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, values = parts[0], parts[2]
        pairs = torch.stack((values[:, None].expand(16, 16), values.expand(16, 16)), dim=-1).view(256, 2)
        for some in chunks(self.count, CHUNK_WEIGHTS):
            taken = codes[some.start // 2 : -(-some.stop // 2)].to(torch.int32)
            plain = pairs.index_select(0, taken).view(-1)
            del taken
            scales = self._scales(parts, some.start // self.block, -(-some.stop // self.block))
            count = some.stop - some.start
            whole = count // self.block * self.block
            result = out[some]
            torch.mul(
                plain[:whole].view(-1, self.block),
                scales[: whole // self.block, None],
                out=result[:whole].view(-1, self.block),
            )
            if whole < count:
                torch.mul(plain[whole:count], scales[-1:], out=result[whole:])

    def _scales(self, parts: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor:
        """Return the scales of blocks `begin` to `end` in float32. `begin` is the first of a block of scales."""
        scales = parts[1][begin:end]
        if self.offset is None:
            return scales
        _, _, _, nested, values = parts
        wide = nested[begin // NESTED_BLOCK : -(-end // NESTED_BLOCK), None].expand(-1, NESTED_BLOCK).reshape(-1)
        return values.index_select(0, scales.to(torch.int32)).mul_(wide[: end - begin]).add_(self.offset)
