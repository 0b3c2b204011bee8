"""Pyramid-Flow's text stage: T5 with its mask, and the pooled feature of one CLIP or of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

T5_TOKENS, CLIP_TOKENS = 128, 77
# What the published code puts behind every prompt, and its negative prompt.
SUFFIX = ", hyper quality, Ultra HD, 8K"
NEGATIVE = (
    "cartoon style, worst quality, low quality, blurry, absolute black, absolute white, low res, extra limbs, extra "
    "digits, misplaced objects, mutated anatomy, monochrome, horror"
)


def encode_texts(
    modules: Mapping[str, nn.Module], tokenizers: Mapping[str, Any], texts: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """`prompt_embeds` [B,128,4096], `prompt_attention_mask` int64 [B,128], `pooled_prompt_embeds` [B,768 or 2048].

    `modules` and `tokenizers` are by the numbers of their folders: the last one is T5, those before it are CLIP.
    """
    *clips, t5 = sorted(modules)
    pooled = []
    for name in clips:
        tokens = _tokens(tokenizers[name], texts, CLIP_TOKENS)
        output = modules[name](tokens["input_ids"].to(device))
        pooled.append(output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output)
    tokens = _tokens(tokenizers[t5], texts, T5_TOKENS)
    mask = tokens["attention_mask"].to(device)
    embeds = modules[t5](tokens["input_ids"].to(device), attention_mask=mask)[0]
    return {
        "prompt_embeds": embeds,
        "prompt_attention_mask": mask,
        "pooled_prompt_embeds": torch.cat(pooled, dim=-1),
    }


def _tokens(tokenizer: Any, texts: Sequence[str], length: int) -> Any:
    return tokenizer(
        list(texts),
        padding="max_length",
        max_length=length,
        truncation=True,
        add_special_tokens=True,
        return_tensors="pt",
    )
