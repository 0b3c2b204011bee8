"""NewBie's second text encoder: the text tower of Jina CLIP v2, by transformers' own class instead of remote code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from ....memory.weights.stored import Stored

MERGED = "jina_clip_v2_bf16.safetensors of Comfy-Org/NewBie-image-Exp0.1_repackaged"

# What may stand in a config; the defaults of transformers' class are the sizes that are published, 24 layers of 1024.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
    "rope_parameters",
)

# Of all of Jina CLIP, whose text model is wrapped for its adapter, or is not; of the embedding model; ComfyUI's.
_PREFIXES = ("text_model.transformer.roberta.", "text_model.transformer.", "roberta.", "model.")
# What reads pictures or compares. `spiece_model` is the tokenizer in ComfyUI's files.
_NOT_READ = ("vision_model.", "visual_projection.", "logit_scale", "spiece_model")
_RENAMED = {
    ".mixer.out_proj.": ".self_attn.o_proj.",
    ".norm1.": ".post_attention_layernorm.",
    ".norm2.": ".post_mlp_layernorm.",
}
_JOINED, _PARTS = ".mixer.Wqkv.", ("q", "k", "v")


def make_jina(config: Mapping[str, Any]) -> nn.Module:
    """Make a `JinaEmbeddingsV3Model` without a pooler from the config.json of all of Jina CLIP, or of its text tower.

    Sizes that it does not name, as the published one names none, are Jina CLIP v2's.
    """
    try:
        from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model
    except ImportError as error:
        raise ImportError(
            "NewBie's second text encoder needs transformers 5.4 or newer: pip install -U transformers."
        ) from error

    text = text_config(config)
    sizes = {name: text[name] for name in _SIZES if text.get(name) is not None}
    if text.get("rotary_emb_base"):  # as the remote code calls it
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": float(text["rotary_emb_base"])}
    return JinaEmbeddingsV3Model(JinaEmbeddingsV3Config(**sizes), add_pooling_layer=False)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the config.json says of the text tower, be it of all of Jina CLIP or the tower's own."""
    text = config.get("text_config", config) or {}
    return {**text, **(text.get("hf_model_config_kwargs") or {})}


def has_adapter(stored: Mapping[str, Stored]) -> bool:
    """Return whether the text tower of these files has adapters beside its weights, for `read_merged` to merge."""
    marks = (".parametrizations.", ".lora_")
    return any(mark in name for name in stored if not name.startswith(_NOT_READ) for mark in marks)


def jina_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where the weights lie by `JinaEmbeddingsV3Model`'s names, from files with its names or with the published ones.

    Those of the vision tower are left out. Any others stay, under names that the model lacks, for whoever checks.
    Raises ValueError for an adapter: the weights beside it alone would be wrong.
    """
    found: dict[str, Stored] = {}
    for name, at in stored.items():
        if name.startswith(_NOT_READ):
            continue
        if has_adapter({name: at}):
            raise ValueError(f"{at.path} holds {name}, of an adapter that cannot be merged. Use {MERGED}.")
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        for plain, part in _separated(_renamed(name.removeprefix(prefix)), at):
            found[name if plain in found else plain] = part
    return found


def _renamed(name: str) -> str:
    for ours, theirs in (("embeddings.LayerNorm.", "emb_ln."), ("layers.", "encoder.layers.")):
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def _separated(name: str, at: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the three projections that are stored as one tensor; others as they are."""
    if _JOINED not in name:
        yield name, at
        return
    rows, rest = at.shape[0] if at.shape else 0, at.shape[1:]
    if rows % 3:
        raise ValueError(f"{at.path} has {name} with {rows} rows, not three equal parts. Download it again.")
    for i, part in enumerate(_PARTS):
        offset = at.offset + i * prod((rows // 3, *rest)) * at.dtype.itemsize
        yield name.replace(_JOINED, f".self_attn.{part}_proj."), replace(at, offset=offset, shape=(rows // 3, *rest))


def jina_features(
    module: nn.Module, tokenizer: Any, texts: Sequence[str], device: torch.device, max_length: int = 2048
) -> torch.Tensor:
    """Return the mean of the last states of each text's own tokens [B, channels]."""
    tokens = tokenizer(list(texts), padding=True, max_length=max_length, truncation=True, return_tensors="pt")
    mask = tokens["attention_mask"].to(device)
    states = module(input_ids=tokens["input_ids"].to(device), attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).float()  # in bfloat16 not even the number of tokens is exact
    return ((states * weights).sum(1) / weights.sum(1)).to(states.dtype)
