"""Modular pipelines of the published sizes without weights: configs are the defaults of their classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from ballast.bench.downloads import full_size
from pictured import pipelines as pictured
from torch import nn

from . import modular_folders, newest

_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
_QWEN3_VL = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _ROPE}


def _qwen3_vl(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    text = {**_QWEN3_VL, **sizes, "num_attention_heads": heads}
    return {"text_config": text, "vision_config": {"out_hidden_size": hidden}, "tie_word_embeddings": False}


_QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_GEMMA3_12B = {
    "text_config": {
        "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    },
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 896, "patch_size": 14,
    },
    "mm_tokens_per_image": 256,
    **newest.GEMMA_IDS,
}  # fmt: skip
_UMT5_XXL = {
    "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_CLIP_H = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
_ANIMA = {"num_attention_heads": 16, "extra_pos_embed_type": None, "rope_scale": (1.0, 4.0, 4.0)}


@dataclass(frozen=True)
class Published:
    """A pipeline, its tiny parts, and the configs of published ones that are not their classes' defaults."""

    class_name: str
    tiny: Callable[[], dict[str, Any]]
    run: dict[str, Any]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


MODELS = {
    "FLUX.3": Published(
        "Flux3ModularPipeline",
        newest.flux3,
        {"width": 1024, "height": 1024},
        {"text_encoder": _qwen3_vl(2560, 9728, 36, 32)},
    ),
    "Anima": Published(
        "AnimaModularPipeline",
        newest.anima,
        {"width": 1024, "height": 1024},
        {"text_encoder": _QWEN3_06B, "transformer": _ANIMA},
    ),
    "MiniMax-H3": Published(
        "MiniMaxH3ModularPipeline",
        newest.minimax_h3,
        {"width": 1280, "height": 768, "frames": 124},
        {
            "text_encoder": _qwen3_vl(5120, 25600, 64, 64),
            "audio_vae": {"latents_mean": [0.0] * 32, "latents_std": [1.0] * 32},
        },
    ),
    "Wan-Animate 2": Published(
        "WanAnimate2ModularPipeline",
        newest.wan_animate2,
        {
            "width": 640,
            "height": 800,
            "frames": 81,
            "image": torch.rand(1, 80, 64, 3),
            "video": torch.rand(81, 80, 64, 3),
        },
        {"text_encoder": _UMT5_XXL, "image_encoder": _CLIP_H},
    ),
    "LTX-2.5": Published(
        "LTX25ModularPipeline",
        newest.ltx25,
        {"width": 768, "height": 512, "frames": 121},
        {
            "text_encoder": _GEMMA3_12B,
            "vae": {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        },
    ),
}


def build(name: str, folder: Path) -> Path:
    """Write a folder with the tools of the tiny model and sparse files of the published weights, in bfloat16."""
    model, named = MODELS[name], {}
    with pictured.without_videos():
        for part, tiny in newest.seeded(model.tiny).items():
            if isinstance(tiny, nn.Module):
                full_size.save(full_size.empty(type(tiny), model.configs.get(part, {})), folder / part, torch.bfloat16)
            else:
                tiny.save_pretrained(folder / part)
            named[part] = modular_folders.library_and_class(tiny)
    blocks = getattr(diffusers, model.class_name).default_blocks_name
    return modular_folders.with_index(folder, named, model.class_name, blocks)
