"""The content of safetensors files by their headers: the places, shapes and types of tensors, and stamps of files.

Pickled weights are refused, by their name and by their first bytes. Reading a header costs a few kilobytes whatever the
size of the file. Its numbers are checked before use: no memory is allocated for a size that a file only claims.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..files import read_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_WHOLE_NUMBERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in (_DTYPES | _WHOLE_NUMBERS).items()}
# All types of the format -> bits of an element.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32,
    "U64": 64, "C64": 64,
    **{name: dtype.itemsize * 8 for name, dtype in (_DTYPES | _WHOLE_NUMBERS).items()},
}  # fmt: skip
_PICKLES = (".bin", ".ckpt", ".pt", ".pt2", ".pth", ".pkl")
_PICKLE_STARTS = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch's zip archives first
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_NUMBERS = 34  # of one tensor: two offsets, and at most 32 sizes
_WHOLE_BYTES = 4 * 2**20  # files up to this size are hashed whole
_SAMPLE_BYTES, _SAMPLES = 64 * 1024, 16


Stamp = tuple[int, int]  # bytes of a file, and its modification time in ns


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file: `shape` elements of `dtype`, from byte `offset` on.

    `stamp` is the file's when its header was read. A tensor that is not contiguous in the file has `runs`: the offset
    and the number of elements of each run, in the order of the tensor. Its first offset is `offset` too.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stamp: Stamp | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def find_weights(folder: Path) -> tuple[list[Path], str | None]:
    """Return the safetensors files of a model folder, and their variant such as "fp16"; None for the plain name.

    Raises FileNotFoundError if there are none, or a shard of the index is missing. Raises ValueError if there are only
    pickled files.
    """
    incomplete = ""
    indexes = {path: _shards(path) for path in folder.glob("*.safetensors.index*.json")}
    for index, shards in sorted(indexes.items(), key=lambda found: len(found[0].name)):
        missing = [shard for shard in shards if not shard.is_file()]
        if not missing:
            return shards, index.name.split(".safetensors.index")[1].removesuffix(".json").strip(".") or None
        incomplete = incomplete or f"{missing[0]} is missing: the download is not complete. Download it again."
    shard_of_many = re.compile(r"-\d{5}-of-\d{5}$")
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    whole = [path for path in files if not shard_of_many.search(path.stem)]
    if whole:
        file = min(whole, key=lambda path: (len(path.name), path.name))
        return [file], file.stem.partition(".")[2] or None
    if incomplete:
        raise FileNotFoundError(incomplete)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        refuse_pickle(path)
    raise FileNotFoundError(f"no weights in {folder}. Put the model's .safetensors files there.")


def shards_of(path: Path) -> list[Path]:
    """Return the files that a weight file's name says it is one of, such as `-00001-of-00003`, or it alone.

    FileNotFoundError, in one line, for one that is missing.
    """
    if not (numbered := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", path.stem)):
        return [path]
    start, count = numbered[1], int(numbered[2])
    found = [path.with_name(f"{start}-{n:05}-of-{count:05}{path.suffix}") for n in range(1, min(count, 1000) + 1)]
    if missing := [each for each in found if not each.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing beside {path.name}. Put it there, or download it again.")
    return found


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names. ValueError if they are not safetensors files beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is not an index of weights. Download it again.")
    for name in (names := list(weight_map.values())):
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"{index} names {str(name)[:80]!r}, which is no file beside it. Download it again.")
        refuse_pickle(index.with_name(name))
        if not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name}, which is no safetensors file. Get those of this model.")
    return sorted({index.with_name(name) for name in names})


def refuse_pickle(path: Path) -> None:
    """Raise ValueError for a file whose name or first bytes are those of a pickle."""
    start = b""
    if path.suffix == ".safetensors" and path.is_file():
        with path.open("rb") as file:
            start = file.read(8)
    _refuse_pickle(path, start)


def _refuse_pickle(path: Path, start: bytes) -> None:
    # A good header can begin with these two bytes. As a length they are then below the limit; a pickle's 8 are not.
    is_pickled = start.startswith(_PICKLE_STARTS) and int.from_bytes(start, "little") > _MAX_HEADER_BYTES
    if is_pickled or path.suffix.lower() in _PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run code when it is read, and is refused. "
            "Get the safetensors files of this model."
        )


def read_header(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file: name -> {"dtype", "shape", "data_offsets"}.

    They fill the rest of the file without gaps. Raises FileNotFoundError. Raises ValueError if the file is damaged, has
    another size than its header tells, or is not safetensors.
    """
    return _header_of(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in the header of a safetensors file. Raises what `read_header` does."""
    texts = _header_of(path)[1]
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{path} has a damaged header. Download it again.")
    return texts


def _header_of(path: Path) -> tuple[dict[str, Any], Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Put it back, or download it again.")
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_header(path: Path, size: int, mtime_ns: int) -> tuple[dict[str, Any], Any]:
    with path.open("rb") as file:
        start = file.read(8)
        _refuse_pickle(path, start)
        if start == b"version ":
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself. Download the file.")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a whole safetensors file ({size} bytes). Download it again.")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
            texts = header.pop("__metadata__", {})
            end = _checked_end(header)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged header. Download it again.") from error
    if 8 + length + end > size:
        raise ValueError(f"{path} is cut short: {size} bytes of {8 + length + end}. Download it again.")
    if 8 + length + end < size:
        raise ValueError(f"{path} has {size} bytes where its header names {8 + length + end}. Download it again.")
    return header, texts


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _checked_end(header: dict[str, Any]) -> int:
    """Return the byte where the last tensor ends. Raises some error for entries that no writer makes."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, stop), shape = entry["data_offsets"], entry["shape"]
        numbers = (begin, stop, *shape)
        if len(numbers) > _MAX_NUMBERS or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"{name} has no size")
        if begin != end or (stop - begin) * 8 != prod(shape) * _BITS[entry["dtype"]] or not name.isprintable():
            raise ValueError(f"{name} contradicts itself")
        end = stop
    return end


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Return the place of every tensor of the files, by name, but for types that torch does not have.

    Raises ValueError if a file is damaged or cut short.
    """
    found = {}
    for path in files:
        stat, header = path.stat(), read_header(path)
        start = stat.st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
        for name, entry in header.items():
            dtype = (_DTYPES | _WHOLE_NUMBERS).get(entry["dtype"])
            begin, shape = entry["data_offsets"][0], tuple(entry["shape"])
            if dtype:
                found[name] = Stored(path, start + begin, dtype, shape, (stat.st_size, stat.st_mtime_ns))
    return found


def check_unchanged(path: Path, stamp: Stamp | None, stat: os.stat_result | None = None) -> None:
    """Raise ValueError if a file no longer has the stamp. `stat` saves a call where the file is open."""
    now = stat or path.stat()
    if stamp not in (None, (now.st_size, now.st_mtime_ns)):
        raise ValueError(f"{path} was changed since the pipeline was opened. Open the pipeline again.")


def stamps_of(files: Iterable[Path]) -> tuple[tuple[Path, Stamp], ...]:
    """Return the files with their links resolved, each with its stamp. Equal results mean equal content."""
    found = [(path.resolve(), path.stat()) for path in files]
    return tuple(sorted((path, (stat.st_size, stat.st_mtime_ns)) for path, stat in found))


def disk_number(path: Path) -> int | None:
    """Return the device number of the disk that a file is on; None if the file is gone."""
    try:
        return path.stat().st_dev
    except OSError:
        return None


def is_unchanged(path: Path, stamp: Stamp | None) -> bool:
    """Return whether a file exists and still has the stamp."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return stamp in (None, (stat.st_size, stat.st_mtime_ns))


