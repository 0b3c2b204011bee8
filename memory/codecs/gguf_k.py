"""GGUF's blocks of 256 weights: sub-blocks of 16 or 32, whose scales of few bits have a scale of their own.

Each function takes blocks [n, bytes of a block] of uint8, and gives their weights [n, 256] in float32.
"""

from __future__ import annotations

import torch

from .gguf_simple import half, nonlinear, shifted


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sub-blocks of 16: 4 bits of scale and of minimum each; 2 bits a weight; the scale and the minimum of these."""
    scales = blocks[:, :16]
    scale = half(blocks, 80) * (scales & 15)
    least = half(blocks, 82) * (scales >> 4)
    values = shifted(blocks[:, 16:80], 2, 2).bitwise_and_(3)
    return _scaled(values, scale).sub_(least.unsqueeze(-1)).view(-1, 256)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return a bit of each weight, 4 less without it.

    2 bits of each; 16 scales of 6 bits, less 32; the scale of these.
    """
    low = shifted(blocks[:, 96:104], 4, 1).bitwise_and_(15).view(-1, 16)
    high = shifted(blocks[:, 104:108], 2, 1).bitwise_and_(3).view(-1, 16)
    scale = half(blocks, 108) * (low | high << 4).to(torch.float32).sub_(32)
    values = shifted(blocks[:, 32:96], 2, 2).bitwise_and_(3).view(-1, 256)
    values |= shifted(blocks[:, :32], 1, 1).bitwise_and_(1).mul_(4).view(-1, 256)
    return _scaled(values, scale, less=4).view(-1, 256)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale and a minimum; 8 sub-blocks' scales and minima of 6 bits; 4 bits a weight."""
    scale, least = _scales_and_minima(blocks)
    values = shifted(blocks[:, 16:], 4, 4).bitwise_and_(15)
    return _scaled(values, scale).sub_(least).view(-1, 256)


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As `q4_k`, and before its 4 bits the fifth bit of each weight."""
    scale, least = _scales_and_minima(blocks)
    values = shifted(blocks[:, 48:], 4, 4).bitwise_and_(15).view(-1, 256)
    values |= shifted(blocks[:, 16:48], 1, 1).bitwise_and_(1).mul_(16).view(-1, 256)
    return _scaled(values, scale).sub_(least).view(-1, 256)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """4 low bits and 2 high bits a weight, less 32; 16 scales of 8 bits; the scale of these."""
    scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    values = shifted(blocks[:, :128], 4, 2).bitwise_and_(15).view(-1, 256)
    values |= shifted(blocks[:, 128:192], 2, 2).bitwise_and_(3).mul_(16).view(-1, 256)
    return _scaled(values, scale, less=32).view(-1, 256)


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale; 8 scales of 6 bits, less 32: 2 high bits, 4 low bits; 256 places in the table of 16 values."""
    high = shifted(blocks[:, 2:4], 2, 2).bitwise_and_(3).view(-1, 8)
    low = shifted(blocks[:, 4:8], 4, 4).bitwise_and_(15).view(-1, 8)
    scale = half(blocks, 0) * (low | high << 4).to(torch.float32).sub_(32)
    values = nonlinear(shifted(blocks[:, 8:], 4, 8).bitwise_and_(15))
    return _scaled(values, scale).view(-1, 256)


def _scaled(values: torch.Tensor, scale: torch.Tensor, less: int = 0) -> torch.Tensor:
    """256 values of each block, in float32, less a number, times the scale of their sub-block [n, sub-blocks]."""
    wide = values.view(len(scale), scale.shape[1], -1).to(torch.float32)
    return (wide.sub_(less) if less else wide).mul_(scale.unsqueeze(-1))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [n, 8] and minima [n, 8, 1] of the sub-blocks of `q4_k` and `q5_k`, in float32.

    Of 12 bytes the first 4 hold four scales in 6 bits, the next 4 four minima; their two high bits, and the low and
    the high half of the last 4 bytes, make the other four of each.
    """
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((scales & 63, low & 15 | scales >> 2 & 48), dim=1)
    least = torch.cat((minima & 63, low >> 4 | minima >> 2 & 48), dim=1)
    return half(blocks, 0) * scale, (half(blocks, 2) * least).unsqueeze(-1)
