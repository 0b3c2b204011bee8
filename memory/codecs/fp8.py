"""Weights of 8-bit floats, e4m3 or e5m2 (arXiv 2209.05433), with a scale for each row, or one for all.

Made at load from plain weights, or found in files: `float8_e4m3fn` and `float8_e5m2` of ComfyUI, and the older
`scaled_fp8`. Fp8 without scales is raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from . import scaled
from .scaled import Scaled

LARGEST = 448  # of e4m3


@dataclass(frozen=True)
class Fp8(Scaled):
    """Floats of 8 bits times scales."""

    name: ClassVar[str] = "fp8"


def encode(weight: torch.Tensor) -> scaled.Encoded:
    """A matrix on the CPU in e4m3 with a scale for each row, that of its largest value 448; raw where it is no gain."""
    return scaled.encode(
        weight,
        LARGEST,
        lambda shape, dtype, rows: Fp8(shape, dtype, torch.float8_e4m3fn, rows),
        lambda values: values.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn),
    )
