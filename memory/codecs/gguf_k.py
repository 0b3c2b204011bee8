"""GGUF's K-quants and iq4_xs: blocks of 256 weights in sub-blocks of 16 or 32 with quantized scales.

Each public function takes uint8 [n, bytes of a block] and returns float32 [n, 256]. "Layout" lists the fields of a
block in the order of their bytes. `d` and `dmin` are float16 factors of the scales and minima of the sub-blocks.
"""

from __future__ import annotations

import torch

from .gguf_simple import half, nonlinear, shifted


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 84 bytes, float32 [n, 256].

    Layout: 16 bytes, each with the scale (low 4 bits) and the minimum (high 4 bits) of a sub-block of 16; 64 bytes
    with 2 bits a weight; `d`; `dmin`.
    """
    scales = blocks[:, :16]
    scale = half(blocks, 80) * (scales & 15)
    least = half(blocks, 82) * (scales >> 4)
    values = shifted(blocks[:, 16:80], 2, 2).bitwise_and_(3)
    return _scaled(values, scale).sub_(least.unsqueeze(-1)).view(-1, 256)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 110 bytes, float32 [n, 256].

    Layout: 32 bytes with the third bit of each weight; 64 bytes with its 2 low bits; 12 bytes with 16 scales of 6 bits,
    biased by 32; `d`. The values 0 to 7 are biased by 4.
    """
    low = shifted(blocks[:, 96:104], 4, 1).bitwise_and_(15).view(-1, 16)
    high = shifted(blocks[:, 104:108], 2, 1).bitwise_and_(3).view(-1, 16)
    scale = half(blocks, 108) * (low | high << 4).to(torch.float32).sub_(32)
    values = shifted(blocks[:, 32:96], 2, 2).bitwise_and_(3).view(-1, 256)
    values |= shifted(blocks[:, :32], 1, 1).bitwise_and_(1).mul_(4).view(-1, 256)
    return _scaled(values, scale, less=4).view(-1, 256)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 144 bytes, float32 [n, 256].

    Layout: `d`; `dmin`; 12 bytes with 8 scales and 8 minima of 6 bits (see `_scales_and_minima`); 128 bytes with 4 bits
    a weight, in sub-blocks of 32.
    """
    scale, least = _scales_and_minima(blocks)
    values = shifted(blocks[:, 16:], 4, 4).bitwise_and_(15)
    return _scaled(values, scale).sub_(least).view(-1, 256)


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 176 bytes, float32 [n, 256].

    Layout: as `q4_k`, with 32 bytes of the fifth bit of each weight before the 128 bytes of 4 bits.
    """
    scale, least = _scales_and_minima(blocks)
    values = shifted(blocks[:, 48:], 4, 4).bitwise_and_(15).view(-1, 256)
    values |= shifted(blocks[:, 16:48], 1, 1).bitwise_and_(1).mul_(16).view(-1, 256)
    return _scaled(values, scale).sub_(least).view(-1, 256)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 210 bytes, float32 [n, 256].

    Layout: 128 bytes with the 4 low bits of each weight; 64 bytes with its 2 high bits; 16 int8 scales of sub-blocks of
    16; `d`. The values 0 to 63 are biased by 32.
    """
    scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    values = shifted(blocks[:, :128], 4, 2).bitwise_and_(15).view(-1, 256)
    values |= shifted(blocks[:, 128:192], 2, 2).bitwise_and_(3).mul_(16).view(-1, 256)
    return _scaled(values, scale, less=32).view(-1, 256)


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 136 bytes, float32 [n, 256].

    Layout: `d`; 2 bytes with the 2 high bits and 4 bytes with the 4 low bits of 8 scales, biased by 32; 128 bytes with
    a code of 4 bits a weight, an index into `NONLINEAR`.
    """
    high = shifted(blocks[:, 2:4], 2, 2).bitwise_and_(3).view(-1, 8)
    low = shifted(blocks[:, 4:8], 4, 4).bitwise_and_(15).view(-1, 8)
    scale = half(blocks, 0) * (low | high << 4).to(torch.float32).sub_(32)
    values = nonlinear(shifted(blocks[:, 8:], 4, 8).bitwise_and_(15))
    return _scaled(values, scale).view(-1, 256)


def _scaled(values: torch.Tensor, scale: torch.Tensor, less: int = 0) -> torch.Tensor:
    """Return `(values - less) * scale` in float32 [n, sub-blocks, weights of a sub-block].

    `values` are uint8 with 256 elements a block, `scale` is [n, sub-blocks].
    """
    wide = values.view(len(scale), scale.shape[1], -1).to(torch.float32)
    return (wide.sub_(less) if less else wide).mul_(scale.unsqueeze(-1))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales [n, 8] and minima [n, 8, 1] of the sub-blocks of `q4_k` and `q5_k`, in float32.

    Layout of the 12 bytes: the low 6 bits of bytes 0-3 are scales 0-3, those of bytes 4-7 minima 0-3. Scales and minima
    4-7 have their low 4 bits in the two halves of bytes 8-11, and their high 2 bits in the top of bytes 0-7.
    """
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((scales & 63, low & 15 | scales >> 2 & 48), dim=1)
    least = torch.cat((minima & 63, low >> 4 | minima >> 2 & 48), dim=1)
    return half(blocks, 0) * scale, (half(blocks, 2) * least).unsqueeze(-1)
