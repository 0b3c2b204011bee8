"""The header of a safetensors file, and the code that the layouts of quantized files share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .codec import Codec

Header = Mapping[str, Mapping[str, Any]]  # name -> {"dtype", "shape", ...}, as in a safetensors header

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
PLAIN = FLOATS | FP8 | _WHOLE | {"BOOL": torch.bool}
_SCALES = {name: dtype for name, dtype in FLOATS.items() if name != "F64"}


@dataclass(frozen=True)
class Recognised:
    """One weight: its codec, and the names of the stored tensors that are its parts, in the codec's order."""

    codec: Codec
    sources: tuple[str, ...]


def matched(header: Header, name: str, codec: Codec, sources: tuple[str, ...]) -> Recognised:
    """Return the recognized weight. Raises ValueError, naming it, if a source has other bytes than the codec's part."""
    for part, source in zip(codec.parts, sources, strict=True):
        if (held := _nbytes(header[source])) != part.nbytes:
            raise ValueError(
                f"{name}: {source} has {held} bytes where {codec.name} of {codec.shape} has {part.nbytes}."
            )
    return Recognised(codec, sources)


def parse(name: str, text: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes of a note or of metadata. Raises ValueError, naming `name`, if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it is not JSON. Download the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: it holds no JSON object. Download the file again.")
    return content


def expect(entry: Mapping[str, Any], *kinds: str) -> None:
    """Raise ValueError if a tensor's dtype is none of `kinds`."""
    if entry["dtype"] not in kinds:
        raise ValueError(f"it or its scale is stored as {entry['dtype']} where that format has {kinds[0]}.")


def count_of_scales(scale: Mapping[str, Any]) -> int:
    """Return the number of scales: 1, or one for each row. Raises ValueError if they run along another dimension."""
    shape = tuple(scale["shape"])
    if any(size != 1 for size in shape[1:]):
        raise ValueError(f"its scale is of shape {list(shape)}, which is not one for each row.")
    return int(shape[0]) if shape else 1


def scale_type(scale: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor of scales. Raises ValueError for other types than F32, F16 and BF16."""
    if scale["dtype"] not in _SCALES:
        raise ValueError(f"its scale is stored as {scale['dtype']}.")
    return _SCALES[scale["dtype"]]


def _nbytes(entry: Mapping[str, Any]) -> int:
    width = 1 if entry["dtype"] == "F8_E8M0" else PLAIN[entry["dtype"]].itemsize if entry["dtype"] in PLAIN else 0
    return prod(entry["shape"]) * width
