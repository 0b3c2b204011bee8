"""Encoded parameters: weights that are held as they are stored, and dequantized for the time of a call.

The module shows an empty parameter on `meta`, with the shape and dtype of the dequantized weight, since models ask for
these. The host holds one flat tensor of bytes for it, which moves and is counted as any other weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path

import torch
from torch import nn

from ..codecs.codec import Codec, Part
from .stored import Stamp, Stored

_ATTRIBUTE = "_ballast_encoded"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PART_ALIGNMENT = 16  # bytes: a multiple of the item size of every part's dtype


@dataclass(frozen=True)
class EncodedWeight:
    """The place of an encoded weight: its codec, and the places of the flat parts that the codec names."""

    codec: Codec
    parts: tuple[Stored, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized weight."""
        return self.codec.shape

    @property
    def path(self) -> Path:
        """The file of its first part."""
        return self.parts[0].path

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of that file when its header was read."""
        return self.parts[0].stamp

    def stored(self) -> Stored | None:
        """Return the weight as a plain tensor, if it is stored as one; else None.

        Floats of 8 bits stay encoded: a plain tensor would be cast while it is read, and take more RAM.
        """
        if self.codec.name != "raw" or (self.parts[0].dtype.is_floating_point and self.parts[0].dtype.itemsize == 1):
            return None
        return replace(self.parts[0], shape=self.codec.shape)


Source = Stored | EncodedWeight  # the place of a weight in files


@dataclass(eq=False)
class Encoding:
    """How a parameter is stored, and its bytes on the host, `flat`, which is on `meta` while they are not in RAM."""

    codec: Codec
    flat: torch.Tensor


def extents(source: Source) -> Iterator[tuple[Stored, int]]:
    """Yield the places in files to read for a weight, each with its first byte in the host tensor."""
    if isinstance(source, Stored):
        yield source, 0
        return
    for place, part, (begin, _) in zip(source.parts, source.codec.parts, part_spans(source.codec)[0], strict=True):
        runs = tuple((offset, count * place.dtype.itemsize) for offset, count in place.runs)
        yield replace(place, dtype=torch.uint8, shape=(part.nbytes,), runs=runs), begin


def file_bytes(source: Source) -> int:
    """Return the bytes of files that a weight takes."""
    return source.nbytes if isinstance(source, Stored) else sum(part.nbytes for part in source.codec.parts)


def part_spans(codec: Codec) -> tuple[list[tuple[int, int]], int]:
    """Return the (begin, end) bytes of each part in the flat tensor, and the bytes of that."""
    spans, end = [], 0
    for part in codec.parts:
        spans.append((end, end + part.nbytes))
        end += -(-part.nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
    return spans, end


def split(codec: Codec, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of an encoded weight, as views into its flat tensor."""
    parts: list[tuple[Part, tuple[int, int]]] = list(zip(codec.parts, part_spans(codec)[0], strict=True))
    return [flat[begin:end].view(part.dtype) for part, (begin, end) in parts]


def holds(stored: tuple[int, ...], shape: tuple[int, ...], kernel: bool) -> bool:
    """Return whether a weight of the shape `stored` has the values of a parameter of `shape`, in the same order.

    Sizes of 1 may be missing, as in GGUF. For a convolution's `kernel` neighbouring sizes may also have been
    multiplied.
    """
    if prod(stored) != prod(shape):
        return False
    here, there = [size for size in stored if size != 1], [size for size in shape if size != 1]
    return here == there or kernel and set(accumulate(here, mul)) <= set(accumulate(there, mul))


def kernels_of(module: nn.Module) -> set[int]:
    """Return the `id` of the weight of each convolution in the module."""
    return {id(owner.weight) for owner in module.modules() if isinstance(owner, _CONVOLUTIONS)}


def encoding_of(tensor: torch.Tensor) -> Encoding | None:
    """Return the encoding of a module's tensor; None for a plain one."""
    return getattr(tensor, _ATTRIBUTE, None)


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host's tensor for a module's tensor: its stored bytes if it is encoded, else the tensor itself."""
    encoding = encoding_of(tensor)
    return encoding.flat if encoding else tensor


def unmark_encoded(module: nn.Module) -> None:
    """Make all parameters of a module plain again. None may be in RAM."""
    for parameter in module.parameters():
        if encoding_of(parameter) is not None:
            delattr(parameter, _ATTRIBUTE)


def mark_encoded(module: nn.Module, stored: Mapping[str, Source]) -> None:
    """Mark the parameters of a module on `meta` whose stored form is encoded.

    Raises ValueError, in one line that names the file and the weight, if shapes do not fit.
    """
    kernels = kernels_of(module)
    for name, parameter in module.named_parameters():
        weight = stored.get(name)
        if isinstance(weight, EncodedWeight) and encoding_of(parameter) is None:
            try:
                if not holds(weight.shape, parameter.shape, id(parameter) in kernels):
                    raise ValueError(f"it is {list(weight.shape)} and not {list(parameter.shape)}.")
                codec = weight.codec.fitted(tuple(parameter.shape), parameter.dtype)
            except ValueError as error:
                raise ValueError(f"{weight.path} does not fit its config.json: {name}: {error}") from error
            flat = torch.empty(part_spans(codec)[1], dtype=torch.uint8, device="meta")
            setattr(parameter, _ATTRIBUTE, Encoding(codec, flat))
