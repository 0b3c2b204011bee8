"""A VAE's own tiling: whether it has one, its switch, and the size of a tile."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..files.building import only_tiled

_TILE_PIXELS = 512


def can_tile(module: torch.nn.Module) -> bool:
    """Return whether a VAE has tiling. All of diffusers have the switch, also those without anything to switch."""
    enable = getattr(module, "enable_tiling", None)
    if getattr(enable, "__qualname__", "") == "AutoencoderMixin.enable_tiling":
        return hasattr(module, "use_tiling")
    return callable(enable)


def set_tiling(module: torch.nn.Module, tiled: bool) -> None:
    """Switch a diffusers VAE's own tiling, where it has one, with tiles of at most 512 pixels."""
    if not can_tile(module):
        return
    switches: Any = module
    if not tiled:
        if not only_tiled(module):
            switches.disable_tiling()
        return
    switches.enable_tiling()
    if "tile_sample_min_height" in inspect.signature(switches.enable_tiling).parameters:
        return  # the video VAEs' own tiles are 256 pixels or so
    sample = getattr(module, "tile_sample_min_size", 0)
    latent = getattr(module, "tile_latent_min_size", 0)
    if sample > _TILE_PIXELS and latent:
        module.tile_sample_min_size = _TILE_PIXELS  # type: ignore[assignment]
        module.tile_latent_min_size = latent * _TILE_PIXELS // sample  # type: ignore[assignment]


def first_tile(module: torch.nn.Module, tensor: torch.Tensor, pixels: bool = False) -> torch.Tensor:
    """Cut the latents of one tile, or its pixels; return all of them where the VAE has no tiling."""
    set_tiling(module, True)
    ratio = getattr(module, "spatial_compression_ratio", 8)
    sides = []
    for at, name in ((-2, "tile_sample_min_height"), (-1, "tile_sample_min_width")):
        side = _tile_pixels(vars(module), name, ratio)
        sides.append((side if pixels else side // ratio) or tensor.shape[at])
    return tensor[..., : sides[0], : sides[1]]


def _tile_pixels(facts: Mapping[str, Any], name: str, ratio: int) -> int:
    """Read the side of a VAE's tiles, which each class names differently; 0 where it has none."""
    if facts.get("tile_latent_min_size"):  # pictures, whose tiles are square
        return facts["tile_latent_min_size"] * ratio
    return facts.get(name, 0)
