"""What safetensors files hold, told from their headers: sizes, types, and whether a file is whole.

Pickled weights are refused by name. Reading a header costs a few kilobytes whatever the size of the file.
"""

from __future__ import annotations

import hashlib
import json
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
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_MAX_HEADER_BYTES = 100 * 2**20
_WHOLE_BYTES = 4 * 2**20  # files up to this size are hashed whole
_SAMPLE_BYTES, _SAMPLES = 64 * 1024, 16


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file: contiguous, from `offset` bytes after the start of the file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_weights(folder: Path) -> tuple[list[Path], str | None]:
    """The safetensors files of one model folder, and their variant ("fp16") if they have no plain name.

    Raises FileNotFoundError when there are none, or when a shard that the index names is not there, and ValueError when
    there are only pickled ones.
    """
    incomplete = ""
    for index in sorted(folder.glob("*.safetensors.index*.json"), key=lambda path: len(path.name)):
        try:
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
            shards = sorted({folder / name for name in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not an index of weights. Download it again.") from error
        missing = [shard for shard in shards if shard.parent != folder or not shard.is_file()]
        if not missing:
            return shards, index.name.split(".safetensors.index")[1].removesuffix(".json").strip(".") or None
        incomplete = incomplete or f"{missing[0]} is missing: the download is not complete. Download it again."
    shard_of_many = re.compile(r"-\d{5}-of-\d{5}$")
    whole = [path for path in folder.glob("*.safetensors") if not shard_of_many.search(path.stem)]
    if whole:
        file = min(whole, key=lambda path: (len(path.name), path.name))
        return [file], file.stem.partition(".")[2] or None
    if incomplete:
        raise FileNotFoundError(incomplete)
    pickled = [path.name for path in folder.iterdir() if path.suffix in _PICKLES] if folder.is_dir() else []
    if pickled:
        raise ValueError(
            f"{folder / pickled[0]} is a pickle, which can run code when it is read, and is refused. "
            "Get the safetensors files of this model."
        )
    raise FileNotFoundError(f"no weights in {folder}. Put the model's .safetensors files there.")


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name -> {"dtype", "shape", "data_offsets"}.

    Raises ValueError if the file is damaged or shorter than its header says.
    """
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_header(path: Path, size: int, mtime_ns: int) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself. Download the file.")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a whole safetensors file ({size} bytes). Download it again.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged header. Download it again.") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} is cut short: {size} bytes of {8 + length + end}. Download it again.")
    return header


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Where every tensor of the files lies, by name; without those of types that torch does not know.

    Raises ValueError if a file is damaged or cut short.
    """
    found = {}
    for path in files:
        header = read_header(path)
        start = path.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
        for name, entry in header.items():
            dtype = (_DTYPES | _WHOLE_NUMBERS).get(entry["dtype"])
            (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
            # What contradicts itself is left out: safetensors' own reader then has the word.
            if dtype and begin >= 0 and end - begin == prod(shape) * dtype.itemsize:
                found[name] = Stored(path, start + begin, dtype, shape)
    return found


def stored_dtype(files: Iterable[Path]) -> torch.dtype:
    """The floating type that most bytes of the files are stored in; float32 if they hold none."""
    counts: Counter[torch.dtype] = Counter()
    for path in files:
        for entry in read_header(path).values():
            if entry["dtype"] in _DTYPES:
                begin, end = entry["data_offsets"]
                counts[_DTYPES[entry["dtype"]]] += end - begin
    return counts.most_common(1)[0][0] if counts else torch.float32


def read_tensors(files: Sequence[Path], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of the named tensors that the files hold, on the CPU."""
    from safetensors import safe_open

    wanted, found = set(names), {}
    for path in files:
        if here := wanted & read_header(path).keys():
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in here})
    return found


def file_identity(path: Path) -> str:
    """A digest that changes when the file does.

    Files of up to 4 MB are read whole; of larger ones the size, the time and 16 places count, the header first.
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
