"""A file of a module's encoded weights, beside the model's own: read in place of encoding them again.

A safetensors file of flat tensors of bytes, each the host's tensor of one encoded weight, whose codecs the header's
metadata tells. Weights that encoding does not shrink stay where they are.
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
_ENTRY_BYTES = 640  # of the header, beside the names of a weight
_ROOM_BYTES = 2**30  # that the disk keeps free
MAX_BYTES = 64 * 2**30  # of all files of a folder: several of the largest models
_IN_USE_SECONDS = 3600  # a run of any process that began so recently may still read its file


def read_made(path: Path, stored: Mapping[str, Source]) -> dict[str, Source] | None:
    """Return `stored` with the weights that a file holds encoded, or None if the file is missing or damaged."""
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
            for other in others:  # of tied weights one name is enough
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
    """Note that a file is used now, by the time of its last access: that of its last change tells readers its content.

    Without a word where that cannot be, as in a folder that this process may only read.
    """
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim_made(folder: Path, in_use: Collection[Path]) -> None:
    """Remove the least recently used files beyond MAX_BYTES, but none that is in use here, or was within an hour."""
    entries = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # another process trims as well
            stat = path.stat()
            if _NAME.search(path.stem):  # no other file that somebody keeps in the folder
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
    """Encode the weights of a module that have a maker, a few at a time, into a file. Returns the bytes of the file.

    `sources` tells where each lies, by the `id` of what the host holds of it. `look` is called with the bytes read so
    far; what it raises ends the writing, and leaves no file. Raises OSError, in one line, where the disk has no room.
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
    # Another process that has written the same by now may be reading it.
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
    """Return the fields of a codec as JSON has them."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in asdict(codec).items()
    }


def _told(path: Path) -> dict[str, tuple[Codec, list[str]]]:
    """Return the codec of each weight in a file that `read_header` has checked, and the names of those tied to it."""
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
