"""The sizes of the models: what their configs say or, where a file comes without one, the shapes of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....memory.weights.stored import Stored

_HEAD_CHANNELS = 64  # of Jina's tower, where no shape tells
_PATCH = 2


PUBLISHED = {
    "hidden_size": 2304, "num_layers": 36, "num_attention_heads": 24, "num_kv_heads": 8, "in_channels": 16,
    "axes_dim_rope": (32, 32, 32), "axes_lens": (1024, 512, 512), "cap_feat_dim": 2560, "pooled_projection_dim": 1024,
}  # fmt: skip
# The official config's words for the same.
_OFFICIAL = {
    "dim": "hidden_size", "n_layers": "num_layers", "n_refiner_layers": "num_refiner_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_kv_heads", "axes_dims": "axes_dim_rope",
    "clip_text_dim": "pooled_projection_dim",
}  # fmt: skip
_SAME = ("patch_size", "in_channels", "multiple_of", "ffn_dim_multiplier", "norm_eps", "axes_lens", "cap_feat_dim")


def config_of(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the class from a `config.json`, official or diffusers'.

    Where it says nothing, the published.
    """
    known = PUBLISHED | {_OFFICIAL[key]: value for key, value in published.items() if key in _OFFICIAL}
    own = {key: value for key, value in published.items() if key in {*_SAME, *_OFFICIAL.values()}}
    return known | {key: value for key, value in own.items() if value is not None}


def transformer_sizes(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """For NewBie's transformer, in the official config's words."""
    hidden, features = _shape(stored, "x_embedder.weight")
    (head,) = _shape(stored, "layers.0.attention.q_norm.weight")
    rows, _ = _shape(stored, "layers.0.attention.qkv.weight")
    heads = hidden // head
    return {
        "dim": hidden,
        "in_channels": features // _PATCH**2,
        "n_layers": _count(stored, r"(?:^|\.)layers\.(\d+)\."),
        "n_heads": heads,
        "n_kv_heads": (rows // head - heads) // 2,
        "axes_dims": [head // 3] * 3,
        "multiple_of": _shape(stored, "layers.0.feed_forward.w1.weight")[0],  # four times as wide, rounded up to it
        "cap_feat_dim": _shape(stored, "cap_embedder.0.weight")[0],
        "clip_text_dim": _shape(stored, "clip_text_pooled_proj.0.weight")[0],
    }


def gemma_sizes(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """For Gemma 3's language model."""
    vocabulary, hidden = _shape(stored, "embed_tokens.weight")
    (head,) = _shape(stored, "layers.0.self_attn.q_norm.weight")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": _shape(stored, "layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": _count(stored, r"^(?!.*vision).*?layers\.(\d+)\."),
        "num_attention_heads": _shape(stored, "layers.0.self_attn.q_proj.weight")[0] // head,
        "num_key_value_heads": _shape(stored, "layers.0.self_attn.k_proj.weight")[0] // head,
        "head_dim": head,
    }


def jina_sizes(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """For Jina CLIP v2's text tower."""
    vocabulary, hidden = _shape(stored, "embeddings.word_embeddings.weight")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": _shape(stored, "layers.0.mlp.fc1.weight")[0],
        "num_hidden_layers": _count(stored, r"^(?!.*vision).*?layers\.(\d+)\."),
        "num_attention_heads": hidden // _HEAD_CHANNELS,
    }


def vae_sizes(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """For the VAE of FLUX.1, which is NewBie's, in its original file."""
    _shape(stored, "encoder.down.0.block.0.conv1.weight")  # the original names, or it is refused
    levels = _count(stored, r"^(?:.*\.)?encoder\.down\.(\d+)\.")
    return {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [_shape(stored, f"encoder.down.{i}.block.0.conv1.weight")[0] for i in range(levels)],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": _count(stored, r"encoder\.down\.0\.block\.(\d+)\."),
        "latent_channels": _shape(stored, "decoder.conv_in.weight")[1],
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def _shape(stored: Mapping[str, Stored], suffix: str) -> tuple[int, ...]:
    """Return the shape of the weight whose name ends so. ValueError, in one line, if the file has none."""
    for name, at in stored.items():
        if (name == suffix or name.endswith(f".{suffix}")) and "vision" not in name:
            return at.shape
    path = next((at.path for at in stored.values()), "the file")
    raise ValueError(f"{path} has no {suffix}: it is another model than its place says. Name the right file.")


def _count(stored: Mapping[str, Stored], pattern: str) -> int:
    found = (re.search(pattern, name) for name in stored)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
