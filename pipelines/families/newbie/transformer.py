"""NewBie's transformer: Lumina 2's, which a pooled text feature joins with the time.

NewBieAI-Lab/NewBie-image-Exp0.1 calls it NextDiT_3B_GQA_patch2_Adaln_Refiner_WHIT_CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_lumina2 import (
    Lumina2CombinedTimestepCaptionEmbedding,
    Lumina2RotaryPosEmbed,
    Lumina2Transformer2DModel,
)
from torch import nn

from ....memory.weights.stored import Stored
from ...files.checkpoint import converted

_TIME_CHANNELS = 1024  # at most


class NewbieTransformer2DModel(Lumina2Transformer2DModel):
    """`Lumina2Transformer2DModel` with a pooled text feature of `pooled_projection_dim` channels."""

    @register_to_config
    def __init__(
        self,
        sample_size: int = 128,
        patch_size: int = 2,
        in_channels: int = 16,
        out_channels: int | None = None,
        hidden_size: int = 2304,
        num_layers: int = 36,
        num_refiner_layers: int = 2,
        num_attention_heads: int = 24,
        num_kv_heads: int = 8,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        scaling_factor: float = 1.0,
        axes_dim_rope: tuple[int, int, int] = (32, 32, 32),
        axes_lens: tuple[int, int, int] = (1024, 512, 512),
        cap_feat_dim: int = 2560,
        pooled_projection_dim: int = 1024,
    ) -> None:
        super().__init__(
            sample_size, patch_size, in_channels, out_channels, hidden_size, num_layers, num_refiner_layers,
            num_attention_heads, num_kv_heads, multiple_of, ffn_dim_multiplier, norm_eps, scaling_factor,
            axes_dim_rope, axes_lens, cap_feat_dim,
        )  # fmt: skip
        self.rope_embedder = _ResidentRotary(10000, list(axes_dim_rope), list(axes_lens), patch_size)
        self.time_caption_embed = _TimeTextEmbedding(hidden_size, cap_feat_dim, pooled_projection_dim, norm_eps)
        for part in self.modules():
            if isinstance(part, Attention):
                part.set_processor(NewbieAttnProcessor())  # type: ignore[arg-type]

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        pooled_projections: torch.Tensor,
        return_dict: bool = True,
    ) -> Any:
        """Predict the velocity from noise to picture, in the shape of the latents [B,C,h,w], at `timestep` [B].

        A timestep of 0 is noise, 1 the picture. The text is [B,tokens,`cap_feat_dim`] with a mask [B,tokens], and
        [B,`pooled_projection_dim`].
        """
        # Its only use there is the embedding of time and text, which is ours.
        text: Any = (encoder_hidden_states, pooled_projections)
        return super().forward(hidden_states, timestep, text, encoder_attention_mask, return_dict=return_dict)


class _TimeTextEmbedding(Lumina2CombinedTimestepCaptionEmbedding):
    def __init__(self, hidden_size: int, cap_feat_dim: int, pooled_dim: int, norm_eps: float) -> None:
        super().__init__(hidden_size, cap_feat_dim, norm_eps=norm_eps)
        width = min(hidden_size, _TIME_CHANNELS)
        self.clip_text_pooled_proj = nn.Sequential(RMSNorm(pooled_dim, eps=1e-6), nn.Linear(pooled_dim, pooled_dim))
        self.time_text_embed = nn.Sequential(nn.SiLU(), nn.Linear(width + pooled_dim, width))

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text, pooled = encoder_hidden_states
        time, caption = super().forward(hidden_states, timestep, text)
        return self.time_text_embed(torch.cat([time, self.clip_text_pooled_proj(pooled)], dim=-1)), caption


class NewbieAttnProcessor:
    """Lumina 2's attention, by whichever of diffusers' attention backends is asked for: its own knows one.

    Where a mask is needed, as between prompts of different lengths, it is PyTorch's: most others take none.
    """

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        """[B,tokens,channels] of the same; the mask is [B,tokens], the rotation [B,tokens,channels of a head / 2]."""
        query, key = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states)
        value = attn.to_v(encoder_hidden_states)
        dtype, head = query.dtype, query.shape[-1] // attn.heads
        query, key, value = (x.unflatten(-1, (-1, head)) for x in (query, key, value))
        query, key = attn.norm_q(query), attn.norm_k(key)
        turned: list[Any] = [apply_rotary_emb(x, image_rotary_emb, use_real=False) for x in (query, key)]
        query, key = (x.to(dtype) for x in turned)
        # Each of the fewer keys serves several queries.
        key, value = (x.repeat_interleave(attn.heads // x.shape[2], dim=2) for x in (key, value))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        backend = self._attention_backend if mask is None else AttentionBackendName.NATIVE
        result = dispatch_attention_fn(query, key, value, attn_mask=mask, scale=attn.scale, backend=backend)
        return attn.to_out[0](result.flatten(2).type_as(query))


class _ResidentRotary(Lumina2RotaryPosEmbed):
    """With its tables as buffers: they are copied to the device once, not in every call, behind streamed blocks."""

    def __init__(self, theta: int, axes_dim: list[int], axes_lens: list[int], patch_size: int) -> None:
        super().__init__(theta, axes_dim, axes_lens, patch_size)
        for axis, table in enumerate(vars(self).pop("freqs_cis")):
            self.register_buffer(f"table_{axis}", table, persistent=False)

    @property
    def freqs_cis(self) -> list[torch.Tensor]:
        return list(self.buffers())

    @freqs_cis.setter
    def freqs_cis(self, tables: list[torch.Tensor]) -> None:
        vars(self)["freqs_cis"] = tables


def transformer_names(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Where the weights lie, by the names of the class, from a file with official names, ComfyUI's, or diffusers'."""
    plain = {name.removeprefix("model.diffusion_model."): at for name, at in stored.items()}
    if any(".attention.qkv." in name for name in plain):
        plain = converted(_split_heads(plain, config), convert_lumina2_to_diffusers)
    return {_in_embedding(name): at for name, at in plain.items()}


def _in_embedding(name: str) -> str:
    for part in ("clip_text_pooled_proj.", "time_text_embed."):
        if part in name:
            return f"time_caption_embed.{name[name.index(part) :]}"
    return name


def _split_heads(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Return queries, keys and values apart: the converter does that for the published sizes only.

    Names that only resemble those of such layers are split too, so that the converter meets none.
    """
    width = config["hidden_size"] // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * width, config["num_kv_heads"] * width
    found = {}
    for name, at in stored.items():
        if "qkv" not in name:
            found[name] = at
            continue
        rows = 0
        for part, count in (("to_q", queries), ("to_k", keys), ("to_v", keys)):
            skipped = rows * at.shape[1] * at.dtype.itemsize
            piece = replace(at, offset=at.offset + skipped, shape=(count, *at.shape[1:]))
            found[name.replace("qkv", part)] = piece
            rows += count
    return found
