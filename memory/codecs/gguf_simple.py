"""GGUF's blocks of 32 weights: one scale, and with some types one offset.

Each function takes blocks [n, bytes of a block] of uint8, and gives their weights [n, 32] in float32.
"""

from __future__ import annotations

import torch

from .codec import table_of

# Sixteen values that suit weights better than equal steps do (`kvalues_iq4nl` of llama.cpp).
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, 32 integers of 8 bits."""
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(half(blocks, 0))


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, 32 integers of 4 bits, less 8."""
    return _nibbles(blocks[:, 2:]).to(torch.float32).sub_(8).mul_(half(blocks, 0))


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, an offset, 32 integers of 4 bits."""
    return _nibbles(blocks[:, 4:]).to(torch.float32).mul_(half(blocks, 0)).add_(half(blocks, 2))


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, 32 fifth bits, 32 integers of 4 bits, less 16."""
    return _with_fifth_bits(blocks[:, 2:]).to(torch.float32).sub_(16).mul_(half(blocks, 0))


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, an offset, 32 fifth bits, 32 integers of 4 bits."""
    return _with_fifth_bits(blocks[:, 4:]).to(torch.float32).mul_(half(blocks, 0)).add_(half(blocks, 2))


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Return a scale, 32 places in the table of 16 values."""
    return nonlinear(_nibbles(blocks[:, 2:])).mul_(half(blocks, 0))


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a byte of each block, [n, 1] in float32."""
    return blocks[:, at : at + 2].view(torch.float16).to(torch.float32)


def shifted(values: torch.Tensor, step: int, groups: int) -> torch.Tensor:
    """Bytes [n, g * m] in groups of m, each shifted right by 0, step, ... up to 8 bits: [n, g, 8 / step, m].

    The bits of a weight are the lowest of what comes; those above belong to others.
    """
    shifts = torch.arange(0, 8, step, dtype=torch.uint8, device=values.device)
    return values.reshape(len(values), groups, 1, -1) >> shifts.view(1, 1, -1, 1)


def nonlinear(places: torch.Tensor) -> torch.Tensor:
    """Return the value of the table at each place 0-15, in float32."""
    table = table_of(NONLINEAR, places.device).to(torch.float32)
    return table.index_select(0, places.reshape(-1).to(torch.int32)).view(places.shape)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """Bytes [n, 16] as integers of 4 bits [n, 32]: the low halves, then the high ones."""
    return shifted(values, 4, 1).bitwise_and_(15).view(len(values), 32)


def _with_fifth_bits(values: torch.Tensor) -> torch.Tensor:
    """Bytes [n, 4 + 16], the fifth bits first, as integers of 5 bits [n, 32]."""
    each = torch.arange(8, dtype=torch.uint8, device=values.device)
    fifth = (values[:, :4, None] >> each).bitwise_and_(1).view(len(values), 32)
    return _nibbles(values[:, 4:]).bitwise_or_(fifth.mul_(16))
