"""VaeStages: decoding latents and encoding pictures, with the VAE in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..decoding.decode import Call, VaeRun, run_decoder, run_encoder, to_images
from ..decoding.policy import WayName
from ..options import plain_defaults
from ..planning.plans import SEEING
from ..planning.vae_forecasts import Method, VaeForecasts
from ..sampling.latents import check_finite, check_fit, check_latents
from .runner import StageRunner


class VaeStages(StageRunner):
    """The stages of a pipeline that its VAE runs. It leaves when one ends, unless the pipeline `keeps_vae`."""

    keeps_vae = False

    @plain_defaults()
    def decode(self, latents: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Pictures from latents, decoded in float32: [B,H,W,3], for a video [B,F,H,W,3], float32 in 0..1 on the CPU.

        `arguments` are further ones of the VAE's own `decode`.
        """
        self.check_latents(latents)
        self._decode_arguments(latents, arguments, "whole", 0)  # unknown ones are refused before anything is loaded
        pixels = self._vae_run("decode", arguments, self._vram_budget())(latents)
        check_finite(pixels, "the decoder made")
        return self._finish(to_images(pixels, video=self.is_video))

    def check_latents(self, latents: Any) -> None:
        """Raise TypeError or ValueError, in one line, for what this pipeline cannot decode."""
        check_latents(latents)
        takes = self.decoder_config.get("latent_channels") or self.decoder_config.get("z_dim")
        advice = "Sample and decode with the same pipeline."
        check_fit(latents, f"the VAE of {self.title}", takes, self.latent_dimensions, advice)
        check_finite(latents, "the latents hold")

    @plain_defaults()
    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        """Latents of pictures [B,H,W,3] in 0..1, to start a run from: [B,C,h,w], or [B,C,1,h,w] where there are frames.

        As `decode` takes them, float32 on the CPU. Not every family has a use for them.
        """
        if image.ndim != 4 or image.shape[3] != 3:
            raise ValueError(f"the picture is {list(image.shape)}; it takes [pictures, height, width, 3].")
        pixels = image.permute(0, 3, 1, 2) * 2 - 1
        if self.latent_dimensions == 5:
            pixels = pixels.unsqueeze(2)
        return self._vae_run("encode", {}, self._vram_budget())(pixels)

    def _vae_run(
        self,
        method: Method,
        given: Mapping[str, Any],
        room_bytes: int,
        *,
        planned: bool = False,
        encode: Call = run_encoder,
    ) -> VaeRun:
        """Return a run of the VAE's method with `given` arguments, in `room_bytes` on the device, weights included.

        On the CPU it has forecasts only where it is `planned`, which may be for another machine. `encode` calls the
        VAE's own.
        """
        forecasts = self._vae_forecasts(method, given, room_bytes, encode)
        return VaeRun(
            "decode" if method == "decode" else SEEING,
            self.manager,
            self.decoder,
            forecasts.call,
            {
                "alone": not self.keep,
                "keep": self.keeps_vae,
                "vram": self.vram_bytes,
                "ram": self.ram_bytes,
                "then": self._then,
            },
            room_bytes,
            forecasts if planned or not self.manager.accelerator.is_cpu else None,
            splits=not any(isinstance(value, torch.Tensor) for value in given.values()),
        )

    def _vae_forecasts(
        self, method: Method, given: Mapping[str, Any], room_bytes: int, encode: Call = run_encoder
    ) -> VaeForecasts:
        if method == "encode":
            way_of = {"by": getattr(encode, "__name__", type(encode).__name__)}
            return VaeForecasts(
                self._forecaster, method, self.decoder, encode, lambda *_: way_of, moves_out=self.decodes_to_host
            )

        def arguments(latents: torch.Tensor, way: WayName) -> Mapping[str, Any]:
            return self._decode_arguments(latents, given, way, room_bytes)

        def decode(module: nn.Module, latents: torch.Tensor, device: torch.device, way: WayName) -> torch.Tensor:
            return run_decoder(module, latents, device, arguments(latents, way))

        return VaeForecasts(
            self._forecaster, method, self.decoder, decode, arguments, self._decode_sample, self.decodes_to_host
        )
