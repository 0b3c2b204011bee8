"""HiDream-I1: the generic path, at the size that was asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .generic import GenericPipeline


def _any_routing(module: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`moe_infer` on shapes, where nobody knows which expert gets a token: as if one expert got every token.

    An upper bound. Even routing gives an expert half of them (2 of 4 experts are active).
    """
    cache, order = torch.zeros_like(x), indices.argsort()
    tokens = order // module.num_activated_experts
    for active in range(module.num_activated_experts):
        part = slice(active * len(x), (active + 1) * len(x))
        out = module.experts[active](x[tokens[part]])
        out.mul_(weights[order[part]])
        cache = cache.to(out.dtype)
        cache.scatter_reduce_(0, tokens[part].view(-1, 1).repeat(1, x.shape[-1]), out, reduce="sum")
    return cache


class HiDreamPipeline(GenericPipeline):
    """`HiDreamImagePipeline`, staged."""

    stand_ins: ClassVar = {("MOEFeedForwardSwiGLU", "moe_infer"): _any_routing}
    batch_dims: ClassVar = {"encoder_hidden_states_llama3": 1}  # [layers, batch, tokens, channels]

    def _prepare(self, pipe: Any, arguments: dict[str, Any]) -> None:
        # The stock pipeline rescales every size to the area of default_sample_size squared: make that the area asked.
        side = pipe.default_sample_size * pipe.vae_scale_factor
        width, height = arguments.get("width", side), arguments.get("height", side)
        # A hair more, since it rounds the result down.
        pipe.default_sample_size = (width * height) ** 0.5 / pipe.vae_scale_factor * (1 + 1e-9)
