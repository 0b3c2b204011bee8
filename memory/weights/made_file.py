"""A file of a module's encoded weights, written once so that later runs need not encode them again.

A safetensors file of flat uint8 tensors, one for each encoded weight, as the host holds it. The metadata of its header
has their codecs. Weights that encoding does not shrink stay in the model's own files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..codecs.codec import Codec
from ..codecs.exact12 import Exact12
from ..codecs.fp8 import Fp8
from ..codecs.int8 import Int8
from ..files import replacing
from ..sizes import format_bytes
from .encode import making
from .encoding import EncodedWeight, Source, part_spans
from .stored import Stored, read_header
from .structure import own_refs

log = logging.getLogger("ballast")

_CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Exact12, Int8, Fp8)}
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)
}
_NOTE = "ballast_encoded"
_NAME = re.compile("-[0-9a-f]{32}$")
_ENTRY_BYTES = 640  # of the header for one weight, without its names
_ROOM_BYTES = 2**30  # to leave free on the disk
MAX_BYTES = 64 * 2**30  # of all files in a folder: several of the largest models
_IN_USE_SECONDS = 3600  # another process that began a run within this time may still read its file


def read_made(path: Path, stored: Mapping[str, Source]) -> dict[str, Source] | None:
    """Return `stored` with the weights that the file at `path` holds encoded in place of the plain ones.

    None if the file is missing. A damaged file is deleted with a warning, and None is returned.
    """
    try:
        note_use(path)
        header, told = read_header(path), _told(path)
        found, begin = (
            dict(stored),
            path.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0),
        )
        stat = path.stat()
        for name, (codec, others) in told.items():
            at = begin + header[name]["data_offsets"][0]
            spans, total = part_spans(codec)
            if header[name]["data_offsets"][1] - header[name]["data_offsets"][0] != total:
                raise ValueError(f"{name} has another size than its codec")
            parts = zip(codec.parts, spans, strict=True)
            stamp = (stat.st_size, stat.st_mtime_ns)
            places = (Stored(path, at + first, part.dtype, (part.count,), stamp) for part, (first, _) in parts)
            for other in others:  # tied weights are read once, under one name
                found.pop(other, None)
            found[name] = EncodedWeight(codec, tuple(places))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        log.warning("Ballast: dropping damaged encoded weights, %s (%s)", path.name, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return found


def note_use(path: Path) -> None:
    """Set the file's access time to now, for `trim_made`. The modification time stays: it is part of the file's stamp.

    Does nothing where this process may not write.
    """
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim_made(folder: Path, in_use: Collection[Path]) -> None:
    """Remove the least recently used files of `folder` beyond `MAX_BYTES`.

    Files in use here, or used within the last hour by any process, are kept.
    """
    entries = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # another process trims as well
            stat = path.stat()
            if _NAME.search(path.stem):  # ours: somebody may keep other files in the folder
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    held = sum(size for _, size, _ in entries)
    for used, size, path in sorted(entries):
        if held <= MAX_BYTES:
            break
        if path not in in_use and time.time() - used > _IN_USE_SECONDS:
            with contextlib.suppress(OSError):
                path.unlink()
                held -= size
                log.warning("Ballast: removed %s, encoded weights that were not used for long", path)


def write_made(path: Path, module: nn.Module, sources: Mapping[int, Source], look: Callable[[int], None]) -> int:
    """Encode the weights of a module that have a maker into a file, a few at a time. Return the bytes of the file.

    `sources` has the place of each in the model's files, by the `id` of its host tensor. `look` is called with the
    bytes read so far; an error that it raises ends the writing, and leaves no file. Raises OSError, in one line, if the
    disk has no room.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    places = {}
    for owner in module.modules():
        for ref in own_refs(owner):
            if ref.encoding and ref.encoding.maker:
                places[id(ref.tensor)] = ref
    wanted = sum(ref.tensor.nbytes for ref in places.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < wanted + _ROOM_BYTES:
        raise OSError(
            f"encoded weights take {format_bytes(wanted)} in {path.parent}, where {format_bytes(free)} are free. Make "
            "room there."
        )
    groups = [[ref.tensor] for ref in places.values()]
    reserved = sum(_ENTRY_BYTES + 2 * sum(map(len, names[id(ref.shown)])) for ref in places.values()) + _ENTRY_BYTES
    header: dict[str, Any] = {}
    told, end = {}, 0
    # `first`: if another process has written the same file meanwhile, it may be reading it already.
    with replacing(path, first=True) as part, part.open("wb") as file:
        file.seek(8 + reserved)
        with contextlib.closing(making(groups, list(places.values()), sources, look)) as made:
            for found in made:
                for key, (codec, flat) in found.items():
                    if codec is None or codec.name not in _CODECS:
                        continue  # it would not have shrunk
                    own = names[id(places[key].shown)]
                    file.write(flat.numpy().data)
                    told[own[0]] = {"names": own[1:], "codec": codec.name, **_plain(codec)}
                    header[own[0]] = {"dtype": "U8", "shape": [flat.numel()], "data_offsets": [end, end + flat.numel()]}
                    end += flat.numel()
        text = json.dumps({"__metadata__": {_NOTE: json.dumps(told)}, **header}, separators=(",", ":")).encode()
        file.seek(0)
        file.write(struct.pack("<Q", reserved) + text.ljust(reserved))
    return 8 + reserved + end


def _plain(codec: Codec) -> dict[str, Any]:
    """Return the fields of a codec as plain data for JSON."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in asdict(codec).items()
    }


def _told(path: Path) -> dict[str, tuple[Codec, list[str]]]:
    """Return the codec of each weight, and the names of parameters tied to it. `read_header` has checked the file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        notes = json.loads(json.loads(file.read(length))["__metadata__"][_NOTE])
    return {name: (_codec(note), [str(other) for other in note["names"]]) for name, note in notes.items()}


def _codec(note: Mapping[str, Any]) -> Codec:
    cls = _CODECS[note["codec"]]
    values: dict[str, Any] = {}
    for field in fields(cls):
        value = note[field.name]
        if isinstance(value, str):
            value = _TYPES[value]
        values[field.name] = tuple(int(size) for size in value) if isinstance(value, list) else value
    return cls(**values)
