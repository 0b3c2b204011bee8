"""The header of a GGUF file (the format of llama.cpp, versions 2 and 3): its facts, and the places of its tensors.

Read by plain bounded reads. The package `gguf` maps the file and makes objects of every word of a tokenizer, and a
damaged count keeps it busy for ever. Here no memory is allocated and no loop runs for a size that a file only claims.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from ..codecs.gguf import TYPES, BlockType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 * 2**20  # a tokenizer of 262 144 words takes a third of it
_MAX_COUNT = 100_000  # tensors, and facts: models have thousands
_MAX_NAME_BYTES, _MAX_TEXT_BYTES = 1024, 4096  # longer texts (chat templates) are skipped
_MAX_DIMENSIONS = 8  # ggml has 4; tools that put 3D convolutions back write 5
_MAX_SHORT_ARRAY, _MAX_DEPTH = 8, 4
_ALIGNMENT = "general.alignment"
_SHAPES = "comfy.gguf.orig_shape."  # prefix of the facts where city96's converter notes shapes that it flattened

# Types of values by number, as `struct` reads them. 7 is bool, 8 text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

Fact = int | float | bool | str | tuple[int, ...]
Words = list[str | None] | tuple[float, ...]  # texts, or numbers; None for a long text


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its block type, its shape as torch has it, and its first byte in the file."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return prod(self.shape) // self.kind.weights * self.kind.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """The content of a header: facts by key, without long texts and arrays, and tensors by name."""

    facts: dict[str, Fact]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF: by its name, or by its first bytes where it has another name."""
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Checked: every tensor is whole blocks, inside the file, on bytes of its own. Raises FileNotFoundError, or ValueError
    in one line if the file is damaged, cut short, or not GGUF.
    """
    return _read(path, frozenset())[0]


def read_gguf_arrays(path: Path, names: Collection[str]) -> dict[str, Words]:
    """Read the named arrays of the header whole, such as the words of a tokenizer. Raises as `read_gguf_header`."""
    return _read(path, names)[1]


def _read(path: Path, names: Collection[str]) -> tuple[GgufHeader, dict[str, Words]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Put it back, or download it again.")
    with path.open("rb", buffering=2**20) as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself. Download the file.")
        if len(start) < 8 or not start.startswith(MAGIC):
            raise ValueError(f"{path} is no GGUF file. Download it again.")
        version = struct.unpack("<I", start[4:])[0]
        if version not in _VERSIONS:
            raise ValueError(f"{path} is GGUF of version {version}; Ballast reads 2 and 3. Get a newer file.")
        size = path.stat().st_size
        try:
            reader = _Reader(file, size, names)
            return reader.header(), reader.arrays
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} has a damaged header ({error}). Download it again.") from error


class _Reader:
    """Reads a header value by value. `_account` checks every count against the file's size before it is read."""

    def __init__(self, file: BinaryIO, size: int, names: Collection[str]) -> None:
        self._file, self._size, self._at, self._names = file, size, 8, names
        self.arrays: dict[str, Words] = {}  # the arrays that `names` asks for

    def header(self) -> GgufHeader:
        """Read the whole header: facts, then the tensors' names, shapes, types and offsets."""
        tensor_count, fact_count = self._numbers("QQ")
        if max(tensor_count, fact_count) > _MAX_COUNT:
            raise ValueError(f"it claims {tensor_count} tensors and {fact_count} facts")
        facts: dict[str, Fact] = {}
        for _ in range(fact_count):
            key, of = self._name(), self._number("I")
            if of == _ARRAY and key in self._names:
                self.arrays[key] = self._array()
                continue
            value = self._value(of)
            if value is not None:
                facts[key] = value
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = facts.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in infos:
            if name in tensors:
                raise ValueError(f"{name[:80]} stands twice")
            if offset % alignment:
                raise ValueError(f"{name[:80]} begins at byte {offset}, which is not aligned")
            tensors[name] = GgufTensor(kind, _shape(name, shape, facts.get(_SHAPES + name)), begin + offset)
        self._check_places(tensors)
        return GgufHeader(facts, tensors)

    def _check_places(self, tensors: dict[str, GgufTensor]) -> None:
        """Raise ValueError for tensors that overlap each other or the header, or end behind the file."""
        end = self._at
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset < end:
                raise ValueError(f"{name[:80]} lies on the bytes of another tensor")
            end = tensor.offset + tensor.nbytes
            if end > self._size:
                raise ValueError(f"{name[:80]} ends at byte {end} of {self._size}")

    def _tensor_info(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Read one tensor's name, block type, shape and offset in the data."""
        name = self._name()
        dimensions = self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{name[:80]} has {dimensions} dimensions")
        shape = self._numbers("Q" * dimensions)[::-1]  # GGUF has the dimension that varies fastest first
        number, offset = self._numbers("IQ")
        if number not in TYPES:
            raise ValueError(f"{name[:80]} is of type {number}, which is not known")
        kind = TYPES[number]
        if prod(shape) >= 2**60 or offset >= 2**60:
            raise ValueError(f"{name[:80]} is said to be {shape}")
        if (shape[-1] if shape else 1) % kind.weights:
            raise ValueError(f"{name[:80]} of {shape} is no whole blocks of {kind.name}, {kind.weights} weights each")
        return name, kind, shape, offset

    def _value(self, kind: int, depth: int = 0) -> Fact | None:
        """Return a value of the type `kind`; None for a long text or an array that is skipped."""
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ValueError(f"a fact is of kind {kind}")
        of, count = self._numbers("IQ")
        if of in _SCALARS and (count > _MAX_SHORT_ARRAY or of in (6, 7, 12)):
            self._pass_over(count * struct.calcsize(_SCALARS[of]))
            return None
        if of in _SCALARS:
            return self._numbers(_SCALARS[of] * count)
        if count > _MAX_HEADER_BYTES:
            raise ValueError(f"a fact has {count} values")
        for _ in range(count):
            self._value(of, depth + 1)
        return None

    def _array(self) -> Words:
        """Read an array whole: its texts or numbers."""
        of, count = self._numbers("IQ")
        if of not in (*_SCALARS, _TEXT) or count > _MAX_HEADER_BYTES:
            raise ValueError(f"an array has {count} values of kind {of}")
        if of == _TEXT:
            return [self._text() for _ in range(count)]
        size = struct.calcsize(_SCALARS[of])
        return struct.unpack(f"<{count}{_SCALARS[of]}", self._take(count * size))

    def _name(self) -> str:
        length = self._number("Q")
        if length > _MAX_NAME_BYTES:
            raise ValueError(f"a name has {length} bytes")
        name = self._take(length).decode("utf-8")
        if not name.isprintable():
            raise ValueError("a name is no text")
        return name

    def _text(self) -> str | None:
        length = self._number("Q")
        if length > _MAX_TEXT_BYTES:
            self._pass_over(length)
            return None
        return self._take(length).decode("utf-8", "replace")

    def _number(self, kind: str) -> int:
        return self._numbers(kind)[0]

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        return struct.unpack("<" + kinds, self._take(struct.calcsize("<" + kinds)))

    def _take(self, count: int) -> bytes:
        self._account(count)
        taken = self._file.read(count)
        if len(taken) < count:
            raise ValueError("it ends within the header")
        return taken

    def _pass_over(self, count: int) -> None:
        self._account(count)
        self._file.seek(count, 1)

    def _account(self, count: int) -> None:
        """Count bytes of the header. ValueError if they exceed the file, or `_MAX_HEADER_BYTES`."""
        self._at += count
        if self._at > min(self._size, _MAX_HEADER_BYTES):
            raise ValueError(f"it claims {self._at} bytes of header in a file of {self._size}")


def _shape(name: str, shape: tuple[int, ...], noted: Fact | None) -> tuple[int, ...]:
    """Return the shape of a tensor, or the one that the converter `noted` before it flattened dimensions."""
    if noted is None:
        return shape
    if not isinstance(noted, tuple) or min(noted, default=-1) < 0 or prod(noted) != prod(shape):
        raise ValueError(f"{name[:80]} of {shape} is noted to have been {noted}")
    return noted
