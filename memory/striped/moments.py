"""Mean and variance of a whole map, put together from its stripes in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """Of `count` values each: float64 on the CPU, of the dimensions that were not summed over."""

    count: int
    mean: torch.Tensor
    variance: torch.Tensor

    def narrow(self, dim: int, start: int, length: int) -> Moments:
        """Those of a part of a dimension that was not summed over."""
        return Moments(self.count, self.mean.narrow(dim, start, length), self.variance.narrow(dim, start, length))

    def merged(self, groups: int) -> Moments:
        """[B,G] of [B,C,...]: channels in groups, and all further dimensions, are put together. All count alike."""
        mean = self.mean.reshape(self.mean.shape[0], groups, -1)
        variance = self.variance.reshape(mean.shape)
        within, between = variance.mean(-1), mean.var(-1, correction=0)
        return Moments(self.count * mean.shape[-1], mean.mean(-1), within + between)


class Tally:
    """Takes the moments of stripes as they come, along the dimension `axis` and all behind it."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._counts: list[int] = []
        self._parts: list[torch.Tensor] = []

    def add(self, stripe: torch.Tensor) -> None:
        """One more stripe. What is kept of it is small, and lies in RAM: of many stripes it would add up."""
        dims = list(range(self._axis, stripe.dim()))
        variance, mean = torch.var_mean(stripe.float(), dim=dims, correction=0)
        self._parts.append(torch.stack([mean, variance]).cpu())
        self._counts.append(stripe.numel() // max(1, mean.numel()))

    def total(self) -> Moments:
        """The moments of all."""
        parts = torch.stack(self._parts).double()
        counts = torch.tensor(self._counts, dtype=torch.float64).reshape(-1, *[1] * (parts.dim() - 2))
        means, variances = parts.unbind(1)
        mean = (means * counts).sum(0) / counts.sum()
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / counts.sum()
        return Moments(sum(self._counts), mean, variance)
