"""The VAEs that are known in single files. Wan's is Qwen-Image's too; HunyuanVideo's has diffusers' names.

Some files have names in common, and the class of the base says which model it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .layouts import Config, Layout, Shapes

_STAGE = re.compile(r"^(encoder\.down|decoder\.up)\.(\d+)\.(?:block\.(\d+)|(?:down|up)sample)\.")
_MIDDLE = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
)


def of_class(name: str) -> list[Layout]:
    """Return the layouts, those of the class `name` first."""
    return sorted(VAES, key=lambda layout: name not in layout.classes)


def _in_one_row(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Give the blocks of all stages numbers in one row, each stage's resampling after its own."""
    found = {name: match for name in weights if (match := _STAGE.match(name))}
    blocks = {
        start: 1 + max((int(m[3]) for m in found.values() if m[1] == start and m[3]), default=0) for start in _ROWS
    }
    made = {}
    for name, value in weights.items():
        if match := found.get(name):
            start, stage, block = match[1], int(match[2]), match[3]
            at = stage * (blocks[start] + 1) + (blocks[start] if block is None else int(block))
            name = f"{_ROWS[start]}.{at}.{name[match.end() :]}"
        made[name] = value
    return made


_ROWS = {"encoder.down": "encoder.down_blocks", "decoder.up": "decoder.up_blocks"}


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
        "HunyuanImage's VAE",
        ("AutoencoderKLHunyuanImage",),
        ("decoder.up.0.upsample.conv.weight", "encoder.down.0.downsample.conv.weight", "decoder.mid.attn_1.q.weight"),
        ("decoder.up_blocks.0.conv1.weight", "encoder.down_blocks.0.conv1.weight"),
        _in_one_row,
        _nothing,
        frozenset(),
        renamed=(
            *_MIDDLE,
            (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.proj."),
            (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
            (r"\.nin_shortcut\.", ".conv_shortcut."),
        ),
    ),
    Layout(
        "HunyuanVideo 1.5's VAE",
        ("AutoencoderKLHunyuanVideo15",),
        ("decoder.up.0.block.0.conv1.conv.weight", "encoder.mid.attn_1.norm.gamma"),
        ("decoder.up_blocks.0.resnets.0.conv1.conv.weight", "encoder.mid_block.attentions.0.norm.gamma"),
        None,
        _nothing,
        frozenset(),
        renamed=(
            *_MIDDLE,
            (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
            (r"\.(down|up)\.(\d+)\.block\.", r".\1_blocks.\2.resnets."),
            (r"\.(down|up)\.(\d+)\.(down|up)sample\.", r".\1_blocks.\2.\3samplers.0."),
        ),
    ),
    Layout(
        "LTX-2's VAE",
        ("AutoencoderKLLTX2Video",),
        ("per_channel_statistics.mean-of-means", "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"),
        ("latents_mean", "decoder.mid_block.resnets.0.conv1.conv.weight", "encoder.conv_out.conv.weight"),
        "convert_ltx2_vae_to_diffusers",
        _nothing,
        frozenset(),
        unread=(
            "per_channel_statistics.channel",
            "per_channel_statistics.mean-of-stds",
            "per_channel_statistics.mean-of-stds_over_std-of-means",
        ),
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
