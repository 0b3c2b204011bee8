"""GGUF's blocks of 32 weights, with one scale and in some types one offset.

Each block function takes uint8 [n, bytes of a block] and returns float32 [n, 32]. "Layout" lists the fields of a block
in the order of their bytes. `d` is the float16 scale, `m` the float16 offset.
"""

from __future__ import annotations

import torch

from .codec import table_of

# The 16 values of iq4 codes (`kvalues_iq4nl` of llama.cpp), denser near zero, where most weights lie.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 34 bytes, float32 [n, 32].

    Layout: `d`; 32 int8 values.
    """
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(half(blocks, 0))


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 18 bytes, float32 [n, 32].

    Layout: `d`; 16 bytes with 4 bits a weight, biased by 8.
    """
    return _nibbles(blocks[:, 2:]).to(torch.float32).sub_(8).mul_(half(blocks, 0))


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 20 bytes, float32 [n, 32].

    Layout: `d`; `m`; 16 bytes with 4 bits a weight. A weight is `value * d + m`.
    """
    return _nibbles(blocks[:, 4:]).to(torch.float32).mul_(half(blocks, 0)).add_(half(blocks, 2))


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 22 bytes, float32 [n, 32].

    Layout: `d`; 4 bytes with the fifth bit of each weight; 16 bytes with its 4 low bits. Biased by 16.
    """
    return _with_fifth_bits(blocks[:, 2:]).to(torch.float32).sub_(16).mul_(half(blocks, 0))


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 24 bytes, float32 [n, 32].

    Layout: `d`; `m`; 4 bytes with the fifth bit of each weight; 16 bytes with its 4 low bits.
    """
    return _with_fifth_bits(blocks[:, 4:]).to(torch.float32).mul_(half(blocks, 0)).add_(half(blocks, 2))


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of blocks of 18 bytes, float32 [n, 32].

    Layout: `d`; 16 bytes with a code of 4 bits a weight, an index into `NONLINEAR`.
    """
    return nonlinear(_nibbles(blocks[:, 2:])).mul_(half(blocks, 0))


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).to(torch.float32)


def shifted(values: torch.Tensor, step: int, groups: int) -> torch.Tensor:
    """Return each byte shifted right by 0, `step`, 2 `step`, ... below 8 bits: uint8 [n, groups, 8 / step, m].

    `values` are uint8 [n, groups * m]. The lowest `step` bits of a result belong to its weight. The caller masks the
    bits above, which belong to other weights.
    """
    shifts = torch.arange(0, 8, step, dtype=torch.uint8, device=values.device)
    return values.reshape(len(values), groups, 1, -1) >> shifts.view(1, 1, -1, 1)


def nonlinear(places: torch.Tensor) -> torch.Tensor:
    """Return the value in `NONLINEAR` of each code 0-15, in float32 of the same shape."""
    table = table_of(NONLINEAR, places.device).to(torch.float32)
    return table.index_select(0, places.reshape(-1).to(torch.int32)).view(places.shape)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n, 16] as integers of 4 bits, uint8 [n, 32]: all low halves, then all high ones."""
    return shifted(values, 4, 1).bitwise_and_(15).view(len(values), 32)


def _with_fifth_bits(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n, 4 + 16], the fifth bits first, as integers of 5 bits, uint8 [n, 32]."""
    each = torch.arange(8, dtype=torch.uint8, device=values.device)
    fifth = (values[:, :4, None] >> each).bitwise_and_(1).view(len(values), 32)
    return _nibbles(values[:, 4:]).bitwise_or_(fifth.mul_(16))
