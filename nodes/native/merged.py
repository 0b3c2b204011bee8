"""A patch of a MODEL that gives, on weights in RAM, the numbers of those that stay in VRAM.

It is an adapter of ComfyUI's own kind, and stands in a patcher's list of patches: nothing of the host is replaced. Only
a ComfyUI can import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy import float as rounding
from comfy import lora
from comfy.weight_adapter import WeightAdapterBase

from .at_use import is_sampling, merge_type, workspace_bytes

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class AsMerged(WeightAdapterBase):
    """All patches of one weight, as one.

    `weights` are those patches, the type that the weight is stored in, the host's record of weights that it has merged
    patches into, and the seed of the rounding. The host makes such objects from these two arguments too.
    """

    name = "ballast_as_merged"

    def __init__(self, loaded_keys: set[str], weights: Sequence[Any]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights
        self.patches, self.stored, self.merged, self.seed = weights
        self.is_equal = True  # as far as was seen

    def calculate_weight(
        self,
        weight: torch.Tensor,
        key: str,
        strength: float,
        strength_model: float,
        offset: Any,
        function: Any,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: Any = None,
    ) -> torch.Tensor:
        """Return the weight with its patches: as it is to be merged, or as it is used where it was not."""
        merges = key in self.merged or original_weight is not None
        if not merges and is_sampling():
            self.is_equal = _holds(weight.dtype, self.stored)
            if self.is_equal:
                return self._as_merged(weight, key)
        return lora.calculate_weight(self.patches, weight, key, intermediate_dtype, original_weight)

    def _as_merged(self, weight: torch.Tensor, key: str) -> torch.Tensor:
        """Return what the host would have merged. It comes and goes in the type that the layer computes in."""
        merges_in = merge_type(weight.device)
        # The host goes on without a LoRA whose memory it cannot get: fail before.
        torch.empty(workspace_bytes(weight.numel(), merges_in, weight.dtype), dtype=torch.uint8, device=weight.device)
        merged = lora.calculate_weight(self.patches, weight.to(merges_in), key)
        return rounding.stochastic_rounding(merged, self.stored, seed=self.seed).to(weight.dtype)


def _holds(computes_in: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a type holds every value of another."""
    return stored in _FP8 or torch.promote_types(stored, computes_in) == computes_in
