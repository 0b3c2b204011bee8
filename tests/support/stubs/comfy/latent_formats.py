"""Latent formats: shapes and scales, without preview factors."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LatentFormat:
    scale_factor = 1.0
    shift_factor = 0.0
    latent_channels = 4
    latent_dimensions = 2
    latent_rgb_factors: list[list[float]] | None = None
    latent_rgb_factors_bias: list[float] | None = None
    latent_rgb_factors_reshape: Callable | None = None
    taesd_decoder_name: str | None = None
    spacial_downscale_ratio = 8
    temporal_downscale_ratio = 1

    def process_in(self, latent: torch.Tensor) -> torch.Tensor:
        return (latent - self.shift_factor) * self.scale_factor

    def process_out(self, latent: torch.Tensor) -> torch.Tensor:
        return latent / self.scale_factor + self.shift_factor


class SD15(LatentFormat):
    scale_factor = 0.18215


class SDXL(LatentFormat):
    scale_factor = 0.13025


class SD3(LatentFormat):
    scale_factor = 1.5305
    shift_factor = 0.0609
    latent_channels = 16


class Flux(SD3):
    scale_factor = 0.3611
    shift_factor = 0.1159


class Flux2(LatentFormat):
    latent_channels = 128
    spacial_downscale_ratio = 16


class LTXV(LatentFormat):
    latent_channels = 128
    latent_dimensions = 3
    spacial_downscale_ratio = 32
    temporal_downscale_ratio = 8


class Wan21(LatentFormat):
    latent_channels = 16
    latent_dimensions = 3
    temporal_downscale_ratio = 4


class Wan22(Wan21):
    latent_channels = 48
    spacial_downscale_ratio = 16
