"""Decide, call by call, whether a step cache skips a call: one decision for each pass of guidance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .step_cache import StepCache, warm_up

_SEA_MOST = 2  # calls in a row that SeaCache skips, as in diffusers
_SEA_POWER = 3.0  # exponent of the power that SeaCache expects of a clean signal, as in diffusers
_TINY = 1e-16  # added to a mean that is divided by


@dataclass(frozen=True)
class Moment:
    """Where a run is: the step that runs, the number of steps, and the noise level of the step."""

    step: int
    steps: int
    sigma: float


class Decision:
    """Decides by the number of the step, where the cache knows it before the run. Otherwise skips no call."""

    def __init__(self, cache: StepCache) -> None:
        self.cache = cache
        self._mask: tuple[bool, ...] | None = None

    def skips(self, latents: torch.Tensor, now: Moment) -> bool:
        """Return whether to skip a call with these latents, if there is a residual to add. Called once a call."""
        if self.cache.dry:
            return False
        if self._mask is None or len(self._mask) != now.steps:
            self._mask = self.cache.computed(now.steps)
        return self._mask is not None and not self._mask[now.step]

    def first_block_skips(self, residual: torch.Tensor) -> bool:
        """Return whether to skip the blocks behind the first, which has added `residual`."""
        return False

    def ends(self, latents: torch.Tensor, made: torch.Tensor, skipped: bool) -> None:
        """Learn from a call that made this prediction of the latents."""


class EasyCache(Decision):
    """Adds up the expected change of the prediction: that of the latents, times the last known ratio of the two.

    Source: "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching", section 3.
    """

    def __init__(self, cache: StepCache) -> None:
        super().__init__(cache)
        self._latents: torch.Tensor | None = None
        self._made: torch.Tensor | None = None
        self._ratio: float | None = None
        self._change = self._error = 0.0

    def skips(self, latents: torch.Tensor, now: Moment) -> bool:
        if self.cache.dry or self._latents is None or self._latents.shape != latents.shape:
            return False
        self._change = _mean(latents - self._latents)
        if self._ratio is None or self._made is None or not warm_up(now.steps) <= now.step < now.steps - 1:
            return False
        self._error += self._ratio * self._change / _mean(self._made)
        return self._error < self.cache.amount

    def ends(self, latents: torch.Tensor, made: torch.Tensor, skipped: bool) -> None:
        before, self._latents, self._made = self._made, latents, made
        if skipped or self.cache.dry:
            return
        self._error = 0.0
        if before is not None and before.shape == made.shape and self._change:
            self._ratio = _mean(made - before) / self._change


class SeaCache(Decision):
    """Adds up the change of the latents, filtered by how much of each frequency is signal at this noise level.

    Source: "SeaCache", arXiv 2602.18993, in the arithmetic of diffusers' `hooks.sea_cache`.
    """

    def __init__(self, cache: StepCache) -> None:
        super().__init__(cache)
        self._filtered: list[torch.Tensor] = []
        self._error = 0.0
        self._skipped = 0

    def skips(self, latents: torch.Tensor, now: Moment) -> bool:
        from diffusers.hooks.sea_cache import _apply_sea_filter

        before = self._filtered
        self._filtered = [_apply_sea_filter(each.movedim(0, -1), now.sigma, _SEA_POWER) for each in latents]
        if self.cache.dry:
            return False
        alike = [new.shape for new in self._filtered] == [old.shape for old in before]
        if not alike or not 1 <= now.step < now.steps - 1 or self._skipped >= _SEA_MOST:
            self._error = 0.0
            return False
        changes = [
            _mean(new.float() - old.float()) / _mean(old) for new, old in zip(self._filtered, before, strict=True)
        ]
        self._error += sum(changes) / len(changes)
        if self._error < self.cache.amount:
            return True
        self._error = 0.0
        return False

    def ends(self, latents: torch.Tensor, made: torch.Tensor, skipped: bool) -> None:
        self._skipped = self._skipped + 1 if skipped else 0


class FirstBlockCache(Decision):
    """Compares what the first block adds with what it added in the last computed call.

    Source: ParaAttention, in the arithmetic of diffusers' `hooks.first_block_cache`.
    """

    def __init__(self, cache: StepCache) -> None:
        super().__init__(cache)
        self._residual: torch.Tensor | None = None

    def first_block_skips(self, residual: torch.Tensor) -> bool:
        before = self._residual
        if self.cache.dry or before is None or before.shape != residual.shape:
            self._residual = residual
            return False
        skips = (residual - before).abs().mean() / before.abs().mean() <= self.cache.amount
        if not skips:
            self._residual = residual
        return bool(skips)


def decision_of(cache: StepCache) -> Decision:
    """Return a decision of the cache's kind that has seen no call."""
    kinds: dict[str, type[Decision]] = {"easycache": EasyCache, "seacache": SeaCache, "firstblock": FirstBlockCache}
    return kinds.get(cache.kind, Decision)(cache)


def _mean(tensor: torch.Tensor) -> float:
    return float(tensor.float().abs().mean() + _TINY)
