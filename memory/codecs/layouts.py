"""The codec of every weight of a safetensors file in any known layout, from the header and small notes alone.

Layouts of other tools are refused, by names that only they write. So is an 8-bit weight whose format is stated nowhere:
a wrong guess would raise no error and give a bad picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import bitsandbytes, comfy, torchao
from .header import FP8, PLAIN, Header, Recognised
from .raw import Raw

NOTES = (comfy.NOTE, *bitsandbytes.NOTES)  # ends of the names of tensors that describe how others are stored
MAX_NOTE_BYTES = 4096

_SIGNS = (*comfy.SCALES, comfy.NOTE, *bitsandbytes.SIGNS, *torchao.SIGNS)
_OF_ACTIVATIONS = (".input_scale", ".scale_input")
_STRANGERS = {  # layouts that are refused, by the ends of names that only their tools write
    ".weight_scale_inv": "scaled by blocks of rows and columns",
    ".pre_quant_scale": "smoothed by scales of the activations",
    ".qweight": "packed by GPTQ, AWQ or Nunchaku",
    ".weight._data": "of quanto",
}


def is_encoded(header: Header) -> bool:
    """Return whether a file holds encoded weights, and not only plain tensors of 16 bits or more."""
    if any(name.endswith(_SIGNS) for name in header):
        return True
    # int8 counts only in weights: models also hold masks, positions and their tokenizer as bytes.
    kinds = {name: entry["dtype"] for name, entry in header.items()}
    return any(kind in FP8 or (kind in ("I8", "U8") and name.endswith(".weight")) for name, kind in kinds.items())


def recognise(
    header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes], dtype: torch.dtype
) -> dict[str, Recognised]:
    """Return the codec of every weight of a file by name. Scales and notes are not weights.

    `notes` are the bytes of the tensors whose names end in `NOTES`. Quantized weights are decoded to `dtype`, plain
    ones keep their own. Raises ValueError, one line that begins with a tensor's name, for a file that is damaged or
    contradictory, or whose format is not certain.
    """
    for name in header:
        for end, what in _STRANGERS.items():
            if name.endswith(end):
                raise ValueError(f"{name}: its layer is {what}, which Ballast does not decode. Get another file.")
    found = (
        comfy.layers(header, metadata, notes, dtype)
        | bitsandbytes.layers(header, notes, dtype)
        | torchao.layers(header, metadata, dtype)
    )
    spent = {name for weight in found.values() for name in weight.sources}
    for name, entry in header.items():
        if name not in spent and not name.endswith((*NOTES, *_OF_ACTIVATIONS)) and name.split(".")[-1] != comfy.MARK:
            found[name] = _plain(name, entry, dtype)
    return found


def _plain(name: str, entry: Mapping[str, Any], dtype: torch.dtype) -> Recognised:
    kind = entry["dtype"]
    if kind not in PLAIN or name.endswith(".weight") and kind in ("I8", "U8"):
        raise ValueError(f"{name}: nothing tells how it was quantised ({kind}). Get another file.")
    stored = PLAIN[kind]
    return Recognised(Raw(tuple(entry["shape"]), dtype if kind in FP8 else stored, stored), (name,))
