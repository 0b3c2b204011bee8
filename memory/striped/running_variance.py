"""Mean and variance of a whole map, put together from its stripes in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_AT_ONCE_BYTES = 2**20  # of moments of stripes, that wait on the device


@dataclass(frozen=True)
class Moments:
    """Mean and variance of `count` values each: float64 on the CPU, in the dimensions that were not summed over."""

    count: int
    mean: torch.Tensor
    variance: torch.Tensor

    def narrow(self, dim: int, start: int, length: int) -> Moments:
        """Return the moments of a part of a dimension that was not summed over."""
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
        self._done: list[torch.Tensor] = []

    def add(self, stripe: torch.Tensor) -> None:
        """One more stripe. What is kept of it is small, and goes to RAM only with others: the host waits for that."""
        dims = list(range(self._axis, stripe.dim()))
        variance, mean = torch.var_mean(stripe.float(), dim=dims, correction=0)
        self._parts.append(torch.stack([mean, variance]))
        self._counts.append(stripe.numel() // max(1, mean.numel()))
        if len(self._parts) * self._parts[0].nbytes > _AT_ONCE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            self._done.append(torch.stack(self._parts).cpu())
            self._parts = []

    def total(self) -> Moments:
        """Return the moments of all."""
        self._flush()
        parts = torch.cat(self._done).double()
        counts = torch.tensor(self._counts, dtype=torch.float64).reshape(-1, *[1] * (parts.dim() - 2))
        means, variances = parts.unbind(1)
        mean = (means * counts).sum(0) / counts.sum()
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / counts.sum()
        return Moments(sum(self._counts), mean, variance)
