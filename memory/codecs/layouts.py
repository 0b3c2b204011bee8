"""Quantised safetensors in any layout that is known: the codec of every weight, from the header and small notes alone.

Other tools' layouts are refused by what only they write, and so is any weight of 8 bits of which nothing tells how it
was made: a wrong guess would be seen in no picture but a bad one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import bitsandbytes, comfy, torchao
from .header import FP8, PLAIN, Header, Recognised
from .raw import Raw

NOTES = (comfy.NOTE, *bitsandbytes.NOTES)  # ends of the names of tensors that tell how others are stored
MAX_NOTE_BYTES = 4096

_SIGNS = (*comfy.SCALES, comfy.NOTE, *bitsandbytes.SIGNS, *torchao.SIGNS)
_OF_ACTIVATIONS = (".input_scale", ".scale_input")
_STRANGERS = {  # by the ends of names that only they write
    ".weight_scale_inv": "scaled by blocks of rows and columns",
    ".pre_quant_scale": "smoothed by scales of the activations",
    ".qweight": "packed by GPTQ, AWQ or Nunchaku",
    ".weight._data": "of quanto",
}


def is_encoded(header: Header) -> bool:
    """Return whether a file holds weights in another form than plain tensors of 16 bits and more."""
    if any(name.endswith(_SIGNS) for name in header):
        return True
    # Of bytes only weights tell it: models hold masks, places and their tokenizer as such too.
    kinds = {name: entry["dtype"] for name, entry in header.items()}
    return any(kind in FP8 or (kind in ("I8", "U8") and name.endswith(".weight")) for name, kind in kinds.items())


def recognise(
    header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes], dtype: torch.dtype
) -> dict[str, Recognised]:
    """Return the codec of every weight of a file, by name; scales and notes are no weights.

    `notes` are the bytes of the tensors that end in `NOTES`. Quantised weights become `dtype`, plain ones keep their
    own. Raises ValueError, one line that begins with the weight's name, for what is damaged, contradicts itself, or is
    not known for sure.
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
