"""HiDream-I1: the generic path, at the size that was asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from .generic import GenericPipeline


def _even_routing(module: nn.Module, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`moe_infer` on shapes: which expert gets a token is not known, so each token goes to the first ones."""
    cache, order = torch.zeros_like(x), indices.argsort()
    tokens = order // module.num_activated_experts
    for i in range(module.num_activated_experts):
        part = slice(i * len(x), (i + 1) * len(x))
        out = module.experts[i](x[tokens[part]])
        out.mul_(weights[order[part]])
        cache = cache.to(out.dtype)
        cache.scatter_reduce_(0, tokens[part].view(-1, 1).repeat(1, x.shape[-1]), out, reduce="sum")
    return cache


class HiDreamPipeline(GenericPipeline):
    """`HiDreamImagePipeline`, staged."""

    stand_ins: ClassVar = {("MOEFeedForwardSwiGLU", "moe_infer"): _even_routing}

    def _prepare(self, pipe: Any, arguments: dict[str, Any]) -> None:
        # The stock pipeline rescales every size to the area of default_sample_size squared: make that the area asked.
        side = pipe.default_sample_size * pipe.vae_scale_factor
        width, height = arguments.get("width", side), arguments.get("height", side)
        # A hair more, since it rounds the result down.
        pipe.default_sample_size = (width * height) ** 0.5 / pipe.vae_scale_factor * (1 + 1e-9)
