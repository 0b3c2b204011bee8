"""Mean and variance of all rows, accumulated stripe by stripe and merged in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_AT_ONCE_BYTES = 2**20  # of results of stripes that may wait on the device


@dataclass(frozen=True)
class MeanVariance:
    """Mean and variance of `count` values for each element of the dimensions not reduced, float64 on the CPU."""

    count: int
    mean: torch.Tensor
    variance: torch.Tensor

    def narrow(self, dim: int, start: int, length: int) -> MeanVariance:
        """Return mean and variance of `length` elements of a dimension that was not reduced."""
        return MeanVariance(self.count, self.mean.narrow(dim, start, length), self.variance.narrow(dim, start, length))

    def squeeze(self, dim: int) -> MeanVariance:
        """Return mean and variance without a dimension of size 1 that was not reduced."""
        return MeanVariance(self.count, self.mean.squeeze(dim), self.variance.squeeze(dim))

    def merged(self, groups: int) -> MeanVariance:
        """Return mean and variance [B,G] of these [B,C,...], merged over groups of channels and all further dimensions.

        The variance is the mean of the variances plus the variance of the means, since all have equal counts.
        """
        mean = self.mean.reshape(self.mean.shape[0], groups, -1)
        variance = self.variance.reshape(mean.shape)
        within, between = variance.mean(-1), mean.var(-1, correction=0)
        return MeanVariance(self.count * mean.shape[-1], mean.mean(-1), within + between)


class RunningVariance:
    """An accumulator of mean and variance over the dimension `axis` and all behind it.

    A stripe's are computed in float32 on the device; `total` merges them by the counts in float64 on the CPU.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._counts: list[int] = []
        self._parts: list[torch.Tensor] = []
        self._done: list[torch.Tensor] = []

    def add(self, stripe: torch.Tensor) -> None:
        """Add a stripe. Its results stay on the device up to 1 MB in all, since the host waits for a copy to RAM."""
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

    def total(self) -> MeanVariance:
        """Return the mean and population variance of all stripes so far."""
        self._flush()
        parts = torch.cat(self._done).double()
        counts = torch.tensor(self._counts, dtype=torch.float64).reshape(-1, *[1] * (parts.dim() - 2))
        means, variances = parts.unbind(1)
        mean = (means * counts).sum(0) / counts.sum()
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / counts.sum()
        return MeanVariance(sum(self._counts), mean, variance)
