"""Whether a VAE can run in parts: in stripes, or in tiles of its own, with their switch and size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..files.building import only_tiled
from ..files.neighborhood import NeighborhoodInBlocks

_TILE_PIXELS = 512
# Height, width and frames of a tile of LTX-2.5's decoder, then the steps from one to the next: its own take 21 GB.
_SMALL_TILES = (384, 384, 40, 320, 320, 24)


def can_tile(module: torch.nn.Module) -> bool:
    """Return whether a VAE has tiling. All of diffusers have the switch, also those without anything to switch."""
    enable = getattr(module, "enable_tiling", None)
    if getattr(enable, "__qualname__", "") == "AutoencoderMixin.enable_tiling":
        return hasattr(module, "use_tiling")
    return callable(enable)


def can_stripe(module: torch.nn.Module) -> bool:
    """Return whether a VAE may run in stripes. Neighborhoods attend in thousands of blocks, and each would wait."""
    return not any(isinstance(getattr(each, "processor", None), NeighborhoodInBlocks) for each in module.modules())


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
        if switches.tile_sample_min_height > _TILE_PIXELS:  # most video VAEs' own tiles are 256 pixels or so
            switches.enable_tiling(*_SMALL_TILES)
        return
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
