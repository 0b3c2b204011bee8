"""bf16 without loss in 12 bits: the exponents of a trained tensor are few, and 15 of them stand for nearly all.

Each weight is a byte of sign and mantissa, and a code of 4 bits for its exponent, two in a byte; code 15 says that the
weight lies apart, whole, with its place. Exponents carry some 2.6 bits of information (DFloat11, arXiv 2504.11651,
which codes them by Huffman; ZipNN, arXiv 2411.05239): 4 bits of fixed length cost a little more, and decode without
looking at what comes before. Binade (PyPI) uses the same code at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

import numpy as np
import torch

from . import raw
from .codec import CHUNK_WEIGHTS, Codec, Encoded, Part, chunks, pair_table
from .raw import Raw

CODES = 15  # the 16th is of what lies apart
_APART_BYTES = 6  # of a weight that lies apart: its place and its value
_SIGN_AND_MANTISSA = 0x807F - 2**16  # of 16 bits, as torch's int16 has them

_ENCODED_AT_ONCE = 2**18  # about a core's cache, and long enough for threads not to wait for each other's Python
_SAMPLES, _SAMPLE = 256, 2**12  # runs of a large tensor in which its exponents are counted
_LARGEST = 2**31 - 1  # places are of 32 bits
_PLANNED_APART = 0.002


@dataclass(frozen=True)
class Exact12(Codec):
    """bf16 with `apart` weights that have none of the 15 exponents; the last of an odd number is always one."""

    apart: int
    name: ClassVar[str] = "exact12"
    chunk_bytes: ClassVar[int] = 2  # two weights' index of 32 bits, then a sign and a mantissa widened to 16

    @property
    def parts(self) -> tuple[Part, ...]:
        """Signs and mantissas, codes, the exponents they stand for, and what lies apart."""
        pairs = self.count // 2
        return (
            Part("mantissas", torch.uint8, 2 * pairs),
            Part("codes", torch.uint8, pairs),
            Part("exponents", torch.uint8, 16),
            Part("places", torch.int32, self.apart),
            Part("values", torch.int16, self.apart),
        )

    @property
    def alike(self) -> Codec:
        """As many weights apart as are planned, whose number is another for each tensor."""
        return planned(self.shape, self.dtype)

    @property
    def workspace_bytes(self) -> int:
        """That of a chunk, and the table of pairs with what it is made of."""
        return super().workspace_bytes + 4096

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        mantissas, codes, exponents, places, values = parts
        shifted = exponents.to(torch.int16) << 7
        table = pair_table(shifted, shifted).view(torch.int32).view(-1)
        bits = out.view(torch.int16)
        for pairs in chunks(codes.numel(), CHUNK_WEIGHTS // 2):
            chunk = slice(2 * pairs.start, 2 * pairs.stop)
            target = bits[chunk]
            torch.index_select(table, 0, codes[pairs].to(torch.int32), out=target.view(torch.int32))
            target |= mantissas[chunk].view(torch.int8).to(torch.int16).bitwise_and_(_SIGN_AND_MANTISSA)
        for some in chunks(self.apart, CHUNK_WEIGHTS // 4):
            bits.index_copy_(0, places[some].to(torch.int64), values[some])


def planned(shape: tuple[int, ...], dtype: torch.dtype) -> Codec:
    """About what `encode` makes of a trained weight, of which nothing is known yet: 12.1 bits, or raw.

    Measured are 12.00 to 12.10 bits, with up to 2 weights of a thousand apart, in convolutions and transformers.
    """
    count = prod(shape)
    codec = Exact12(shape, torch.bfloat16, ceil(_PLANNED_APART * count))
    shrinks = dtype == torch.bfloat16 and codec.stored_bytes < codec.decoded_bytes
    return codec if shrinks and count <= _LARGEST else Raw(shape, dtype, dtype)


def encode(weight: torch.Tensor, threads: int = 1) -> Encoded:
    """Return a weight on the CPU as this codec stores it; raw if it is not of bf16, or would not shrink.

    Any bits come back as they are. `threads` share the work; what calls this from several threads leaves it at 1.
    """
    flat = weight.detach().reshape(-1)
    if flat.dtype != torch.bfloat16 or not 2 <= flat.numel() <= _LARGEST:
        return raw.encode(weight)
    encoder = _Encoder(flat.view(torch.int16).numpy().view(np.uint16))
    share = -(-encoder.even // (threads * _ENCODED_AT_ONCE)) * _ENCODED_AT_ONCE
    spans = list(chunks(encoder.even, share))
    if len(spans) > 1:
        with ThreadPoolExecutor(threads, "ballast-encoder") as pool:
            found = list(pool.map(encoder.encode, spans))
    else:
        found = [encoder.encode(span) for span in spans]
    kept = [places for places in found if places is not None]
    places = np.concatenate([*kept, np.arange(encoder.even, flat.numel())])
    codec = Exact12(tuple(weight.shape), torch.bfloat16, len(places))
    if len(kept) < len(found) or codec.stored_bytes >= codec.decoded_bytes:
        return raw.encode(weight)
    values = encoder.bits[places].view(np.int16)
    stored = (encoder.mantissas, encoder.codes, encoder.exponents, places.astype(np.int32), values)
    return codec, tuple(torch.from_numpy(part) for part in stored)


class _Encoder:
    """Fills mantissas and codes, by a table of all pairs of exponents.

    In numpy: on pieces that stay in the cache its calls cost a third of torch's, and never start threads of their own.
    """

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        self.even = len(bits) // 2 * 2
        self.exponents = _commonest(bits)
        self.mantissas = np.empty(self.even, np.uint8)
        self.codes = np.empty(self.even // 2, np.uint8)
        codes = np.full(256, CODES, np.uint8)
        codes[self.exponents[:CODES]] = np.arange(CODES)
        self._lies_apart = codes == CODES
        self._pairs = (codes[:, None] << 4 | codes).ravel()

    def encode(self, span: slice) -> np.ndarray | None:
        """Encode a span of even bounds: the places of what lies apart, or None if it is too much to be worth it."""
        found, (one, other) = np.empty(_ENCODED_AT_ONCE, np.uint8), np.empty((2, _ENCODED_AT_ONCE), np.uint16)
        apart, count = [np.empty(0, np.int64)], 0
        for begin in range(span.start, span.stop, _ENCODED_AT_ONCE):
            end = min(begin + _ENCODED_AT_ONCE, span.stop)
            bits, codes = self.bits[begin:end], self.codes[begin // 2 : end // 2]
            exponents, high, low = (each[: end - begin] for each in (found, one, other))
            # Into a byte goes the lower one of 16 bits.
            np.right_shift(bits, 7, out=exponents, casting="unsafe")
            np.bitwise_and(bits, 0x807F, out=low)
            np.right_shift(low, 8, out=high)
            np.bitwise_or(high, low, out=self.mantissas[begin:end], casting="unsafe")
            np.take(self._pairs, exponents.view(np.uint16), out=codes, mode="clip")
            pairs = np.flatnonzero((codes >= 0xF0) | (codes & 0x0F == 0x0F))
            places = (2 * pairs[:, None] + (0, 1)).ravel()
            apart.append(places[self._lies_apart[exponents[places]]] + begin)
            count += len(apart[-1])
            if count * 2 * _APART_BYTES > self.even:
                return None
        return np.concatenate(apart)


def _commonest(bits: np.ndarray) -> np.ndarray:
    """Return the 15 commonest exponents [16, the last unused].

    Of all weights, or in a large tensor of runs all over it.
    """
    if len(bits) > 2 * _SAMPLES * _SAMPLE:
        starts = [run * (len(bits) - _SAMPLE) // (_SAMPLES - 1) for run in range(_SAMPLES)]
        bits = np.concatenate([bits[start : start + _SAMPLE] for start in starts])
    times = np.bincount((bits >> 7) & 0xFF, minlength=256)
    found = np.zeros(16, np.uint8)
    found[:CODES] = np.argsort(-times, kind="stable")[:CODES]
    return found
