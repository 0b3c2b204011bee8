"""Where the parts of encoded weights lie in files: quantised safetensors and GGUF. Only headers and notes are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..codecs import comfy
from ..codecs.codec import Part
from ..codecs.gguf import codec_of
from .encoding import EncodedWeight, Source
from .gguf import read_gguf_header
from .weights import Stamp, Stored, read_header

_FP8, _BYTES = ("F8_E4M3", "F8_E5M2"), ("I8", "U8")


def encoded_weights(path: Path, dtype: torch.dtype) -> dict[str, EncodedWeight]:
    """All weights of a safetensors or GGUF file, by name. Quantised ones become `dtype`, plain ones keep their own.

    Raises FileNotFoundError, or ValueError in one line that names the file and the weight: for a file that is damaged,
    and for a format that is not known for sure.
    """
    if path.suffix.lower() == ".gguf":
        return dict(_of_gguf(path, dtype))
    return _of_safetensors(path, dtype)


def is_encoded(path: Path) -> bool:
    """Whether a file holds weights in another form than plain tensors of 16 bits and more. Raises as `read_header`."""
    if path.suffix.lower() == ".gguf":
        return True
    header = read_header(path)
    if any(name.endswith((*comfy.SCALES, comfy.NOTE)) for name in header):
        return True
    # Of bytes only weights tell it: models hold masks, places and their tokenizer as such too.
    kinds = {name: entry["dtype"] for name, entry in header.items()}
    return any(kind in _FP8 or (kind in _BYTES and name.endswith(".weight")) for name, kind in kinds.items())


def shapes_in(path: Path) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a safetensors or GGUF file. Raises as `encoded_weights` does."""
    if path.suffix.lower() == ".gguf":
        return [tensor.shape for tensor in read_gguf_header(path).tensors.values()]
    return [tuple(entry["shape"]) for entry in read_header(path).values()]


def sources_of(path: Path, dtype: torch.dtype) -> dict[str, Source]:
    """The same as modules take them: plain tensors as these. Raises as `encoded_weights` does."""
    return {name: weight.stored() or weight for name, weight in encoded_weights(path, dtype).items()}


def _of_gguf(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, EncodedWeight]]:
    header, stamp = read_gguf_header(path), _stamp(path)
    for name, tensor in header.tensors.items():
        try:
            codec = codec_of(tensor.kind, tensor.shape, dtype)
        except ValueError as error:
            raise ValueError(f"{path}: {name} {error}") from error
        (part,) = codec.parts
        yield name, EncodedWeight(codec, (_place(path, tensor.offset, part, stamp),))


def _of_safetensors(path: Path, dtype: torch.dtype) -> dict[str, EncodedWeight]:
    header, stamp = read_header(path), _stamp(path)
    begin = stamp[0] - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    notes = {name: _note(path, begin, name, entry) for name, entry in header.items() if name.endswith(comfy.NOTE)}
    try:
        recognised = comfy.recognise(header, _metadata(path), notes, dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    found = {}
    for name, weight in recognised.items():
        offsets = (begin + header[source]["data_offsets"][0] for source in weight.sources)
        places = (_place(path, at, part, stamp) for at, part in zip(offsets, weight.codec.parts, strict=True))
        found[name] = EncodedWeight(weight.codec, tuple(places))
    return found


def _place(path: Path, offset: int, part: Part, stamp: Stamp) -> Stored:
    return Stored(path, offset, part.dtype, (part.count,), stamp)


def _note(path: Path, begin: int, name: str, entry: Mapping[str, Any]) -> bytes:
    first, end = entry["data_offsets"]
    if end - first > comfy.MAX_NOTE_BYTES:
        raise ValueError(f"{path}: {name} has {end - first} bytes, which no note has. Download the file again.")
    with path.open("rb") as file:
        file.seek(begin + first)
        return file.read(end - first)


def _metadata(path: Path) -> dict[str, str]:
    """The texts in the header of a file that `read_header` has checked."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        texts = json.loads(file.read(length)).get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{path} has a damaged header. Download it again.")
    return texts


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
