"""NewBie's text encoder: the language model of Gemma-3-4B-it, whose last state but one the transformer reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....memory.weights.stored import Stored

REPOSITORY = "google/gemma-3-4b-it"
SYSTEM_PROMPT = "You are an assistant designed to generate high-quality images based on user prompts. <Prompt Start> "
_PROMPT_START = "<Prompt Start>"

# What the published config says, and what it leaves to defaults, which are not those of the 4B model everywhere.
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # of the layers without a window, every sixth
}

# LLaVA's way, transformers' own since 4.52, both without a head, ComfyUI's, and that of the text model alone.
_PREFIX = re.compile(r"^(?:language_model\.model|model\.language_model|language_model|model)\.")
# What reads pictures and what writes text. `spiece_model` is the tokenizer in ComfyUI's files.
_NOT_READ = re.compile(r"(?:vision_tower|vision_model|multi_modal_projector|lm_head)\.|spiece_model$")


def make_gemma(config: Mapping[str, Any]) -> nn.Module:
    """Make a `Gemma3TextModel` of a config.json's sizes, multimodal or text alone. The vision tower is not built.

    An empty config, as single files have none, means Gemma-3-4B. Raises ValueError for the config of another model.
    """
    from transformers import Gemma3TextConfig, Gemma3TextModel

    text = config.get("text_config", config) or GEMMA_3_4B
    kind = text.get("model_type", "gemma3_text")
    if kind != "gemma3_text":
        raise ValueError(
            f"the text encoder's config.json is of a {kind} model, not of Gemma 3. Put {REPOSITORY} there."
        )
    return Gemma3TextModel(Gemma3TextConfig.from_dict(dict(text)))


def gemma_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where the weights lie by `Gemma3TextModel`'s names, without those of the vision tower and of the head.

    Any others stay, under names that the model lacks, for whoever checks.
    """
    found: dict[str, Stored] = {}
    for name, at in stored.items():
        plain = _PREFIX.sub("", name)
        if not _NOT_READ.match(plain):
            found[name if plain in found else plain] = at
    return found


def with_system_prompt(text: str) -> str:
    """Return what Gemma is to read for a prompt: itself if it is empty, or brings a system prompt of its own."""
    return SYSTEM_PROMPT + text if text and _PROMPT_START not in text else text


def gemma_features(
    module: nn.Module, tokenizer: Any, texts: Sequence[str], device: torch.device, max_length: int = 512
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last state but one [B, tokens, channels], and which tokens are text: 1, else 0, int64 [B, tokens].

    The tokenizer must pad on the right. The number of tokens is a multiple of 8.
    """
    tokens = tokenizer(
        list(texts),
        padding=True,
        pad_to_multiple_of=8,
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    mask = tokens["attention_mask"].to(device)
    # By their numbers: transformers then keeps no others, or takes the list for a yes. Some versions count the layers'
    # results, later ones what is before the first layer too. So two are asked for, of which one is the last but one.
    config: Any = module.config
    layers = config.num_hidden_layers
    output = module(
        input_ids=tokens["input_ids"].to(device), attention_mask=mask, use_cache=False,
        output_hidden_states=[layers - 2, layers - 1],
    )  # fmt: skip
    return output.hidden_states[-2], mask
