"""Decode latents and encode pictures, with the VAE in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.decode import Call, VaeRun, run_encoder
from ..planning.plans import SEEING
from ..planning.vae_forecasts import Method, vae_forecasts
from ..runner import Runner

if TYPE_CHECKING:
    from ..models.model import Model


def pixels_of(model: Model, image: torch.Tensor) -> torch.Tensor:
    """Return pictures [B,H,W,3] in 0..1 as the VAE encodes them."""
    if image.ndim != 4 or image.shape[3] != 3:
        raise ValueError(f"the picture is {list(image.shape)}; it takes [pictures, height, width, 3].")
    pixels = image.permute(0, 3, 1, 2) * 2 - 1
    return pixels.unsqueeze(2) if model.latent_dimensions == 5 else pixels


def vae_run(
    model: Model,
    runner: Runner,
    method: Method,
    given: Mapping[str, Any],
    room_bytes: int,
    *,
    planned: bool = False,
    encode: Call = run_encoder,
) -> VaeRun:
    """Return a run of the VAE's method with `given` arguments, in `room_bytes` on the device, weights included.

    On the CPU it has forecasts only where it is `planned`, which may be for another machine. `encode` calls the VAE's
    own.
    """
    forecasts, settings = vae_forecasts(model, method, given, room_bytes, encode), runner.settings
    return VaeRun(
        "decode" if method == "decode" else SEEING,
        runner.manager,
        model.decoder,
        forecasts.call,
        {
            "alone": not settings.keep,
            "keep": settings.keeps_vae,
            "vram": settings.vram_bytes,
            "ram": settings.ram_bytes,
            "then": settings.then,
        },
        room_bytes,
        forecasts if planned or not runner.manager.accelerator.is_cpu else None,
        splits=not any(isinstance(value, torch.Tensor) for value in given.values()),
    )
