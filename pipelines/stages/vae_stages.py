"""Decode latents and encode pictures, with the VAE in float32, and decode sound, with its units as they are stored."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...memory.host.flags import host_flags
from ..decoding.decode import Call, VaeRun, run_encoder
from ..encoding.conditioning import to_host
from ..planning.plans import SEEING
from ..planning.vae_forecasts import Method, vae_forecasts
from ..runner import Runner, Stage
from ..sampling.latents import GENERATOR, noise_of
from ..stock.sound import DECODING_SOUND, Sound, SoundDecoder

if TYPE_CHECKING:
    from ..models.model import Model, Modules

log = logging.getLogger("ballast")


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
        model.decoder if method == "decode" else model.picture_encoder,
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


def decode_pictures(model: Model, runner: Runner, latents: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Return the pixels of latents, float32 on the CPU. A decoder that draws goes on with the noise noted on them."""
    room = runner.vram_budget()
    if not model.decoder_draws or GENERATOR in given:
        return vae_run(model, runner, "decode", given, room)(latents)
    if not (states := noise_of(latents)):
        log.warning(
            "Ballast: %s draws noise to decode, and these latents no longer say which: that of seed 0 is used. Decode "
            "latents as sample returned them, or loaded from a file that Ballast wrote.",
            model.title,
        )
        states = (torch.Generator().manual_seed(0).get_state(),) * len(latents)
    parts = latents.split(1) if len(states) == len(latents) else [latents]
    made = [
        vae_run(model, runner, "decode", {**given, GENERATOR: state}, room)(part)
        for part, state in zip(parts, states, strict=True)
    ]
    return made[0] if len(made) == 1 else torch.cat(made)


def decode_sound(model: Model, runner: Runner, sound: SoundDecoder, latents: Sequence[torch.Tensor]) -> Sound:
    """Return the sound of latents, those of each picture or video. One after the other, as each would be alone."""
    forecast = functools.partial(sound.forecast, model.forecaster, latents[0])
    strategy = host_flags().strategy("auto", "other")
    expected = runner.expected(DECODING_SOUND, sound.units, forecast, strategy)

    def run(device: torch.device, modules: Modules) -> torch.Tensor:
        return torch.cat([to_host(sound.run(device, modules, each).float()) for each in latents])

    keep, work = runner.settings.keeps_vae, (DECODING_SOUND, tuple(latents[0].shape))
    with sound.calling({unit.name: unit.module for unit in sound.units}):
        stage = Stage(DECODING_SOUND, sound.units, run, strategy, work, **expected, keep=keep)
        waveform = runner.run(stage)
    with torch.inference_mode(False):
        return Sound(waveform.clone(), sound.sample_rate)
