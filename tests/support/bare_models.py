"""Transformers of the published sizes that no diffusers pipeline runs, as bare modules on `meta`.

module, arguments = BARE["newbie"]()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from ballast.bench.downloads.full_size import empty
from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed
from torch import nn


def _bare(cls: type, config: Mapping[str, Any]) -> Any:
    """Return a module in bfloat16, ready to run."""
    module = empty(cls, config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return module.eval().requires_grad_(False)


class _WholeText(Lumina2RotaryPosEmbed):
    """Takes every text token for a real one: the stock class reads the mask's values, and on `meta` there are none."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return super().forward(hidden_states, torch.ones(attention_mask.shape, dtype=torch.int64, device="cpu"))


def newbie() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """NewBie's transformer in bfloat16, and one guided step of a picture of 1024x1024 with 256 text tokens."""
    config = {"hidden_size": 2304, "num_layers": 36, "num_attention_heads": 24, "num_kv_heads": 8, "in_channels": 16}
    axes = {"axes_dim_rope": (32, 32, 32), "axes_lens": (1024, 512, 512)}
    module = _bare(diffusers.Lumina2Transformer2DModel, {**config, **axes, "cap_feat_dim": 2560})
    module.rope_embedder.__class__ = _WholeText
    with torch.device("meta"):
        return module, {
            "hidden_states": torch.empty(2, 16, 128, 128, dtype=torch.bfloat16),
            "timestep": torch.empty(2, dtype=torch.bfloat16),
            "encoder_hidden_states": torch.empty(2, 256, 2560, dtype=torch.bfloat16),
            "encoder_attention_mask": torch.empty(2, 256, dtype=torch.int64),
        }


def pyramid() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Pyramid-Flow's miniFlux in bfloat16, and one guided step of the twelfth latent frame of a video of 640x384.

    Two frames of full size, one of half and nine of a quarter make 2700 tokens. The reference's mask, which hides later
    frames and padding, is left out.
    """
    config = {"patch_size": 1, "in_channels": 64, "num_layers": 8, "num_single_layers": 16, "attention_head_dim": 64}
    text = {"num_attention_heads": 30, "joint_attention_dim": 4096, "pooled_projection_dim": 768}
    rest = {"guidance_embeds": False, "axes_dims_rope": (16, 24, 24)}
    module = _bare(diffusers.FluxTransformer2DModel, {**config, **text, **rest})
    tokens = sum((384 // 16 >> level) * (640 // 16 >> level) * frames for level, frames in enumerate((2, 1, 9)))
    with torch.device("meta"):
        return module, {
            "hidden_states": torch.empty(2, tokens, 64, dtype=torch.bfloat16),
            "encoder_hidden_states": torch.empty(2, 128, 4096, dtype=torch.bfloat16),
            "pooled_projections": torch.empty(2, 768, dtype=torch.bfloat16),
            "timestep": torch.empty(2, dtype=torch.bfloat16),
            "img_ids": torch.empty(tokens, 3),
            "txt_ids": torch.empty(128, 3),
        }


BARE: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {"newbie": newbie, "pyramid": pyramid}
