"""The VAEs that are known in single files. Wan's is Qwen-Image's too; HunyuanVideo's has diffusers' names."""

from __future__ import annotations

from typing import Any

from .layouts import Config, Layout, Shapes


def _nothing(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {}


VAES = (
    Layout(
        "FLUX.2's VAE",
        ("AutoencoderKLFlux2",),
        ("decoder.up.0.block.0.conv1.weight", "bn.running_mean"),
        ("decoder.up_blocks.0.resnets.0.conv1.weight", "bn.running_mean"),
        "convert_ldm_vae_checkpoint",
        _nothing,
        frozenset(),
        aside=(
            ("bn.", "bn."),
            ("encoder.quant_conv.", "quant_conv."),
            ("decoder.post_quant_conv.", "post_quant_conv."),
        ),
    ),
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
    Layout(
        "LTX-Video's VAE",
        ("AutoencoderKLLTXVideo",),
        ("per_channel_statistics.mean-of-means", "decoder.conv_in.conv.weight"),
        ("latents_mean", "decoder.mid_block.resnets.0.conv1.conv.weight", "encoder.conv_out.conv.weight"),
        "convert_ltx_vae_checkpoint_to_diffusers",
        _nothing,
        frozenset(),
        unread=(
            "per_channel_statistics.channel",
            "per_channel_statistics.mean-of-stds",
            "per_channel_statistics.mean-of-stds_over_std-of-means",
        ),
        prefix="vae.",
    ),
    Layout(
        "HunyuanVideo's VAE",
        ("AutoencoderKLHunyuanVideo",),
        ("decoder.mid_block.resnets.0.conv1.conv.weight", "quant_conv.weight", "encoder.conv_in.conv.weight"),
        (),
        None,
        _nothing,
        frozenset(),
    ),
    Layout(
        "Sana's VAE",
        ("AutoencoderDC",),
        ("encoder.project_in.conv.weight", "decoder.project_in.conv.weight"),
        ("encoder.down_blocks.0.0.conv1.weight", "decoder.norm_out.weight"),
        "convert_autoencoder_dc_checkpoint_to_diffusers",
        _nothing,
        frozenset(),
    ),
)
