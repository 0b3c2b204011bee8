"""Codecs that plain weights are encoded by at load, where that is asked for, by the word that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import exact12, fp8, int8
from .codec import Codec, Encoded


class Maker(NamedTuple):
    """The approximate stored form of a weight of a shape and a type, and the call that stores one.

    `quality` says in words how far its values are from the plain ones: the root mean square of the difference, as a
    share of that of the values, of Gaussian weights and of ones with outliers (Student's t of 4 degrees).
    """

    planned: Callable[[tuple[int, ...], torch.dtype], Codec]
    encode: Callable[[torch.Tensor], Encoded]
    quality: str


MAKERS = {
    "exact12": Maker(exact12.planned, exact12.encode, "the same bits"),
    "int8": Maker(int8.planned, int8.encode, "weights off by 0.9 %, with outliers 2.5 %"),
    "fp8": Maker(fp8.planned, fp8.encode, "weights off by 2.6 %"),
}


def maker_of(weights: str) -> Maker | None:
    """Return the maker that a word asks for; None for "auto", which leaves weights as they are.

    ValueError for another.
    """
    if weights != "auto" and weights not in MAKERS:
        raise ValueError(f"unknown weights {weights!r}. Use auto, {', '.join(MAKERS)}.")
    return MAKERS.get(weights)
