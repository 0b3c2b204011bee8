"""The base class of all codecs: the encoded parts of a weight, its sizes in bytes, and the call that decodes it.

A codec is plain, frozen data about one weight. It is known from a file's header, or made when the weight is encoded.
It holds no tensor: the encoded bytes may lie on disk, in RAM or on the device. Decoding takes and gives plain tensors,
never a tensor subclass. This module imports nothing else of Ballast.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeVar

import torch

# Weights decoded at once. The intermediates of a chunk, at most 10 MB, stay in the cache of most cards.
CHUNK_WEIGHTS = 2**20

C = TypeVar("C", bound="Codec")


@dataclass(frozen=True)
class Part:
    """One of the flat tensors that a weight is encoded as: `count` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of this part."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Codec(ABC):
    """The encoding of one weight of `shape`, and the `dtype` that it is decoded to.

    Invariant of all codecs: decoding is work of the device alone. All counts are known on the host beforehand, nothing
    is copied to the device, and the host never waits for a result. So it can be queued on a stream.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: ClassVar[str]
    chunk_bytes: ClassVar[int] = 0  # of intermediates for each weight of a chunk, beside `parts` and `out`

    @property
    def count(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The encoded parts, in the order in which `decode` takes them."""

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all parts, which lie in RAM and cross the bus."""
        return sum(part.nbytes for part in self.parts)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded, plain tensor."""
        return self.count * self.dtype.itemsize

    @property
    def workspace_bytes(self) -> int:
        """Peak bytes of the intermediates of `decode` on the device, beside the parts and the result."""
        return min(self.count, CHUNK_WEIGHTS) * self.chunk_bytes

    @property
    def alike(self) -> Codec:
        """A codec with the same decoding cost, equal for all weights of this shape: `cost_of` caches by it."""
        return self

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Elements of each part that belong to one row, 0 for a part shared by all rows.

        None if the rows are not separable, as where a block holds weights of two rows.
        """
        return None

    def of_rows(self: C, rows: int) -> C:
        """Return the codec of a weight with `rows` rows. Raises ValueError if `row_parts` is None."""
        if self.row_parts is None:
            raise ValueError(f"{self.name} of {self.shape} has no rows that lie apart.")
        return replace(self, shape=(rows, *self.shape[1:]))

    def taken(self: C, begin: int, end: int) -> tuple[C, tuple[slice, ...]]:
        """Return the codec of the rows from `begin` up to `end`, and the slice of each part that holds them.

        Raises ValueError if these rows are not separable from the others.
        """
        if self.row_parts is None or not 0 <= begin < end <= self.shape[0]:
            raise ValueError(f"{self.name} of {self.shape} has no rows {begin} to {end} that lie apart.")
        of_all = zip(self.row_parts, self.parts, strict=True)
        taken = (slice(begin * each, end * each) if each else slice(0, part.count) for each, part in of_all)
        return self.of_rows(end - begin), tuple(taken)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode the weight into `out`, a contiguous tensor of `count` elements of `dtype`.

        `parts` are contiguous and on the device of `out`. Raises ValueError, before anything is written, if dtype,
        number of elements, layout or device of a part or of `out` is another.
        """
        flat, result = self.flattened(parts, out)
        if self.count:
            self._decode(flat, result)

    def flattened(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the arguments of `decode` as flat views. Raises what `decode` raises."""
        given = [(part.dtype, part.numel()) for part in parts]
        if given != [(part.dtype, part.count) for part in self.parts]:
            raise ValueError(f"{self.name} of {self.shape} is stored as {_told(self.parts)}, not as {given}.")
        if (out.dtype, out.numel()) != (self.dtype, self.count):
            raise ValueError(
                f"{self.name} of {self.shape} becomes {self.dtype}, not {out.dtype} of {tuple(out.shape)}."
            )
        if any(not tensor.is_contiguous() or tensor.device != out.device for tensor in (*parts, out)):
            raise ValueError(f"{self.name} of {self.shape} needs contiguous parts and result, all on {out.device}.")
        return [part.view(-1) for part in parts], out.view(-1)

    @abstractmethod
    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode into `out`, as `decode` does. All tensors are flat and checked, and there is at least one weight."""

    def fitted(self: C, shape: tuple[int, ...], dtype: torch.dtype) -> C:
        """Return the codec of the same encoded bytes for a module's parameter of this shape and dtype.

        Raises ValueError if a weight of that shape would be encoded as other parts.
        """
        with suppress(ValueError):
            fitted = replace(self, shape=tuple(shape), dtype=dtype)
            if fitted.parts == self.parts:
                return fitted
        raise ValueError(f"{self.name} of {self.shape} does not hold a weight of {tuple(shape)}.")


Encoded = tuple[Codec, tuple[torch.Tensor, ...]]  # the result of encoding: the codec, and its parts


def tiles(rows: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, columns) of a matrix in tiles of at most `most` weights: whole rows, or a part of one row."""
    high = max(1, most // columns)
    wide = min(columns, most)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def chunks(count: int, step: int) -> Iterator[slice]:
    """Yield slices over `count` elements, `step` at a time. The last one may be shorter."""
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def pair_table(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Combine two tables of 16 entries into one for a whole byte, so that one lookup decodes two weights.

    The result is [256, 2] of their dtype. Entry `b` holds `first[b & 15]` and `second[b >> 4]`.
    """
    return torch.stack((first.expand(16, 16), second[:, None].expand(16, 16)), dim=-1).reshape(256, 2)


def table_of(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `values` as an int8 tensor on a device. Their number is a multiple of 8.

    It is made by fills of 8 bytes each: to copy a list to the device makes the host wait.
    """
    eights = struct.unpack(f"<{len(values) // 8}q", struct.pack(f"<{len(values)}b", *values))
    return torch.cat([torch.full((1,), eight, dtype=torch.int64, device=device) for eight in eights]).view(torch.int8)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Return the values in float32, which is exact.

    A device without float8 kernels, such as MPS, looks float8 bytes up in a table.
    """
    try:
        return values.to(torch.float32)
    except (RuntimeError, TypeError):  # out of memory comes here too, and is raised again below
        if values.dtype not in _FLOAT8:
            raise
    table = _values_of(values.dtype, values.device)
    flat = values.view(torch.uint8).reshape(-1)
    made = torch.empty(len(flat), dtype=torch.float32, device=values.device)
    for some in chunks(
        len(flat), -(-len(flat) // 8) or 1
    ):  # an eighth at a time: the int32 indices take as much as the result
        made[some] = table.index_select(0, flat[some].to(torch.int32))
    return made.view(values.shape)


_FLOAT8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # mantissa bits


def _values_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the value of each float8 byte, float32 [256]. By integer operations: a device may flush subnormals."""
    bits = _FLOAT8[dtype]
    bias, codes = 2 ** (6 - bits) - 1, torch.arange(256, dtype=torch.int32, device=device)
    mantissa, exponent = codes & (2**bits - 1), (codes & 127) >> bits
    whole = ((exponent + (127 - bias)) << 23 | mantissa << (23 - bits)).view(torch.float32)
    values = torch.where(exponent == 0, mantissa.to(torch.float32) * 2.0 ** (1 - bias - bits), whole)
    if dtype == torch.float8_e5m2:
        values = values.masked_fill(exponent == 31, torch.inf).masked_fill((exponent == 31) & (mantissa > 0), torch.nan)
    else:
        values = values.masked_fill((codes & 127) == 127, torch.nan)
    return torch.where(codes > 127, -values, values)


def _told(parts: Sequence[Part]) -> list[tuple[torch.dtype, int]]:
    return [(part.dtype, part.count) for part in parts]
