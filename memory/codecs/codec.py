"""The base of all codecs: the bytes that a weight is stored as, the cost of decoding, and the call that decodes.

A codec is plain data about one weight, known from a file's header or when the weight is encoded: its stored bytes may
then lie anywhere. It imports no other room, holds no tensor, and no tensor subclass is made or met.
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

# Decoded at once: what a chunk needs beside its result stays in the cache of most cards.
CHUNK_WEIGHTS = 2**20

C = TypeVar("C", bound="Codec")


@dataclass(frozen=True)
class Part:
    """One of the flat tensors that a weight is stored as: so many elements of a type."""

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Codec(ABC):
    """How one weight of a shape is stored, and the type that it is decoded to.

    Decoding is work of the device alone for every codec here: all counts are known on the host before, nothing is
    copied to the device for it, and the host never waits for a result.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: ClassVar[str]
    chunk_bytes: ClassVar[int] = 0  # that decoding holds for each weight of a chunk, beside `parts` and `out`

    @property
    def count(self) -> int:
        """Weights."""
        return prod(self.shape)

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return the stored parts, in the order in which `decode` takes them."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts: what lies in RAM and crosses the bus."""
        return sum(part.nbytes for part in self.parts)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the plain tensor."""
        return self.count * self.dtype.itemsize

    @property
    def workspace_bytes(self) -> int:
        """The most that decoding holds on the device at once, beside the parts and the result."""
        return min(self.count, CHUNK_WEIGHTS) * self.chunk_bytes

    @property
    def alike(self) -> Codec:
        """One that decoding costs as much, and the same for all weights of this shape: to be priced once."""
        return self

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Elements of each part that are of one row, 0 of a part that is of all rows; None if rows do not lie apart."""
        return None

    def of_rows(self: C, rows: int) -> C:
        """Return the codec of so many of the rows. ValueError where rows do not lie apart."""
        if self.row_parts is None:
            raise ValueError(f"{self.name} of {self.shape} has no rows that lie apart.")
        return replace(self, shape=(rows, *self.shape[1:]))

    def taken(self: C, begin: int, end: int) -> tuple[C, tuple[slice, ...]]:
        """Return the codec of the rows from `begin` to `end`, and which elements of each part are theirs.

        ValueError where these rows do not lie apart from the others.
        """
        if self.row_parts is None or not 0 <= begin < end <= self.shape[0]:
            raise ValueError(f"{self.name} of {self.shape} has no rows {begin} to {end} that lie apart.")
        of_all = zip(self.row_parts, self.parts, strict=True)
        taken = (slice(begin * each, end * each) if each else slice(0, part.count) for each, part in of_all)
        return self.of_rows(end - begin), tuple(taken)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the weight into `out`, a contiguous tensor of `shape` (or as many elements) and `dtype`.

        `parts` are flat and contiguous, on the device of `out`. Raises ValueError, before anything is written, if they
        or `out` are not as this codec says.
        """
        given = [(part.dtype, part.numel()) for part in parts]
        if given != [(part.dtype, part.count) for part in self.parts]:
            raise ValueError(f"{self.name} of {self.shape} is stored as {_told(self.parts)}, not as {given}.")
        if (out.dtype, out.numel()) != (self.dtype, self.count):
            raise ValueError(
                f"{self.name} of {self.shape} becomes {self.dtype}, not {out.dtype} of {tuple(out.shape)}."
            )
        if any(not tensor.is_contiguous() or tensor.device != out.device for tensor in (*parts, out)):
            raise ValueError(f"{self.name} of {self.shape} needs contiguous parts and result, all on {out.device}.")
        if self.count:
            self._decode([part.view(-1) for part in parts], out.view(-1))

    @abstractmethod
    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Return the same with flat tensors that were checked, and at least one weight."""

    def fitted(self: C, shape: tuple[int, ...], dtype: torch.dtype) -> C:
        """Return the same stored bytes as a parameter of a module takes them.

        ValueError if they are not that parameter's.
        """
        with suppress(ValueError):
            fitted = replace(self, shape=tuple(shape), dtype=dtype)
            if fitted.parts == self.parts:
                return fitted
        raise ValueError(f"{self.name} of {self.shape} does not hold a weight of {tuple(shape)}.")


Encoded = tuple[Codec, tuple[torch.Tensor, ...]]  # what encoding gives: the codec, and its parts


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield a matrix in parts of at most a chunk: some whole rows, or some of one row."""
    high = max(1, CHUNK_WEIGHTS // columns)
    wide = min(columns, CHUNK_WEIGHTS)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def chunks(count: int, step: int = CHUNK_WEIGHTS) -> Iterator[slice]:
    """Yield slices over `count` elements, a step at a time."""
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def pair_table(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Combine two tables of 16 entries to one of 256, so that one lookup decodes two weights: [256, 2] of their type.

    At each byte it has the entry of the first at the byte's low half, and that of the second at its high half.
    """
    return torch.stack((first.expand(16, 16), second[:, None].expand(16, 16)), dim=-1).reshape(256, 2)


def table_of(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a multiple of 8 int8 values as a tensor on a device, by fills.

    To copy a list there makes the host wait.
    """
    eights = struct.unpack(f"<{len(values) // 8}q", struct.pack(f"<{len(values)}b", *values))
    return torch.cat([torch.full((1,), eight, dtype=torch.int64, device=device) for eight in eights]).view(torch.int8)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Values in float32, exact. On a device without float8, MPS, by their bytes and a table."""
    try:
        return values.to(torch.float32)
    except (RuntimeError, TypeError):  # if it is memory that has run out, it will again
        if values.dtype not in _FLOAT8:
            raise
    table = _values_of(values.dtype, values.device)
    flat = values.view(torch.uint8).reshape(-1)
    made = torch.empty(len(flat), dtype=torch.float32, device=values.device)
    for some in chunks(len(flat), -(-len(flat) // 8) or 1):  # indices are as large as values
        made[some] = table.index_select(0, flat[some].to(torch.int32))
    return made.view(values.shape)


_FLOAT8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits of the mantissa


def _values_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the value of each byte in float32, [256]. Made by integers, since a device may flush what is subnormal."""
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
