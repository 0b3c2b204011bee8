"""Files quantized by torchao (github.com/pytorch/ao), as diffusers and transformers save them in safetensors.

The parts of a weight have names with an underscore, such as `_weight_qdata`. The header's metadata name the tensor
class under the weight's own name. Supported are int8 and fp8 with a scale for each row, or one for all. Where torchao
would also round the inputs of a layer, here the weights are decoded, and the layer computes in its own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .codec import CHUNK_WEIGHTS, Part, tiles
from .fp8 import Fp8
from .header import FP8, Header, Recognised, count_of_scales, expect, matched, parse, scale_type
from .scaled import Scaled

_VALUES = "_qdata"
SIGNS = (_VALUES,)
_KINDS = {"Int8Tensor": ("qdata", "scale", "zero_point"), "Float8Tensor": ("qdata", "scale")}


@dataclass(frozen=True)
class ShiftedInt8(Scaled):
    """int8 values minus the zero point of their row, times its scale."""

    name: ClassVar[str] = "int8 of torchao"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The values, their scales and their int8 zero points."""
        return (*super().parts, Part("zero_point", torch.int8, self.scales))

    @property
    def row_parts(self) -> tuple[int, ...] | None:
        """Elements of a row, its scale and its zero point: 1 of each, or 0 if shared by all rows."""
        rows = super().row_parts
        return rows and (*rows, rows[1])

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a chunk's intermediates, and of the zero points in float32."""
        return super().workspace_bytes + 4 * self.scales

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = self.rows if self.scales > 1 else 1
        values, result = parts[0].view(rows, -1), out.view(rows, -1)
        scales, zeros = (part.to(torch.float32).view(-1, 1) for part in parts[1:])
        for tile in tiles(rows, values.shape[1], CHUNK_WEIGHTS):
            shifted = values[tile].to(torch.float32).sub_(zeros[tile[0]])
            torch.mul(shifted, scales[tile[0]], out=result[tile])
            del shifted


def layers(header: Header, metadata: Mapping[str, str], dtype: torch.dtype) -> dict[str, Recognised]:
    """Return the quantized weights of a file by name, to be decoded to `dtype`.

    Raises ValueError in one line that begins with the name of the weight that is damaged or not supported.
    """
    found = {}
    for part in header:
        layer, _, end = part.rpartition(".")
        if end.startswith("_") and end.endswith(_VALUES):
            name = f"{layer}." * bool(layer) + end[1:].removesuffix(_VALUES)
            if name not in metadata:
                raise ValueError(f"{name}: the header does not tell how it was quantised. Download the file again.")
            found[name] = _layer(header, name, parse(name, metadata[name].encode()), dtype)
    return found


def _layer(header: Header, name: str, told: Mapping[str, Any], dtype: torch.dtype) -> Recognised:
    kind, facts = told.get("_type"), told.get("_data")
    if not isinstance(kind, str) or kind not in _KINDS or not isinstance(facts, dict):
        raise ValueError(
            f"{name}: it is quantised as {kind!r} of torchao; Ballast decodes {', '.join(_KINDS)}. "
            "Get the file in one of these."
        )
    layer, _, leaf = name.rpartition(".")
    sources = tuple(f"{layer}." * bool(layer) + f"_{leaf}_{part}" for part in _KINDS[kind])
    for source in sources:
        if source not in header:
            raise ValueError(f"{name}: its part {source} is missing. Download the file again.")
    values, scale = header[sources[0]], header[sources[1]]
    shape = tuple(values["shape"])
    try:
        scales = count_of_scales(scale)
        if facts.get("block_size") != [*((1, *shape[1:]) if scales > 1 else shape)]:
            raise ValueError(f"its scales are of blocks of {facts.get('block_size')!r}, not of rows, not of all.")
        if kind == "Int8Tensor":
            expect(values, "I8")
            expect(header[sources[2]], "I8")
            codec: Scaled = ShiftedInt8(shape, dtype, torch.int8, scales, scale_type(scale))
        else:
            expect(values, *FP8)
            codec = Fp8(shape, dtype, FP8[values["dtype"]], scales, scale_type(scale))
    except ValueError as error:
        raise ValueError(f"{name}: {error} Get another file.") from error
    return matched(header, name, codec, sources)
