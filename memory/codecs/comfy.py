"""ComfyUI's quantized safetensors: the codec of each weight and the names of its parts, from the header alone.

The layouts are those of QUANTIZATION.md in ComfyUI's repository. A layer has `weight` and `weight_scale`; its format is
named by a tensor `comfy_quant` beside it, or by `_quantization_metadata` in the header. Older files have `scale_weight`
and a tensor `scaled_fp8`. In a model marked as scaled, an fp8 matrix without a scale is refused. Files without any mark
or scale hold fp8 that was cast, which is read as it is.

`exact12` is a format of Ballast in the same layout. `stored_form` is the inverse of reading, for files that Ballast
writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from .codec import Codec
from .exact12 import Exact12
from .fp8 import Fp8
from .header import FP8, Header, Recognised, count_of_scales, expect, matched, parse, scale_type
from .int8 import Int8, RotatedInt8
from .microscaled import Mxfp8, Nvfp4

METADATA = "_quantization_metadata"
NOTE = ".comfy_quant"

_WEIGHT_SCALES = ("weight_scale", "scale_weight")
MARK = "scaled_fp8"  # last part of the name of a tensor that marks a model as scaled
# Prefixes of the models in a file of a whole pipeline. Each of these may be scaled or not.
_PART = re.compile(
    r"(?:(?:model\.)?diffusion_model|transformer|vae|first_stage_model|cond_stage_model|conditioner"
    r"|text_encoders?\.\w+)\."
)
SCALES = tuple(f".{end}" for end in _WEIGHT_SCALES)
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")  # omitted by some writers in the metadata
_EXACT12_ENDS = ("weight", *(f"weight_{part}" for part in ("codes", "exponents", "places", "values")))
_MAX_SIZES = 8  # dimensions of a weight


def layers(
    header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes], dtype: torch.dtype
) -> dict[str, Recognised]:
    """Return the quantized weights of a file by name, to be decoded to `dtype`.

    `notes` are the bytes of the tensors whose names end in `NOTE`. Raises ValueError in one line that begins with the
    name of the weight or note that is damaged or not supported.
    """
    told = _told(header, metadata, notes)
    _check_scaled(header, told)
    return {f"{layer}.weight": _layer(header, layer, config, dtype) for layer, config in told.items()}


def _told(header: Header, metadata: Mapping[str, str], notes: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the configuration of each quantized layer by name: from the metadata, its note, or its having a scale.

    Raises ValueError if two of these contradict each other.
    """
    told: dict[str, dict[str, Any]] = {}
    for layer, config in _of_metadata(header, metadata.get(METADATA)):
        told[layer] = config
    for name in (name for name in header if name.endswith(NOTE)):
        layer, config = name.removesuffix(NOTE), parse(name, notes.get(name, b""))
        if told.setdefault(layer, config) != config:
            raise ValueError(f"{name}: it contradicts {METADATA} of the file's header. Get another file.")
    for name in header:
        layer, _, end = name.rpartition(".")
        if end in _WEIGHT_SCALES and layer not in told:
            kind = header.get(f"{layer}.weight", {}).get("dtype")
            if kind not in FP8:
                raise ValueError(f"{name}: nothing tells how {layer}.weight ({kind}) was quantised. Get another file.")
            told[layer] = {"format": "float8_e4m3fn" if kind == "F8_E4M3" else "float8_e5m2"}
    return told


