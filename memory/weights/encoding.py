"""Parameters whose weights are held as they are stored: encoded, and decoded for the time of a call.

The module shows an empty parameter on `meta`, of the shape and the type that it has when decoded, since models ask for
these. What the host holds of it is one flat tensor of bytes, which moves and is counted as any other weight is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..codecs.codec import Codec, Part
from .stored import Stamp, Stored

if TYPE_CHECKING:
    from ..codecs.making import Maker

_ATTRIBUTE = "_ballast_encoded"
_MADE = (nn.Linear, nn.Conv2d, nn.Conv3d)  # whose weights are worth it
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PART_ALIGNMENT = 16  # bytes: of any type that parts have


@dataclass(frozen=True)
class EncodedWeight:
    """A weight as it is stored: its codec, and where each part that the codec names lies, flat."""

    codec: Codec
    parts: tuple[Stored, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded weight."""
        return self.codec.shape

    @property
    def path(self) -> Path:
        """The file that it lies in."""
        return self.parts[0].path

    @property
    def stamp(self) -> Stamp | None:
        """The file's when its header was read."""
        return self.parts[0].stamp

    def stored(self) -> Stored | None:
        """Return the same as a plain tensor, if it is stored as one.

        Floats of 8 bits are only ever read as they are.
        """
        if self.codec.name != "raw" or (self.parts[0].dtype.is_floating_point and self.parts[0].dtype.itemsize == 1):
            return None
        return replace(self.parts[0], shape=self.codec.shape)


Source = Stored | EncodedWeight  # where a weight lies in files


@dataclass(eq=False)
class Encoding:
    """How a parameter is stored, and the bytes that the host holds of it, on `meta` where they are not in RAM.

    With a `maker` it is a plain weight in its file, which is encoded when it is read; until then the codec is about
    what that will make.
    """

    codec: Codec
    flat: torch.Tensor
    maker: Maker | None = None


def extents(source: Source) -> Iterator[tuple[Stored, int]]:
    """Yield what is read of files for a weight, each with the byte of the host's tensor where it goes."""
    if isinstance(source, Stored):
        yield source, 0
        return
    for place, part, (begin, _) in zip(source.parts, source.codec.parts, part_spans(source.codec)[0], strict=True):
        runs = tuple((offset, count * place.dtype.itemsize) for offset, count in place.runs)
        yield replace(place, dtype=torch.uint8, shape=(part.nbytes,), runs=runs), begin


def file_bytes(source: Source) -> int:
    """Bytes of files that a weight takes."""
    return source.nbytes if isinstance(source, Stored) else sum(part.nbytes for part in source.codec.parts)


def part_spans(codec: Codec) -> tuple[list[tuple[int, int]], int]:
    """From which byte to which each part lies in the flat tensor, and how long that is."""
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
    """Return whether a weight stored in one shape is a parameter of another: the same numbers in the same order.

    Sizes of 1 get lost, as in GGUF. A `kernel` of a convolution may also have neighbouring sizes multiplied.
    """
    if prod(stored) != prod(shape):
        return False
    here, there = [size for size in stored if size != 1], [size for size in shape if size != 1]
    return here == there or kernel and set(accumulate(here, mul)) <= set(accumulate(there, mul))


def kernels_of(module: nn.Module) -> set[int]:
    """Return the `id` of each weight of a convolution in the module."""
    return {id(owner.weight) for owner in module.modules() if isinstance(owner, _CONVOLUTIONS)}


def encoding_of(tensor: torch.Tensor) -> Encoding | None:
    """Return how a module's tensor is stored, if it is an encoded parameter."""
    return getattr(tensor, _ATTRIBUTE, None)


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the host holds of a module's tensor: the tensor itself or, of an encoded parameter, its bytes."""
    encoding = encoding_of(tensor)
    return encoding.flat if encoding else tensor


def mark_made(module: nn.Module, maker: Maker) -> None:
    """Mark the weights of matrices and convolutions to be encoded when they are read, where that is a gain."""
    for owner in module.modules():
        weight = owner._parameters.get("weight") if isinstance(owner, _MADE) else None
        if weight is None or encoding_of(weight) is not None or not weight.is_contiguous():
            continue
        codec = maker.planned(tuple(weight.shape), weight.dtype)
        if codec.name != "raw":
            flat = torch.empty(part_spans(codec)[1], dtype=torch.uint8, device="meta")
            setattr(weight, _ATTRIBUTE, Encoding(codec, flat, maker))


def unmark_made(module: nn.Module) -> None:
    """Undo `mark_made`: the weights are to be plain again. None may be in RAM."""
    for parameter in module.parameters():
        encoding = encoding_of(parameter)
        if encoding is not None and encoding.maker is not None:
            delattr(parameter, _ATTRIBUTE)


def unmark_encoded(module: nn.Module, stored: Mapping[str, Source]) -> None:
    """Make the parameters of a module plain again that are not stored encoded. None is in RAM."""
    for name, parameter in module.named_parameters():
        if encoding_of(parameter) is not None and not isinstance(stored.get(name), EncodedWeight):
            delattr(parameter, _ATTRIBUTE)


def mark_encoded(module: nn.Module, stored: Mapping[str, Source]) -> None:
    """Mark the parameters of a module on `meta` whose stored form is encoded.

    Raises ValueError, in one line that names the file and the weight, for one that does not hold its parameter.
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
