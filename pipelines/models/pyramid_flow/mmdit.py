"""Pyramid-Flow's MMDiT: Stable Diffusion 3's transformer over the frames of a video, coarser ones for what is past.

rain1011/pyramid-flow-sd3 calls it PyramidDiffusionMMDiT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import nn
from torch.nn import functional as F

from ....memory.weights.stored import Stored
from .frames import FrameAttnProcessor, Frames, positions, text_at_the_end, unpatched

_PUBLISHED = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
_TABLE = "pos_embed.pos_embed"


class PyramidSD3Transformer3DModel(SD3Transformer2DModel):
    """`SD3Transformer2DModel` that takes clips: places in a frame are added to its tokens, times turn the heads."""

    @register_to_config
    def __init__(
        self,
        sample_size: int = 128,
        patch_size: int = 2,
        in_channels: int = 16,
        num_layers: int = 24,
        attention_head_dim: int = 64,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        caption_projection_dim: int = 1536,
        pooled_projection_dim: int = 2048,
        pos_embed_max_size: int = 192,
        qk_norm: str = "rms_norm",
    ) -> None:
        # Its table of places would be large, and is not used.
        super().__init__(
            sample_size, patch_size, in_channels, num_layers, attention_head_dim, num_attention_heads,
            joint_attention_dim, caption_projection_dim, pooled_projection_dim, in_channels, 1, (), qk_norm,
        )  # fmt: skip
        self.register_to_config(pos_embed_max_size=pos_embed_max_size)
        scale = pos_embed_max_size * patch_size / sample_size
        embed: Any = _ClipEmbed(patch_size, in_channels, self.inner_dim, pos_embed_max_size, scale)
        self.pos_embed = embed
        self.time_embed = FluxPosEmbed(10000, [attention_head_dim])
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
        among = {
            "frames": Frames.of(sample, lengths),
            "image_rotary_emb": self.time_embed(positions(sample, text.shape[1])[:, :1]),
        }
        # Rounded to the type of the latents, as in training.
        temb = self.time_text_embed(timestep.to(current.dtype), pooled_projections)
        text = self.context_embedder(text)
        hidden = torch.cat([self.pos_embed(clip, current.shape[-2:]) for clip in sample], dim=1)
        for block in self.transformer_blocks:
            text, hidden = block(
                hidden_states=hidden, encoder_hidden_states=text, temb=temb, joint_attention_kwargs=among
            )
        last = hidden[:, -current[0, 0].numel() // 4 :]
        velocity = unpatched(self.proj_out(self.norm_out(last, temb)), current)
        return Transformer2DModelOutput(sample=velocity) if return_dict else (velocity,)


class _ClipEmbed(nn.Module):
    """Patches of frames, and their places among those of the noisy clip."""

    table: torch.Tensor

    def __init__(self, patch_size: int, in_channels: int, channels: int, most: int, scale: float) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, channels, patch_size, patch_size)
        # Rows and columns have the same one, and its sum over both is what the published table of all places holds.
        table = get_1d_sincos_pos_embed_from_grid(channels // 2, torch.arange(most, dtype=torch.float32) / scale)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, clip: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Tokens [B,tokens,channels] of a clip [B,C,t,h,w], with the places of a finer one whose frames are of `size`.

        ValueError if that is larger than the model knows places for.
        """
        tokens = self.proj(clip.transpose(1, 2).flatten(0, 1))
        rows, columns = (
            self._places(count, pixels // self.proj.stride[0])
            for count, pixels in zip(tokens.shape[-2:], size, strict=True)
        )
        shape = (len(rows), len(columns), -1)
        places = torch.cat([columns[None].expand(shape), rows[:, None].expand(shape)], dim=-1).flatten(0, 1)
        tokens = (tokens.flatten(2).transpose(1, 2) + places).to(tokens.dtype)
        return tokens.unflatten(0, (len(clip), -1)).flatten(1, 2)

    def _places(self, count: int, size: int) -> torch.Tensor:
        """Return the middle `size` places of the table, at `count` points [count,channels/2]."""
        most = len(self.table)
        if size > most:
            raise ValueError(
                f"a frame of {size} patches on a side is larger than the model's {most}. Use a smaller one."
            )
        middle = self.table.narrow(0, (most - size) // 2, size)
        if count == size:
            return middle
        return F.interpolate(middle.T[None], count, mode="linear")[0].T


def mmdit_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the class from a published `config.json`; where it says nothing, the published sizes."""
    return _PUBLISHED | {key: value for key, value in published.items() if key in _PUBLISHED}


def mmdit_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where the weights lie, by the names of the class. The table of places is left out: it follows from the sizes."""
    return {name.replace(".norm_add_", ".norm_added_"): at for name, at in stored.items() if name != _TABLE}
