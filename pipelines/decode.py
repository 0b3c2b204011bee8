"""The fp32 decode policy: whole, then tiled when memory runs out, then on the CPU. Never in half precision.

`torch.autocast(dtype=torch.float32)` does nothing, so the weights themselves are float32 (the VAE's unit is read so)
and so are the latents.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ..memory.forecast import Forecast
from ..memory.manager import MemoryManager
from ..memory.unit import ManagedModel
from .conditioning import to_host

log = logging.getLogger("ballast")

_TILE_PIXELS = 512
_NOT_FINITE = (
    "{what} NaN or infinite values, which would be a black picture. Run the models in bfloat16 or float32 instead of "
    "float16 (dtype='bf16'), and check that their files are whole."
)


def check_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise ValueError, with the remedy, if a tensor holds NaN or infinite values."""
    if not torch.isfinite(tensor).all():
        raise ValueError(_NOT_FINITE.format(what=what))


def decode_latents(
    manager: MemoryManager,
    vae: ManagedModel,
    latents: torch.Tensor,
    stage: dict[str, Any],
    arguments: dict[str, Any],
    forecast: Forecast | None = None,
) -> torch.Tensor:
    """Pixels in -1..1, float32 on the CPU, in the layout of the VAE ([B,3,H,W] or [B,3,F,H,W]).

    `latents` is what the VAE's `decode` takes ([B,C,h,w] or [B,C,f,h,w]); `arguments` are further ones of
    it. `stage` has the manager's own: `alone`, `vram`, `ram`. With a `forecast` of decoding whole, that is not tried
    where it does not fit.
    """
    check_finite(latents, "the latents hold")
    attempts = [("auto", False), ("auto", True), ("cpu", False)]
    for strategy, tiled in attempts:
        try:
            expected = None if tiled or strategy == "cpu" else forecast
            with manager.stage("decode", [vae], work=(tuple(latents.shape), tiled), forecast=expected, **stage):
                pixels = _decode_once(manager, vae, latents, strategy, tiled, alone=stage["alone"], arguments=arguments)
        except Exception as error:
            if strategy == "cpu" or not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
                raise
            release_frames(error)
            manager.free()
            log.warning("Ballast: decoding does not fit; trying %s", "the CPU" if tiled else "tiles")
        else:
            check_finite(pixels, "the decoder made")
            return pixels
    raise AssertionError("unreachable")


def _decode_once(
    manager: MemoryManager,
    vae: ManagedModel,
    latents: torch.Tensor,
    strategy: str,
    tiled: bool,
    *,
    alone: bool,
    arguments: dict[str, Any],
) -> torch.Tensor:
    with manager.use(vae, strategy, alone=alone) as module:
        return run_decoder(module, latents, manager.execution_device(strategy), tiled, arguments)


def run_decoder(
    module: torch.nn.Module, latents: torch.Tensor, device: torch.device, tiled: bool, arguments: dict[str, Any]
) -> torch.Tensor:
    """Pixels on the CPU, decoded by a VAE that is in place on a device."""
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    _set_tiling(module, tiled)
    try:
        decode: Callable[..., Any] = module.decode  # type: ignore[assignment]
        return decode(latents.to(device, torch.float32), **moved, return_dict=False)[0].float().cpu()
    finally:
        _set_tiling(module, False)


def encode_pixels(
    manager: MemoryManager, vae: ManagedModel, pixels: torch.Tensor, stage: dict[str, Any]
) -> torch.Tensor:
    """Latents of pictures in -1..1 ([B,3,H,W] or [B,3,1,H,W]), float32 on the CPU, as the VAE's `decode` takes them.

    The mean of what the VAE says, so that the same picture gives the same latents; on the CPU where it does not fit.
    """
    for strategy in ("auto", "cpu"):
        try:
            with (
                manager.stage("encode picture", [vae], work=("encode", tuple(pixels.shape)), **stage),
                manager.use(vae, strategy, alone=stage["alone"]) as module,
            ):
                encode: Callable[..., Any] = module.encode  # type: ignore[assignment]
                found = encode(pixels.to(manager.execution_device(strategy), torch.float32))
                return to_host(getattr(found, "latent_dist", found).mode())
        except Exception as error:
            if strategy == "cpu" or not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
                raise
            release_frames(error)
            manager.free()
            log.warning("Ballast: encoding the picture does not fit; trying the CPU")
    raise AssertionError("unreachable")


def _set_tiling(module: torch.nn.Module, tiled: bool) -> None:
    """Switch a diffusers VAE's own tiling, where it has one, with tiles of at most 512 pixels."""
    if not tiled:
        if callable(disable := getattr(module, "disable_tiling", None)):
            disable()
        return
    if not callable(enable := getattr(module, "enable_tiling", None)):
        return
    enable()
    if "tile_sample_min_height" in inspect.signature(enable).parameters:
        return  # the video VAEs' own tiles are 256 pixels or so
    sample = getattr(module, "tile_sample_min_size", 0)
    latent = getattr(module, "tile_latent_min_size", 0)
    if sample > _TILE_PIXELS and latent:
        module.tile_sample_min_size = _TILE_PIXELS  # type: ignore[assignment]
        module.tile_latent_min_size = latent * _TILE_PIXELS // sample  # type: ignore[assignment]


def first_tile(module: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """The latents of one tile; all of them where the VAE knows no tiles."""
    _set_tiling(module, True)
    facts = vars(module)
    ratio = getattr(module, "spatial_compression_ratio", 8)
    height = facts.get("tile_sample_min_height", 0) // ratio or facts.get("tile_latent_min_size") or latents.shape[-2]
    width = facts.get("tile_sample_min_width", 0) // ratio or facts.get("tile_latent_min_size") or latents.shape[-1]
    return latents[..., :height, :width]


def to_images(pixels: torch.Tensor, *, video: bool) -> torch.Tensor:
    """[B,3,H,W] or [B,3,F,H,W] in -1..1 -> [B,H,W,3], or [B,F,H,W,3] for a video, in 0..1."""
    images = (pixels / 2 + 0.5).clamp(0, 1)
    if images.ndim == 5:
        return images.permute(0, 2, 3, 4, 1).contiguous() if video else images[:, :, 0].permute(0, 2, 3, 1).contiguous()
    return images.permute(0, 2, 3, 1).contiguous()