def stored_dtype(files: Iterable[Path]) -> torch.dtype:
    """Return the floating type of most bytes in the files; float32 if they have none."""
    counts: Counter[torch.dtype] = Counter()
    for path in files:
        for entry in read_header(path).values():
            if entry["dtype"] in _DTYPES:
                begin, end = entry["data_offsets"]
                counts[_DTYPES[entry["dtype"]]] += end - begin
    return counts.most_common(1)[0][0] if counts else torch.float32


def read_tensors(files: Sequence[Path], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors that the files have, to the CPU. Raises ValueError for a file that changes meanwhile."""
    wanted, found = set(names), {}
    for path in files:
        if not (here := wanted & read_header(path).keys()):
            continue
        places = stored_tensors([path])
        if odd := sorted(here - places.keys()):
            raise ValueError(f"{path} holds {odd[0]} in a type that torch does not have. Get the plain file.")
        # Nodes run in inference mode, whose tensors do not know what was made of them.
        with torch.inference_mode(False), path.open("rb") as file:
            for name in sorted(here, key=lambda name: places[name].offset):
                found[name] = tensor = torch.empty(places[name].shape, dtype=places[name].dtype, device="cpu")
                file.seek(places[name].offset)
                count = file.readinto(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                if count != tensor.nbytes:
                    raise ValueError(f"{path} is cut short at {name}. Download it again.")
        check_unchanged(path, places[name].stamp)
    return found


def file_identity(path: Path) -> str:
    """Return a digest that changes when the file does.

    It covers files of up to 4 MB whole. Of larger ones it covers the size, the time and 16 samples, the header first.
    """
    stat = path.stat()
    return _file_identity(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=1024)
def _file_identity(path: Path, size: int, mtime_ns: int, ctime_ns: int) -> str:
    digest = hashlib.sha256(path.name.encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(f":{size}:{mtime_ns}:".encode())
            for sample in range(_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
