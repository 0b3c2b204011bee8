"""Quantised safetensors, recognised from the header alone: which codec each weight has, and where its parts are named.

The layouts are ComfyUI's (QUANTIZATION.md in its repository): a layer's `weight` with `weight_scale`, and what it is
told by a tensor `comfy_quant` beside it or by `_quantization_metadata` in the header; before that `scale_weight`, in
files that hold a tensor `scaled_fp8`. Other tools' layouts are refused by what only they write, and so is any weight
of 8 bits of which nothing tells how it was made: a wrong guess would be seen in no picture but a bad one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .codec import Codec
from .fp8 import Fp8
from .int8 import Int8, RotatedInt8
from .microscaled import Mxfp8, Nvfp4
from .raw import Raw

Header = Mapping[str, Mapping[str, Any]]  # name -> {"dtype", "shape", ...}, as safetensors has them

METADATA = "_quantization_metadata"
NOTE = ".comfy_quant"
MAX_NOTE_BYTES = 4096

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_PLAIN = _FLOATS | _FP8 | _WHOLE | {"BOOL": torch.bool}
_SCALES = {name: dtype for name, dtype in _FLOATS.items() if name != "F64"}

_WEIGHT_SCALES = ("weight_scale", "scale_weight")
SCALES = tuple(f".{end}" for end in _WEIGHT_SCALES)
_OF_ACTIVATIONS = (".input_scale", ".scale_input")
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")  # that the metadata of some writers leaves out
_STRANGERS = {  # by the ends of names that only they write
    ".weight_scale_inv": "scaled by blocks of rows and columns",
    ".pre_quant_scale": "smoothed by scales of the activations",
    ".qweight": "packed by GPTQ, AWQ or Nunchaku",
    ".SCB": "of bitsandbytes",
    ".weight.absmax": "of bitsandbytes",
    ".weight._data": "of quanto",
}


@dataclass(frozen=True)
class Recognised:
    """A weight: its codec, and the names of the stored tensors that are the codec's parts, in their order."""

    codec: Codec
    sources: tuple[str, ...]


def recognise(
    header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes], dtype: torch.dtype
) -> dict[str, Recognised]:
    """The codec of every weight of a file, by name; scales and notes are no weights.

    `notes` are the bytes of the tensors `comfy_quant`. Quantised weights become `dtype`, plain ones keep their own.
    Raises ValueError, one line that begins with the weight's name, for what is damaged, contradicts itself, or is not
    known for sure.
    """
    for name in header:
        for end, what in _STRANGERS.items():
            if name.endswith(end):
                raise ValueError(f"{name}: its layer is {what}, which Ballast does not decode. Get another file.")
    found = {}
    told = _told(header, metadata, notes)
    for layer, config in told.items():
        found[f"{layer}.weight"] = _layer(header, layer, config, dtype)
    spent = {name for weight in found.values() for name in weight.sources}
    for name, entry in header.items():
        if name not in spent and not name.endswith((NOTE, *_OF_ACTIVATIONS)) and name.split(".")[-1] != "scaled_fp8":
            found[name] = _plain(name, entry, dtype)
    return found


