"""The VAEs that are known in single files: the autoencoder of latent diffusion, and Wan's, which Qwen-Image has too."""

from __future__ import annotations

from typing import Any

from .layouts import Config, Layout, Shapes


def _nothing(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {}


VAES = (
    Layout(
        "a KL autoencoder",
        ("AutoencoderKL",),
        ("decoder.up.0.block.0.conv1.weight", "encoder.down.0.block.0.conv1.weight"),
        ("decoder.up_blocks.0.resnets.0.conv1.weight", "decoder.mid_block.attentions.0.to_q.weight"),
        "convert_ldm_vae_checkpoint",
        _nothing,
        frozenset(),
    ),
    Layout(
        "Wan's VAE",
        ("AutoencoderKLWan", "AutoencoderKLQwenImage"),
        ("decoder.middle.0.residual.0.gamma", "encoder.conv1.weight"),
        ("decoder.mid_block.resnets.0.norm1.gamma", "quant_conv.weight"),
        "convert_wan_vae_to_diffusers",
        _nothing,
        frozenset(),
    ),
)
