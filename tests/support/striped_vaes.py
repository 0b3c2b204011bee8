"""Tiny VAEs of many families, with the wiring of the published ones and small random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import diffusers
import places
import torch
from places import ROOT

DATA = places.DATA / "pyramid_flow"
SHAPES = ROOT / "demo" / "shapes" / "vae"


def image_vae(latent_channels: int, quant: bool, **more: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=latent_channels, norm_num_groups=4,
        layers_per_block=2, use_quant_conv=quant, use_post_quant_conv=quant, **more,
    )  # fmt: skip


def pyramid() -> Any:
    from ballast.pipelines.models.pyramid_flow.vae import CausalVideoVAE
    from safetensors.torch import load_file

    vae = CausalVideoVAE(**json.loads((DATA / "vae.config.json").read_text("utf-8")))
    vae.load_state_dict(load_file(DATA / "vae.safetensors"))
    return vae


def wan(**more: Any) -> Any:
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True], **more)


def deep_compression() -> Any:
    kinds = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_block_types"] = kinds
        sizes[f"{side}_block_out_channels"] = (8,) * 4
        sizes[f"{side}_layers_per_block"] = (1,) * 4
    multiscales = {"encoder_qkv_multiscales": ((), (), (), (5,)), "decoder_qkv_multiscales": ((), (), (), (5,))}
    return diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=4, **sizes, **multiscales)


FOUR = (8, 16, 16, 16)
VAES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    # what builds it, and the shape of latents of odd sizes, and batches for pictures
    "sd": (lambda: image_vae(4, True), (2, 4, 9, 7)),
    "sdxl": (lambda: image_vae(4, True, force_upcast=True, scaling_factor=0.13025), (1, 4, 5, 11)),
    "sd3": (lambda: image_vae(16, False, shift_factor=0.0609), (2, 16, 7, 6)),
    "flux": (lambda: image_vae(16, False, shift_factor=0.1159), (1, 16, 13, 9)),
    "demo": (lambda: diffusers.AutoencoderKL.from_pretrained(SHAPES), (3, 8, 7, 9)),
    "asymmetric": (
        lambda: diffusers.AsymmetricAutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            down_block_out_channels=FOUR[:3],
            up_block_types=("UpDecoderBlock2D",) * 3,
            up_block_out_channels=FOUR[:3],
            norm_num_groups=4,
        ),
        (1, 4, 29, 17),
    ),
    "vq": (
        lambda: diffusers.VQModel(
            block_out_channels=FOUR,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            num_vq_embeddings=16,
            norm_num_groups=4,
        ),
        (2, 4, 7, 9),
    ),
    "flux2": (
        lambda: diffusers.AutoencoderKLFlux2(
            block_out_channels=FOUR, layers_per_block=1, latent_channels=4, norm_num_groups=4
        ),
        (1, 4, 10, 6),
    ),
    "pyramid": (pyramid, (1, 16, 2, 5, 3)),
    "wan": (wan, (1, 4, 3, 5, 7)),
    "wan 2.2": (
        lambda: wan(is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16),
        (1, 4, 2, 5, 3),
    ),
    "qwen image": (
        lambda: diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        (2, 4, 1, 7, 5),
    ),
    "hunyuan video": (
        lambda: diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=FOUR, layers_per_block=1, norm_num_groups=4
        ),
        (1, 4, 3, 5, 3),
    ),
    "hunyuan video 1.5": (
        lambda: diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 16, 16), layers_per_block=1
        ),
        (1, 4, 2, 5, 3),
    ),
    "hunyuan image": (
        lambda: diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=8,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=64,
        ),
        (1, 8, 7, 5),
    ),  # fmt: skip
    "cogvideox": (
        lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=FOUR,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
            sample_height=32,
            sample_width=48,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
        ),
        (1, 4, 3, 5, 3),
    ),  # fmt: skip
    "ltx": (
        lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
        ),
        (1, 8, 2, 3, 2),
    ),  # fmt: skip
    "mochi": (
        lambda: diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
        ),
        (1, 12, 2, 5, 3),
    ),
    "sana": (deep_compression, (1, 4, 5, 3)),
    "tiny": (
        lambda: diffusers.AutoencoderTiny(encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4),
        (2, 4, 7, 5),
    ),
}


def build(name: str) -> tuple[Any, torch.Tensor]:
    """A VAE, and latents for it."""
    make, shape = VAES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vae = make().eval().requires_grad_(False)
        return vae, torch.randn(shape)


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Pixels, around -1..1."""
    return vae.decode(latents, return_dict=False)[0]


def encode(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents: the mean, where the VAE gives a distribution."""
    found = vae.encode(pixels)
    if hasattr(found, "latent_dist"):
        return found.latent_dist.mode()
    if hasattr(found, "mode"):
        return found.mode()
    return found.latent if hasattr(found, "latent") else found.latents
