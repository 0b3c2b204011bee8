"""Weights stored as plain tensors of any torch dtype. Decoding copies them, with a cast if `dtype` differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .codec import CHUNK_WEIGHTS, Codec, Encoded, Part, chunks, widened


@dataclass(frozen=True)
class Raw(Codec):
    """One plain tensor of dtype `stored`."""

    stored: torch.dtype
    name: ClassVar[str] = "raw"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensor itself."""
        return (Part("weight", self.stored, self.count),)

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Elements of a row."""
        return (self.count // self.shape[0],) if self.shape and self.shape[0] else None

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        try:
            out.copy_(parts[0])
        except (RuntimeError, TypeError):
            if out.dtype == self.stored:
                raise
            for some in chunks(self.count, CHUNK_WEIGHTS):
                out[some] = widened(parts[0][some])


def encode(weight: torch.Tensor) -> Encoded:
    """Return a plain weight as an encoded one: its only part is the weight itself, flat."""
    return Raw(tuple(weight.shape), weight.dtype, weight.dtype), (weight.detach().reshape(-1),)
