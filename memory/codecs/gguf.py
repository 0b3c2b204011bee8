"""Block types of GGUF, the format of llama.cpp: blocks of 32 or 256 weights of a row, each with its own scales.

The layouts are those of ggml-quants (github.com/ggml-org/llama.cpp) and of the package `gguf`. Decoding computes in
float32, where it equals that package bit for bit, and rounds once to the dtype of the result. By default diffusers
computes in the float16 of the scales instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar, NamedTuple

import torch

from . import gguf_k, gguf_simple
from .codec import CHUNK_WEIGHTS, Codec, Part, chunks
from .raw import Raw

Decoder = Callable[[torch.Tensor], torch.Tensor]


class BlockType(NamedTuple):
    """One GGUF type: weights and bytes of a block, and its decoder.

    `decode` takes uint8 [n, nbytes] and returns float32 [n, weights].
    """

    name: str
    weights: int
    nbytes: int
    decode: Decoder | None = None  # None: not decoded by Ballast, or a plain type
    plain: torch.dtype | None = None  # the dtype, if torch has the type itself
    chunk_bytes: float = 5  # of intermediates for each weight of a chunk


# By the type numbers of GGUF files (`ggml_type`).
TYPES = {
    0: BlockType("F32", 1, 4, plain=torch.float32),
    1: BlockType("F16", 1, 2, plain=torch.float16),
    2: BlockType("Q4_0", 32, 18, gguf_simple.q4_0),
    3: BlockType("Q4_1", 32, 20, gguf_simple.q4_1),
    6: BlockType("Q5_0", 32, 22, gguf_simple.q5_0),
    7: BlockType("Q5_1", 32, 24, gguf_simple.q5_1),
    8: BlockType("Q8_0", 32, 34, gguf_simple.q8_0, chunk_bytes=4.125),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84, gguf_k.q2_k, chunk_bytes=5.5),
    11: BlockType("Q3_K", 256, 110, gguf_k.q3_k, chunk_bytes=5.375),
    12: BlockType("Q4_K", 256, 144, gguf_k.q4_k, chunk_bytes=5.25),
    13: BlockType("Q5_K", 256, 176, gguf_k.q5_k, chunk_bytes=5.25),
    14: BlockType("Q6_K", 256, 210, gguf_k.q6_k, chunk_bytes=5.25),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, gguf_simple.iq4_nl, chunk_bytes=9),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, gguf_k.iq4_xs, chunk_bytes=9.1875),
    24: BlockType("I8", 1, 1, plain=torch.int8),
    25: BlockType("I16", 1, 2, plain=torch.int16),
    26: BlockType("I32", 1, 4, plain=torch.int32),
    27: BlockType("I64", 1, 8, plain=torch.int64),
    28: BlockType("F64", 1, 8, plain=torch.float64),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, plain=torch.bfloat16),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
_BY_NAME = {kind.name: kind for kind in TYPES.values()}


def block_type(name: str) -> BlockType:
    """Return the block type of a name such as "Q4_K"."""
    return _BY_NAME[name]


@dataclass(frozen=True)
class Gguf(Codec):
    """A weight in consecutive blocks of one type; `kind` is the name of the type, such as "Q4_K"."""

    kind: str
    name: ClassVar[str] = "gguf"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The blocks, as bytes."""
        kind = _BY_NAME[self.kind]
        return (Part("blocks", torch.uint8, self.count // kind.weights * kind.nbytes),)

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Bytes of a row; None if a block holds weights of several rows, as in small convolutions."""
        kind, row = _BY_NAME[self.kind], self.count // max(1, self.shape[0])
        return None if row % kind.weights else (row // kind.weights * kind.nbytes,)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, of the shifts and of the tables."""
        return ceil(min(self.count, CHUNK_WEIGHTS) * _BY_NAME[self.kind].chunk_bytes) + 512

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        kind = _BY_NAME[self.kind]
        assert kind.decode is not None  # `codec_of` refuses such types
        blocks, result = parts[0].view(-1, kind.nbytes), out.view(-1, kind.weights)
        for some in chunks(len(blocks), CHUNK_WEIGHTS // kind.weights):
            result[some] = kind.decode(blocks[some])


def codec_of(kind: BlockType, shape: tuple[int, ...], dtype: torch.dtype) -> Codec:
    """Return the codec of a weight of type `kind`, decoded to `dtype`. Plain types keep their own dtype.

    Raises ValueError if Ballast does not decode the type, or if `shape` is not made of whole blocks.
    """
    if kind.plain is not None:
        return Raw(shape, kind.plain, kind.plain)
    if kind.decode is None:
        known = ", ".join(sorted(each.name for each in TYPES.values() if each.decode))
        raise ValueError(f"is stored as {kind.name}, which Ballast does not decode. Get the file in one of {known}.")
    if not shape or prod(shape) % kind.weights:
        raise ValueError(
            f"of {shape} is no whole blocks of {kind.name}, {kind.weights} weights each. Download it again."
        )
    return Gguf(shape, dtype, kind.name)
