"""NewBie's transformer with its text, as the samplers call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...encoding.conditioning import Text, text_of
from .sampling import guide


class Velocity:
    """The transformer with its text, as the samplers call it."""

    def __init__(
        self, transformer: nn.Module, tensors: Mapping[str, Any], arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        self.transformer, self.arguments, self.dtype = transformer, arguments, dtype
        self.alone = text_of(tensors)
        self.both = _both(tensors) if arguments["guidance_scale"] > 1 else None

    def __call__(self, x: torch.Tensor, time: float) -> torch.Tensor:
        guided = self.both is not None and time < self.arguments["cfg_trunc"]
        inputs = torch.cat([x, x]) if guided else x
        text = self.both if guided and self.both else self.alone
        at = torch.full((len(inputs),), time, device=x.device)
        found = self.transformer(inputs.to(self.dtype), at, *text, return_dict=False)[0].float()
        if not guided:
            return found
        conditional, unconditional = found.chunk(2)
        return guide(conditional, unconditional, self.arguments["guidance_scale"], self.arguments["renorm_cfg"])


def _both(tensors: Mapping[str, Any]) -> Text:
    """Return the prompts, then the negative ones, which are padded to one length with them."""
    texts = [text_of(tensors), text_of(tensors, "negative_")]
    longest = max(embeds.shape[1] for embeds, _, _ in texts)
    embeds, mask, pooled = [], [], []
    for text, valid, feature in texts:
        missing = longest - text.shape[1]
        embeds.append(torch.nn.functional.pad(text, (0, 0, 0, missing)))
        mask.append(torch.nn.functional.pad(valid, (0, missing)))
        pooled.append(feature)
    return torch.cat(embeds), torch.cat(mask), torch.cat(pooled)
