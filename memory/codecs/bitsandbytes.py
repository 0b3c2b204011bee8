"""Files quantized by bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes), recognized by their headers.

4-bit layers have a JSON note beside them, `quant_state.bitsandbytes__nf4` or `__fp4`. LLM.int8 layers (arXiv
2208.07339) have `SCB`, the largest absolute value of each row. bitsandbytes also rounds the inputs of an int8 layer to
int8. Here the weights are decoded, and the layer computes in its own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .four_bit import NESTED_BLOCK, FourBit
from .header import Header, Recognised, expect, matched, parse
from .int8 import LARGEST
from .scaled import Scaled

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_FORMAT, _LARGEST_OF_ROWS, _SCALES = ".weight_format", ".SCB", ".absmax"
NOTES = (*_STATES, _FORMAT)
SIGNS = (_LARGEST_OF_ROWS, _SCALES)


@dataclass(frozen=True)
class LlmInt8(Scaled):
    """int8 values times `SCB` of their row, divided by 127."""

    name: ClassVar[str] = "int8 of bitsandbytes"
    chunk_bytes: ClassVar[int] = 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, and of the scales in float32."""
        return super().workspace_bytes + 4 * self.scales

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        super()._decode((parts[0], parts[1].to(torch.float32) / LARGEST), out)


def layers(header: Header, notes: Mapping[str, bytes], dtype: torch.dtype) -> dict[str, Recognised]:
    """Return the quantized weights of a file by name, to be decoded to `dtype`.

    `notes` are the bytes of the tensors whose names end in `NOTES`. Raises ValueError in one line that begins with the
    name of the weight or note that is damaged or not supported.
    """
    found = {}
    for name in header:
        if name.endswith(_SCALES) and not name.endswith(".nested_absmax"):
            weight = name.removesuffix(_SCALES)
            found[weight] = _four_bit(header, weight, notes, dtype)
        elif name.endswith(_LARGEST_OF_ROWS):
            layer = name.removesuffix(_LARGEST_OF_ROWS)
            found[f"{layer}.weight"] = _int8(header, layer, notes, dtype)
    return found


def _four_bit(header: Header, name: str, notes: Mapping[str, bytes], dtype: torch.dtype) -> Recognised:
    states = [f"{name}{end}" for end in _STATES if f"{name}{end}" in header]
    if len(states) != 1:
        raise ValueError(f"{name}: nothing tells how its 4 bits were made (quant_state). Download the file again.")
    told = parse(states[0], notes.get(states[0], b""))
    shape, block, offset = told.get("shape"), told.get("blocksize"), told.get("nested_offset")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{states[0]}: it tells no shape. Download the file again.")
    nested = f"{name}.nested_absmax" in header
    if nested and (type(offset) is not float or told.get("nested_blocksize") != NESTED_BLOCK):
        raise ValueError(
            f"{states[0]}: its scales are not in blocks of {NESTED_BLOCK} with an offset. Get another file."
        )
    ends = ("", ".absmax", ".quant_map", *((".nested_absmax", ".nested_quant_map") if nested else ()))
    sources = tuple(f"{name}{end}" for end in ends)
    for source in sources:
        if source not in header:
            raise ValueError(f"{name}: its part {source} is missing. Download the file again.")
    try:
        expect(header[name], "U8")
        for source, kinds in zip(sources[1:], (("U8",) if nested else ("F32",), *[("F32",)] * 3), strict=False):
            expect(header[source], *kinds)
        codec = FourBit(tuple(shape), dtype, _whole(block), offset if nested else None)
    except ValueError as error:
        raise ValueError(f"{name}: {error} Get another file.") from error
    return matched(header, name, codec, sources)


def _int8(header: Header, layer: str, notes: Mapping[str, bytes], dtype: torch.dtype) -> Recognised:
    name, scale, order = f"{layer}.weight", f"{layer}{_LARGEST_OF_ROWS}", f"{layer}{_FORMAT}"
    if name not in header:
        raise ValueError(f"{name}: it has scales of bitsandbytes, and is not there. Download the file again.")
    if order in header and any(notes.get(order, b"")):
        raise ValueError(f"{name}: its rows lie in the order of a card. Get it saved by a newer bitsandbytes.")
    try:
        expect(header[name], "I8")
        expect(header[scale], "F32")
        shape = tuple(header[name]["shape"])
        codec = LlmInt8(shape, dtype, torch.int8, shape[0] if shape else 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error} Get another file.") from error
    return matched(header, name, codec, (name, scale))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"its note tells no size of blocks ({value!r}).")
    return value
