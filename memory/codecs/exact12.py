"""Lossless bf16 in about 12 bits: 15 exponents cover nearly all weights of a trained tensor.

A weight is one byte of sign and mantissa, and a code of 4 bits for its exponent, two codes a byte. Code 15 marks an
outlier: such a weight is stored whole in a list, with its index. Exponents carry some 2.6 bits of information
(DFloat11, arXiv 2504.11651, which uses Huffman codes; ZipNN, arXiv 2411.05239). Codes of a fixed 4 bits cost a little
more, but each decodes independently of those before it. Binade (PyPI) uses the same code at run time.
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

CODES = 15  # the 16th code marks outliers
_APART_BYTES = 6  # of an outlier: an index of 4 bytes and a value of 2
_SIGN_AND_MANTISSA = 0x807F - 2**16  # the mask 0x807F as a signed int16

_ENCODED_AT_ONCE = 2**18  # weights: about a core's cache, yet numpy calls long enough to make the GIL no bottleneck
_SAMPLES, _SAMPLE = 256, 2**12  # a large tensor's exponents are counted in 256 runs of 4096 weights
_LARGEST = 2**31 - 1  # weights: indices have 32 bits
_PLANNED_APART = 0.002  # share of outliers assumed before a weight is known


@dataclass(frozen=True)
class Exact12(Codec):
    """bf16 with `apart` outliers. The last weight of an odd number is always stored as an outlier."""

    apart: int
    name: ClassVar[str] = "exact12"
    chunk_bytes: ClassVar[int] = 2  # an index of 4 bytes for two weights, then sign and mantissa in 2 bytes each

    def __post_init__(self) -> None:
        if self.dtype != torch.bfloat16:
            raise ValueError(f"{self.name} of {self.shape} holds bfloat16, not {self.dtype}.")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Signs with mantissas, codes, the table of exponents, and the indices and values of the outliers."""
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
        """The codec with the planned number of outliers, since the real one differs from tensor to tensor."""
        return planned(self.shape, self.dtype)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, and of the table of pairs with its inputs."""
        return super().workspace_bytes + 4096

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        mantissas, codes, exponents, places, values = parts
        shifted = exponents.to(torch.int16) << 7
        table = pair_table(shifted, shifted).view(torch.int32).view(-1)
        bits, most = out.view(torch.int16), CHUNK_WEIGHTS
        for pairs in chunks(codes.numel(), most // 2):
            chunk = slice(2 * pairs.start, 2 * pairs.stop)
            target = bits[chunk]
            torch.index_select(table, 0, codes[pairs].to(torch.int32), out=target.view(torch.int32))
            target |= mantissas[chunk].view(torch.int8).to(torch.int16).bitwise_and_(_SIGN_AND_MANTISSA)
        for some in chunks(self.apart, most // 4):
            bits.index_copy_(0, places[some].to(torch.int64), values[some])


def planned(shape: tuple[int, ...], dtype: torch.dtype) -> Codec:
    """Return the approximate codec that `encode` makes of a trained weight: 12.1 bits a weight, or raw.

    Measured in convolutions and transformers: 12.00 to 12.10 bits, with up to 0.2 % outliers.
    """
    count = prod(shape)
    codec = Exact12(shape, torch.bfloat16, ceil(_PLANNED_APART * count))
    shrinks = dtype == torch.bfloat16 and codec.encoded_bytes < codec.decoded_bytes
    return codec if shrinks and count <= _LARGEST else Raw(shape, dtype, dtype)


def encode(weight: torch.Tensor, threads: int = 1) -> Encoded:
    """Encode a weight on the CPU. The result is raw if the weight is not bf16, or would not shrink.

    Every bit pattern is restored, NaN payloads included. `threads` share the work. A caller that encodes weights in
    several threads leaves it at 1.
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
    if len(kept) < len(found) or codec.encoded_bytes >= codec.decoded_bytes:
        return raw.encode(weight)
    values = encoder.bits[places].view(np.int16)
    stored = (encoder.mantissas, encoder.codes, encoder.exponents, places.astype(np.int32), values)
    return codec, tuple(torch.from_numpy(part) for part in stored)


class _Encoder:
    """Fills `mantissas` and `codes`, by a table of the codes of all pairs of exponents.

    It uses numpy: on pieces that stay in the cache its calls cost a third of torch's, and start no threads.
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
        """Encode a span of even bounds. Return the indices of its outliers, or None if they are too many to shrink."""
        found, (one, other) = np.empty(_ENCODED_AT_ONCE, np.uint8), np.empty((2, _ENCODED_AT_ONCE), np.uint16)
        apart, count = [np.empty(0, np.int64)], 0
        for begin in range(span.start, span.stop, _ENCODED_AT_ONCE):
            end = min(begin + _ENCODED_AT_ONCE, span.stop)
            bits, codes = self.bits[begin:end], self.codes[begin // 2 : end // 2]
            exponents, high, low = (each[: end - begin] for each in (found, one, other))
            # A cast from uint16 to uint8 keeps the low byte: here the exponent, without the sign above it.
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
    """Return the 15 commonest exponents, uint8 [16], of which the last is unused.

    In a large tensor they are counted in samples spread over all of it.
    """
    if len(bits) > 2 * _SAMPLES * _SAMPLE:
        starts = [run * (len(bits) - _SAMPLE) // (_SAMPLES - 1) for run in range(_SAMPLES)]
        bits = np.concatenate([bits[start : start + _SAMPLE] for start in starts])
    times = np.bincount((bits >> 7) & 0xFF, minlength=256)
    found = np.zeros(16, np.uint8)
    found[:CODES] = np.argsort(-times, kind="stable")[:CODES]
    return found
