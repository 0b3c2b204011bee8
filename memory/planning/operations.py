"""How much a unit computes: in large products and in attention, which a card does at a rate of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..rates import Rates


@dataclass(frozen=True)
class Operations:
    """Those of products and convolutions, and those of attention in one kernel.

    Attention that a card has no kernel for is made of products, and counted as such.
    """

    products: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All, whatever they are of."""
        return self.products + self.attention

    def seconds(self, rates: Rates, dtype: str) -> float:
        """How long they take in a type, named as in safetensors."""
        return self.products / rates.operations_in(dtype) + self.attention / rates.attention_in(dtype)

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.products + other.products, self.attention + other.attention)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.products - other.products, self.attention - other.attention)

    def __mul__(self, times: float) -> Operations:
        return Operations(self.products * times, self.attention * times)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Operations:
        """From plain data of a file. Raises KeyError, TypeError or ValueError for anything else."""
        found = cls(float(data["products"]), float(data["attention"]))
        if not all(0 <= each < math.inf for each in (found.products, found.attention)):
            raise ValueError("there are operations that are not numbers from 0 up")
        return found
