"""The places of encoded weights in files, quantized safetensors and GGUF. Reads only headers and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..codecs import layouts
from ..codecs.gguf import codec_of
from .encoding import EncodedWeight, Source
from .gguf_file import is_gguf, read_gguf_header
from .stored import Stamp, Stored, read_header, read_metadata, shards_of


def encoded_weights(paths: Path | Sequence[Path], dtype: torch.dtype) -> dict[str, EncodedWeight]:
    """Return all weights of files that belong together, or of a single one and its other shards, by name.

    Quantized weights are to become `dtype`; plain ones keep their own. Raises FileNotFoundError if a file is missing.
    Raises ValueError, in one line, for a damaged file or an unknown format. It names the file and the weight.
    """
    first, *others = shards_of(paths) if isinstance(paths, Path) else paths
    if is_gguf(first):
        return {name: weight for path in (first, *others) for name, weight in _of_gguf(path, dtype)}
    return _of_safetensors([first, *others], dtype)


def is_encoded(path: Path) -> bool:
    """Return whether a file holds weights other than plain tensors of 16 bits or more. Raises as `read_header`."""
    if is_gguf(path):
        return True
    return layouts.is_encoded(read_header(path))


def shapes_in(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a safetensors or GGUF file. Raises as `encoded_weights` does."""
    if is_gguf(path):
        return [tensor.shape for tensor in read_gguf_header(path).tensors.values()]
    return [tuple(entry["shape"]) for entry in read_header(path).values()]


def sources_of(paths: Path | Sequence[Path], dtype: torch.dtype) -> dict[str, Source]:
    """Return the weights of `encoded_weights`, with plain tensors as `Stored`. Raises as that does."""
    return {name: weight.stored() or weight for name, weight in encoded_weights(paths, dtype).items()}


def _of_gguf(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, EncodedWeight]]:
    """Yield the weights of a GGUF file, each of one part."""
    header, stamp = read_gguf_header(path), _stamp(path)
    for name, tensor in header.tensors.items():
        try:
            codec = codec_of(tensor.kind, tensor.shape, dtype)
        except ValueError as error:
            raise ValueError(f"{path}: {name} {error}") from error
        (part,) = codec.parts
        yield name, EncodedWeight(codec, (Stored(path, tensor.offset, part.dtype, (part.count,), stamp),))


def _of_safetensors(paths: Sequence[Path], dtype: torch.dtype) -> dict[str, EncodedWeight]:
    """Return the weights of safetensors files. Parts of one weight may be in different shards."""
    header: dict[str, Mapping[str, Any]] = {}
    metadata: dict[str, str] = {}
    lies: dict[str, tuple[Path, int, Stamp]] = {}  # file, first byte and stamp of each stored tensor
    for path in paths:
        entries, stamp = read_header(path), _stamp(path)
        begin = stamp[0] - max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        lies |= {name: (path, begin + entry["data_offsets"][0], stamp) for name, entry in entries.items()}
        header |= entries
        metadata |= read_metadata(path)
    notes = {name: _note(*lies[name][:2], name, header[name]) for name in header if name.endswith(layouts.NOTES)}
    try:
        recognised = layouts.recognise(header, metadata, notes, dtype)
    except ValueError as error:
        raise ValueError(f"{paths[0]}: {error}") from error
    found = {}
    for name, weight in recognised.items():
        parts = zip((lies[source] for source in weight.sources), weight.codec.parts, strict=True)
        places = (Stored(path, at, part.dtype, (part.count,), stamp) for (path, at, stamp), part in parts)
        found[name] = EncodedWeight(weight.codec, tuple(places))
    return found


def _note(path: Path, at: int, name: str, entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a tensor that notes how others are stored."""
    first, end = entry["data_offsets"]
    if end - first > layouts.MAX_NOTE_BYTES:
        raise ValueError(f"{path}: {name} has {end - first} bytes, which no note has. Download the file again.")
    with path.open("rb") as file:
        file.seek(at)
        return file.read(end - first)


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