def _told(header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """What is told of each quantised layer: by the metadata, by its note, or by its having a scale."""
    told: dict[str, dict[str, Any]] = {}
    for layer, config in _of_metadata(header, metadata.get(METADATA)):
        told[layer] = config
    for name in (name for name in header if name.endswith(NOTE)):
        layer, config = name.removesuffix(NOTE), _json(name, notes.get(name, b""))
        if told.setdefault(layer, config) != config:
            raise ValueError(f"{name}: it contradicts {METADATA} of the file's header. Get another file.")
    for name in header:
        layer, _, end = name.rpartition(".")
        if end in _WEIGHT_SCALES and layer not in told:
            kind = header.get(f"{layer}.weight", {}).get("dtype")
            if kind not in _FP8:
                raise ValueError(f"{name}: nothing tells how {layer}.weight ({kind}) was quantised. Get another file.")
            told[layer] = {"format": "float8_e4m3fn" if kind == "F8_E4M3" else "float8_e5m2"}
    return told


def _of_metadata(header: Header, text: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if text is None:
        return
    layers = _json(METADATA, text.encode()).get("layers")
    if not isinstance(layers, dict):
        raise ValueError(f"{METADATA}: it names no layers. Get another file.")
    for layer, config in layers.items():
        full = [prefix + layer for prefix in _PREFIXES if f"{prefix}{layer}.weight" in header]
        if not full:
            raise ValueError(f"{layer}.weight: {METADATA} names it, and it is not there. Download the file again.")
        yield full[0], config if isinstance(config, dict) else {"format": config}


def _json(name: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it is not JSON. Download the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: it holds no JSON object. Download the file again.")
    return content


def _layer(header: Header, layer: str, config: dict[str, Any], dtype: torch.dtype) -> Recognised:
    """A quantised weight, all of whose parts are there and of the sizes that its codec says."""
    name, kind = f"{layer}.weight", config.get("format")
    if name not in header:
        raise ValueError(f"{name}: it is told to be {kind}, and is not there. Download the file again.")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ValueError(f"{name}: it is quantised as {kind!r}; Ballast decodes {known}. Get the file in one of these.")
    scale = next((f"{layer}.{end}" for end in _WEIGHT_SCALES if f"{layer}.{end}" in header), f"{layer}.weight_scale")
    sources = (name, scale, f"{layer}.weight_scale_2") if kind == "nvfp4" else (name, scale)
    for source in sources:
        if source not in header:
            raise ValueError(f"{name}: its scale {source} is missing. Download the file again.")
    weight, scales = header[name], header[scale]
    try:
        codec = _FORMATS[kind](weight, scales, config, dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error} Get another file.") from error
    for part, source in zip(codec.parts, sources, strict=True):
        if (held := _nbytes(source, header[source])) != part.nbytes:
            raise ValueError(
                f"{name}: {source} has {held} bytes where {codec.name} of {codec.shape} has {part.nbytes}."
            )
    return Recognised(codec, sources)


def _fp8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    if weight["dtype"] not in _FP8:
        raise ValueError(f"it is told to be fp8, and stored as {weight['dtype']}.")
    return Fp8(tuple(weight["shape"]), dtype, _FP8[weight["dtype"]], prod(scale["shape"]), _scale_type(scale))


def _int8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    _expect(weight, "I8")
    shape, scales = tuple(weight["shape"]), prod(scale["shape"])
    nested = config.get("params")
    options = {**(nested if isinstance(nested, dict) else {}), **config}
    if not options.get("convrot", False):
        return Int8(shape, dtype, torch.int8, scales, _scale_type(scale))
    group = options.get("convrot_groupsize", 256)
    if options["convrot"] is not True or type(group) is not int:
        raise ValueError(f"its note is not understood (convrot {options['convrot']!r} in groups of {group!r}).")
    return RotatedInt8(shape, dtype, torch.int8, scales, _scale_type(scale), group)


def _mxfp8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    _expect(weight, "F8_E4M3")
    _expect(scale, "U8", "F8_E8M0")
    return Mxfp8(tuple(weight["shape"]), dtype)


def _nvfp4(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    _expect(weight, "U8")
    _expect(scale, "U8", "F8_E4M3")
    return Nvfp4((*weight["shape"][:-1], *(2 * size for size in weight["shape"][-1:])), dtype)


_FORMATS: dict[str, Callable[..., Codec]] = {
    "float8_e4m3fn": _fp8,
    "float8_e5m2": _fp8,
    "int8_tensorwise": _int8,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _expect(entry: Mapping[str, Any], *kinds: str) -> None:
    if entry["dtype"] not in kinds:
        raise ValueError(f"it or its scale is stored as {entry['dtype']} where that format has {kinds[0]}.")


def _scale_type(scale: Mapping[str, Any]) -> torch.dtype:
    if scale["dtype"] not in _SCALES:
        raise ValueError(f"its scale is stored as {scale['dtype']}.")
    return _SCALES[scale["dtype"]]


def _plain(name: str, entry: Mapping[str, Any], dtype: torch.dtype) -> Recognised:
    kind = entry["dtype"]
    if kind not in _PLAIN or name.endswith(".weight") and kind in ("I8", "U8"):
        raise ValueError(f"{name}: nothing tells how it was quantised ({kind}). Get another file.")
    stored = _PLAIN[kind]
    return Recognised(Raw(tuple(entry["shape"]), dtype if kind in _FP8 else stored, stored), (name,))


def _nbytes(name: str, entry: Mapping[str, Any]) -> int:
    width = 1 if entry["dtype"] == "F8_E8M0" else _PLAIN[entry["dtype"]].itemsize if entry["dtype"] in _PLAIN else 0
    return prod(entry["shape"]) * width
