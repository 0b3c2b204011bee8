"""Stripes at published widths, on shapes: about the operations of the whole, from a fresh process too."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from ballast.bench.downloads import full_size
from ballast.memory import striped
from ballast.memory.planning.dry_run import dry_run
from selection import few

Call = Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]


def decoding(vae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda latents: vae.decode(latents, return_dict=False)[0]


def encoding(vae: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda pixels: vae.encode(pixels).latent_dist.mean


WAN_5B = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "is_residual": True,
    "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
}  # fmt: skip
PUBLISHED: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], Call]] = {
    "wan": (diffusers.AutoencoderKLWan, {}, (1, 16, 3, 60, 104), decoding),
    "wan 5b": (diffusers.AutoencoderKLWan, WAN_5B, (1, 48, 2, 44, 80), decoding),
    "qwen": (diffusers.AutoencoderKLQwenImage, {}, (1, 16, 1, 128, 128), decoding),
    "qwen encode": (diffusers.AutoencoderKLQwenImage, {}, (1, 3, 1, 1024, 1024), encoding),
    "mochi": (diffusers.AutoencoderKLMochi, {}, (1, 12, 2, 60, 106), decoding),
    "hunyuan video 1.5": (diffusers.AutoencoderKLHunyuanVideo15, {}, (1, 32, 3, 30, 52), decoding),
    "hunyuan video": (diffusers.AutoencoderKLHunyuanVideo, {}, (1, 16, 2, 60, 104), decoding),
    "ltx 2": (diffusers.AutoencoderKLLTX2Video, {}, (1, 128, 5, 16, 22), decoding),
    "kvae video": (diffusers.AutoencoderKLKVAEVideo, {}, (1, 16, 1, 60, 104), decoding),
}


@pytest.mark.parametrize("name", few(PUBLISHED, "wan", "qwen encode", "mochi"))
def test_skip_connections_are_not_made_again_in_each_block(name: str) -> None:
    """A norm read the sum before it, and left it to be made anew by the next sum, with all sums before it."""
    cls, config, shape, call = PUBLISHED[name]
    vae, other = full_size.empty(cls, config), full_size.empty(cls, config)
    forecast, _ = dry_run(
        {"vae": vae},
        lambda device: call(vae)(torch.empty(shape, device=device)).cpu(),
        method="encode" if call is encoding else "decode",
    )
    whole = forecast.units["vae"]
    found, _ = striped.forecast(other, call(other), torch.empty(shape), budget_bytes=int(0.75 * whole.peak_bytes))
    assert found.peak_bytes <= 0.75 * whole.peak_bytes
    assert found.operations <= 1.15 * whole.operations.total


def test_all_handlers_are_there_in_a_fresh_process() -> None:
    """Without attention's, it was made on whole maps, and a plan depended on what the process had imported."""
    names = {f"{striped.__name__}.{found.name}" for found in pkgutil.iter_modules(striped.__path__)}
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, {striped.__name__}; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert names <= set(told.split())