def _check_scaled(header: Header, told: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for an fp8 matrix without a scale in a model with a mark or with other scaled matrices."""
    marks = tuple(name.removesuffix(MARK) for name in header if name.rpartition(".")[2] == MARK)
    scaled = {_part(layer) for layer in told if header.get(f"{layer}.weight", {}).get("dtype") in FP8}
    for name, entry in header.items():
        layer, _, end = name.rpartition(".")
        if end != "weight" or layer in told or entry["dtype"] not in FP8 or len(entry["shape"]) < 2:
            continue
        if name.startswith(marks) or _part(name) in scaled:
            raise ValueError(
                f"{name}: it is fp8 in a model that is marked as scaled, and its scale {layer}.scale_weight or "
                f"{layer}.weight_scale is missing. Download the file again, or get another one."
            )


def _part(name: str) -> str:
    """Return the prefix of the model that a name belongs to, "" if there is none."""
    found = _PART.match(name)
    return found[0] if found else ""


def _of_metadata(header: Header, text: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if text is None:
        return
    layers = parse(METADATA, text.encode()).get("layers")
    if not isinstance(layers, dict):
        raise ValueError(f"{METADATA}: it names no layers. Get another file.")
    for layer, config in layers.items():
        full = [prefix + layer for prefix in _PREFIXES if f"{prefix}{layer}.weight" in header]
        if not full:
            raise ValueError(f"{layer}.weight: {METADATA} names it, and it is not there. Download the file again.")
        yield full[0], config if isinstance(config, dict) else {"format": config}


def _layer(header: Header, layer: str, config: dict[str, Any], dtype: torch.dtype) -> Recognised:
    """Return the codec and sources of `layer.weight`. Raises ValueError if a part is missing or of another size."""
    name, kind = f"{layer}.weight", config.get("format")
    if name not in header:
        raise ValueError(f"{name}: it is told to be {kind}, and is not there. Download the file again.")
    if kind == Exact12.name:
        return _exact12(header, layer, config, dtype)
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join((*_FORMATS, Exact12.name))
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
    return matched(header, name, codec, sources)


def stored_form(
    layer: str, codec: Codec, parts: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], torch.Tensor]]]:
    """Return how a file holds an encoded `layer.weight`: its configuration, and (dtype, shape, content) by name.

    For fp8 and int8 with float32 scales, and exact12. Scales come first, so that they lie at multiples of 4 bytes.
    """
    if isinstance(codec, Exact12):
        content: dict[str, tuple[str, tuple[int, ...], torch.Tensor]] = {}
        for end, part in zip(_EXACT12_ENDS, parts, strict=True):
            content[f"{layer}.{end}"] = "U8", (part.nbytes,), part
        return {"format": codec.name, "shape": list(codec.shape)}, content
    kind, dtype = ("int8_tensorwise", "I8") if isinstance(codec, Int8) else ("float8_e4m3fn", "F8_E4M3")
    values, scales = parts
    return {"format": kind}, {
        f"{layer}.weight_scale": ("F32", (scales.numel(), 1), scales),
        f"{layer}.weight": (dtype, codec.shape, values),
    }


def _exact12(header: Header, layer: str, config: dict[str, Any], dtype: torch.dtype) -> Recognised:
    """Return the codec and sources of a weight in exact12, whose parts are stored as bytes."""
    name, sources, shape = f"{layer}.weight", tuple(f"{layer}.{end}" for end in _EXACT12_ENDS), config.get("shape")
    if any(header.get(source, {}).get("dtype") != "U8" for source in sources):
        raise ValueError(f"{name}: a part of its 12 bits is missing. Download the file again.")
    is_shape = isinstance(shape, list) and len(shape) <= _MAX_SIZES
    if not is_shape or not all(type(size) is int and 0 < size < 2**31 for size in shape):  # type: ignore[union-attr]
        raise ValueError(f"{name}: nothing tells its shape. Download the file again.")
    try:
        codec = Exact12(tuple(shape), dtype, prod(header[sources[-1]]["shape"]) // 2)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{name}: {error} Run it in bfloat16.") from error
    return matched(header, name, codec, sources)


def _fp8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    if weight["dtype"] not in FP8:
        raise ValueError(f"it is told to be fp8, and stored as {weight['dtype']}.")
    return Fp8(tuple(weight["shape"]), dtype, FP8[weight["dtype"]], count_of_scales(scale), scale_type(scale))


def _int8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    expect(weight, "I8")
    shape, scales = tuple(weight["shape"]), count_of_scales(scale)
    nested = config.get("params")
    options = {**(nested if isinstance(nested, dict) else {}), **config}
    if not options.get("convrot", False):
        return Int8(shape, dtype, torch.int8, scales, scale_type(scale))
    group = options.get("convrot_groupsize", 256)
    if options["convrot"] is not True or type(group) is not int:
        raise ValueError(f"its note is not understood (convrot {options['convrot']!r} in groups of {group!r}).")
    return RotatedInt8(shape, dtype, torch.int8, scales, scale_type(scale), group)


def _mxfp8(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    expect(weight, "F8_E4M3")
    expect(scale, "U8", "F8_E8M0")
    return Mxfp8(tuple(weight["shape"]), dtype)


def _nvfp4(weight: Mapping[str, Any], scale: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Codec:
    expect(weight, "U8")
    expect(scale, "U8", "F8_E4M3")
    return Nvfp4((*weight["shape"][:-1], *(2 * size for size in weight["shape"][-1:])), dtype)


_FORMATS: dict[str, Callable[..., Codec]] = {
    "float8_e4m3fn": _fp8,
    "float8_e5m2": _fp8,
    "int8_tensorwise": _int8,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
