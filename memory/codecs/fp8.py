"""Weights in 8-bit floats, e4m3 or e5m2 (arXiv 2209.05433), with a scale for each row, or one for all.

Files hold them as `float8_e4m3fn` and `float8_e5m2` of ComfyUI, or the older `scaled_fp8`. Fp8 without scales is `Raw`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from . import scaled
from .codec import Codec, Encoded
from .raw import Raw
from .scaled import Scaled

LARGEST = 448  # of e4m3


@dataclass(frozen=True)
class Fp8(Scaled):
    """8-bit floats times scales."""

    name: ClassVar[str] = "fp8"


def planned(shape: tuple[int, ...], dtype: torch.dtype) -> Codec:
    """Return the codec that `encode` gives a weight of finite values.

    It has a scale for each row, or is raw if that would not make the weight smaller.
    """
    gains = scaled.gains(shape, dtype)
    return Fp8(shape, dtype, torch.float8_e4m3fn, shape[0]) if gains else Raw(shape, dtype, dtype)


def encode(weight: torch.Tensor) -> Encoded:
    """Encode a weight on the CPU in e4m3. Each row is scaled so that its largest absolute value becomes 448."""
    made = planned(tuple(weight.shape), weight.dtype)
    return scaled.encode(weight, made, LARGEST, lambda values: values.to(torch.float8_e4m3fn))
