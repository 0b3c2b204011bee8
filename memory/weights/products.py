"""Changes of weights that are products of small factors: LoHa (elementwise) and LoKr (Kronecker).

Formulas: LoHa (arXiv:2108.06098), LoKr (arXiv:2212.10650), each with Tucker factors as in LyCORIS (arXiv:2309.14859).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .changes import Change, Held, Shape, applied, convolution_of

Runs = tuple[tuple[int, int], ...]  # (begin, end) of rows of an output


@dataclass(frozen=True, eq=False)
class Hadamard(Change):
    """LoHa: the elementwise product of two low-rank matrices.

    One is `w1_a` [out, rank] @ `w1_b` [rank, in, ...], the other is made of `w2_a` and `w2_b` likewise. With Tucker
    cores `t1` and `t2` [rank, rank, ...], which have the kernel, `w1_a` and `w2_a` are [rank, out]. The product has the
    size of the layer's weight, and is made anew in each call: it counts as an activation.
    """

    w1_a: torch.Tensor
    w1_b: torch.Tensor
    w2_a: torch.Tensor
    w2_b: torch.Tensor
    t1: torch.Tensor | None = None
    t2: torch.Tensor | None = None
    alpha: float | None = None

    @property
    def rank(self) -> int:
        """The rank of the first product, by which the change is scaled."""
        return self.w1_b.shape[0]

    def scaling(self, strength: float) -> float:
        """Return the scaling by `alpha` / rank, as peft and LyCORIS do."""
        return strength if self.alpha is None else strength * self.alpha / self.rank

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        (out, into, *kernel), found = weight, []
        for a, b, core in ((self.w1_a, self.w1_b, self.t1), (self.w2_a, self.w2_b, self.t2)):
            rank = b.shape[0]
            if core is None:
                found += [(a, (out, rank)), (b, (rank, into, *kernel))]
            else:
                found += [(a, (rank, out)), (b, (rank, into)), (core, (rank, rank, *kernel))]
        return [(tuple(tensor.shape), wanted) for tensor, wanted in found]

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        weight = self._half(held, "w1_a", "w1_b", "t1")
        weight = weight * self._half(held, "w2_a", "w2_b", "t2")
        return applied(module, x, weight.reshape(module.weight.shape))

    @staticmethod
    def _half(held: Held, a: str, b: str, core: str) -> torch.Tensor:
        """Return one of the two low-rank matrices, [out, in, ...] or flat [out, in * ...]."""
        if core in held:
            return torch.einsum("rs...,ro,si->oi...", held[core], held[a], held[b])
        return held[a] @ held[b].flatten(1)


@dataclass(frozen=True, eq=False)
class Kronecker(Change):
    """LoKr: the Kronecker product of `w1` [a, b] and `w2` [c, d, ...], for a weight [a * c, b * d, ...].

    Either factor may be a product itself: `w1_a` [a, rank] @ `w1_b` [rank, b], `w2_a` [c, rank] @ `w2_b` [rank, d,
    ...]. With a Tucker core `t2` [rank, rank, ...] these are `w2_a` [rank, c] and `w2_b` [rank, d]. The large weight is
    never made. A change with a rank is scaled by `alpha` / rank.

    `rows` selects rows of the product, as (begin, end); empty means all. The module may have only a part of the weight
    that the change was made for: for example the query of a fused query, key and value.
    """

    w1: torch.Tensor | None = None
    w1_a: torch.Tensor | None = None
    w1_b: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    w2_a: torch.Tensor | None = None
    w2_b: torch.Tensor | None = None
    t2: torch.Tensor | None = None
    alpha: float | None = None
    rows: Runs = ()

    def structure(self) -> list[Any]:
        return [*super().structure(), list(map(list, self.rows))]

    def scaling(self, strength: float) -> float:
        """Return the scaling as LyCORIS has it: the strength alone if both factors are whole."""
        factor = self.w2_b if self.w2_b is not None else self.w1_b
        return strength if self.alpha is None or factor is None else strength * self.alpha / factor.shape[0]

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        ranks = []
        for a, b in ((self.w1_a, self.w1_b), (self.w2_a, self.w2_b)):
            if a is not None and b is not None:
                ranks.append(((a.shape[0 if a is self.w2_a and self.t2 is not None else 1],), (b.shape[0],)))
        made = self.shape()
        if self.rows and max(end for _, end in self.rows) <= made[0]:
            made = sum(end - begin for begin, end in self.rows), *made[1:]
        return [*ranks, (made, weight)]

    def shape(self) -> Shape:
        """Return the shape of the whole product, before `rows` selects from it."""
        left, right = self._left_shape(), self._right_shape()
        return left[0] * right[0], left[1] * right[1], *right[2:]

    def _left_shape(self) -> Shape:
        if self.w1 is not None:
            return tuple(self.w1.shape)
        assert self.w1_a is not None and self.w1_b is not None
        return self.w1_a.shape[0], self.w1_b.shape[1]

    def _right_shape(self) -> Shape:
        if self.w2 is not None:
            return tuple(self.w2.shape)
        assert self.w2_a is not None and self.w2_b is not None
        if self.t2 is not None:
            return self.w2_a.shape[1], self.w2_b.shape[1], *self.t2.shape[2:]
        return self.w2_a.shape[0], *self.w2_b.shape[1:]

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        left = held["w1"] if "w1" in held else held["w1_a"] @ held["w1_b"]
        if (convolve := convolution_of(module)) is None:
            # kron(w1, w2) @ x without the large product: w2 maps each of b blocks of x, then w1 mixes the blocks.
            y = x.unflatten(-1, (left.shape[1], -1))
            if "w2" in held:
                y = functional.linear(y, held["w2"])
            else:
                y = functional.linear(functional.linear(y, held["w2_b"]), held["w2_a"])
            y = functional.linear(y.transpose(-1, -2), left).transpose(-1, -2).flatten(-2)
            return torch.cat([y[..., begin:end] for begin, end in self.rows], -1) if self.rows else y
        # The same for a convolution: the blocks of channels are a batch while w2 is applied.
        y = x.unflatten(1, (left.shape[1], -1)).flatten(0, 1)
        ones = (1,) * (x.ndim - 2)
        if "t2" in held:
            y = convolve(y, held["w2_b"].unflatten(1, (-1, *ones)))
            y = convolve(y, held["t2"], None, module.stride, module.padding)
            y = convolve(y, held["w2_a"].t().unflatten(1, (-1, *ones)))
        elif "w2" in held:
            y = convolve(y, held["w2"], None, module.stride, module.padding)
        else:
            y = convolve(y, held["w2_b"], None, module.stride, module.padding)
            y = convolve(y, held["w2_a"].unflatten(1, (-1, *ones)))
        y = y.unflatten(0, (-1, left.shape[1])).movedim(1, -1)
        y = functional.linear(y, left).movedim(-1, 1).flatten(1, 2)
        return torch.cat([y[:, begin:end] for begin, end in self.rows], 1) if self.rows else y
