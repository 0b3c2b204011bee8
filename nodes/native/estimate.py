"""ComfyUI's own estimate of a MODEL's memory beside its weights: its figures, a factor for each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expected:
    """Bytes of activations: of both prompts in one batch, and of one prompt alone."""

    both_bytes: int
    one_bytes: int

    def of(self, guidance: float | None) -> int:
        """With this scale of classifier-free guidance; None where the sampler has another kind."""
        return self.one_bytes if guidance == 1 else self.both_bytes


def expected(patcher: Any, shape: Sequence[int], conditionings: Mapping[str, Any] | None = None) -> Expected:
    """Return the host's figures for latents of this shape, batch first.

    `conditionings` by name are those that its sampler holds; their ControlNets count too.
    """
    from comfy import sampler_helpers

    beside = 0
    if conditionings:
        beside = int(sampler_helpers.get_additional_models(conditionings, patcher.model_dtype())[1])
    estimate = getattr(sampler_helpers, "estimate_memory", None)
    if conditionings and estimate:
        both, one = estimate(patcher, shape, conditionings)
    else:
        both, one = (patcher.model.memory_required([count, *shape[1:]]) for count in (2 * shape[0], shape[0]))
    return Expected(int(both) + beside, int(one) + beside)
