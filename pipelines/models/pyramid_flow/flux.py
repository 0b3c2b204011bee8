"""Pyramid-Flow's miniFlux: FLUX.1's transformer over the frames of a video, coarser ones for what is past.

rain1011/pyramid-flow-miniflux calls it PyramidFluxTransformer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from ....memory.weights.stored import Stored
from .frames import FrameAttnProcessor, Frames, patches, positions, text_at_the_end, unpatched

_PUBLISHED = {
    "patch_size": 1, "in_channels": 64, "num_layers": 8, "num_single_layers": 16, "attention_head_dim": 64,
    "num_attention_heads": 30, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 24, 24),
}  # fmt: skip


class PyramidFluxTransformer3DModel(FluxTransformer2DModel):
    """`FluxTransformer2DModel` that takes clips, whose patches of 2 x 2 have `in_channels` channels."""

    @register_to_config
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        num_layers: int = 8,
        num_single_layers: int = 16,
        attention_head_dim: int = 64,
        num_attention_heads: int = 30,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        axes_dims_rope: tuple[int, int, int] = (16, 24, 24),
    ) -> None:
        super().__init__(
            patch_size, in_channels, None, num_layers, num_single_layers, attention_head_dim, num_attention_heads,
            joint_attention_dim, pooled_projection_dim, False, axes_dims_rope,
        )  # fmt: skip
        self.set_attn_processor(FrameAttnProcessor())  # type: ignore[arg-type]

    def forward(
        self,
        sample: Sequence[torch.Tensor],
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        pooled_projections: torch.Tensor,
        return_dict: bool = True,
    ) -> Any:
        """Return the velocity of the last clip, in its shape.

        `sample` are clips [B,C,t,h,w], oldest first, each at its own resolution, at last the noisy one at `timestep`
        [B] in 0..1000. The text is [B,L,`joint_attention_dim`] with a mask [B,L], and [B,`pooled_projection_dim`].
        """
        current = sample[-1]
        text, lengths = text_at_the_end(encoder_hidden_states, encoder_attention_mask)
        rotary = self.pos_embed(positions(sample, text.shape[1]))
        among = {"frames": Frames.of(sample, lengths)}
        # Rounded to the type of the latents, as in training.
        temb = self.time_text_embed(timestep.to(current.dtype), pooled_projections)
        text = self.context_embedder(text)
        hidden = self.x_embedder(torch.cat([patches(clip) for clip in sample], dim=1))
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            text, hidden = block(
                hidden_states=hidden,
                encoder_hidden_states=text,
                temb=temb,
                image_rotary_emb=rotary,
                joint_attention_kwargs=among,
            )
        last = hidden[:, -current[0, 0].numel() // 4 :]
        velocity = unpatched(self.proj_out(self.norm_out(last, temb)), current)
        return Transformer2DModelOutput(sample=velocity) if return_dict else (velocity,)


def flux_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the class from a published `config.json`; where it says nothing, the published sizes."""
    return _PUBLISHED | {key: value for key, value in published.items() if key in _PUBLISHED}


def flux_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where the weights lie, by the names of the class: the published are diffusers' own."""
    return dict(stored)
