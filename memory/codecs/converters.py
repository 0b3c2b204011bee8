"""The codecs that plain weights can be converted to, by the value of the `weights` option."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import exact12, fp8, int8
from .codec import Codec, Encoded


class Converter(NamedTuple):
    """The codec planned for a weight of a shape and dtype, the call that encodes one, and the error in words.

    `quality` is the root mean square of the error, relative to that of the weights: for Gaussian weights, and for
    weights with outliers (Student's t with 4 degrees of freedom).
    """

    planned: Callable[[tuple[int, ...], torch.dtype], Codec]
    encode: Callable[[torch.Tensor], Encoded]
    quality: str


CONVERTERS = {
    "exact12": Converter(exact12.planned, exact12.encode, "the same bits"),
    "int8": Converter(int8.planned, int8.encode, "weights off by 0.9 %, with outliers 2.5 %"),
    "fp8": Converter(fp8.planned, fp8.encode, "weights off by 2.6 %"),
}


def converter_of(weights: str) -> Converter | None:
    """Return the converter named by `weights`, or None for "auto", which leaves weights as they are.

    Raises ValueError for an unknown name.
    """
    if weights != "auto" and weights not in CONVERTERS:
        raise ValueError(f"unknown weights {weights!r}. Use auto, {', '.join(CONVERTERS)}.")
    return CONVERTERS.get(weights)
