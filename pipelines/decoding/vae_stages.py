"""The stages of a pipeline that its VAE runs: latents to pictures, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...memory.manager import MemoryManager
from ...memory.planning.dry_run import StandIns
from ...memory.units.unit import ManagedModel
from ..planning.vae_forecasts import VaeTakes
from ..sampling.latents import check_finite, check_fit, check_latents
from .decode import Call, VaeRun, run_decoder, run_encoder, to_images
from .policy import WayName

Method = Literal["decode", "encode"]  # of the VAE


class VaeStages(ABC):
    """What a pipeline does with its decoder, always in float32."""

    name: str
    title: str
    is_video = False
    latent_dimensions = 4
    decodes_to_host: ClassVar[bool] = False  # whether what is decoded leaves the device part by part
    stand_ins: ClassVar[StandIns] = {}  # for code that looks at values that a dry run has none of
    forecasts: Path  # where they are kept
    decoder_config: dict[str, Any]
    decoder: ManagedModel
    manager: MemoryManager
    keep: bool
    vram_bytes: int | None
    ram_bytes: int | None

    def decode(self, latents: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Pictures from latents, decoded in float32: [B,H,W,3], for a video [B,F,H,W,3], float32 in 0..1 on the CPU.

        `arguments` are further ones of the VAE's own `decode`.
        """
        self.check_latents(latents)
        self._decode_arguments(latents, arguments, "whole", 0)  # unknown ones are refused before anything is loaded
        pixels = self._vae_run("decode", arguments, self._vram_budget())(latents)
        check_finite(pixels, "the decoder made")
        return to_images(pixels, video=self.is_video)

    def check_latents(self, latents: Any) -> None:
        """Raise TypeError or ValueError, in one line, for what this pipeline cannot decode."""
        check_latents(latents)
        takes = self.decoder_config.get("latent_channels") or self.decoder_config.get("z_dim")
        advice = "Sample and decode with the same pipeline."
        check_fit(latents, f"the VAE of {self.title}", takes, self.latent_dimensions, advice)
        check_finite(latents, "the latents hold")

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

    def _vae_run(self, name: Method, arguments: Mapping[str, Any], room_bytes: int) -> VaeRun:
        """What runs the VAE's method of that name, with these arguments, in so many bytes of the device."""
        return VaeRun(
            "decode" if name == "decode" else "encode picture",
            self.manager,
            self.decoder,
            self._vae_call(name, arguments, room_bytes),
            {"alone": not self.keep, "vram": self.vram_bytes, "ram": self.ram_bytes},
            room_bytes,
            None if self.manager.accelerator.is_cpu else self._vae_takes(name, arguments, room_bytes),
            splits=not any(isinstance(value, torch.Tensor) for value in arguments.values()),
        )

    def _vae_takes(self, name: Method, arguments: Mapping[str, Any], room_bytes: int) -> VaeTakes:
        return VaeTakes(self, name, self._vae_call(name, arguments, room_bytes), arguments, room_bytes)

    def _vae_call(self, name: Method, arguments: Mapping[str, Any], room_bytes: int) -> Call:
        if name == "encode":
            return run_encoder

        def decode(module: nn.Module, latents: torch.Tensor, device: torch.device, way: WayName) -> torch.Tensor:
            return run_decoder(module, latents, device, self._decode_arguments(latents, arguments, way, room_bytes))

        return decode

    # What a family supplies

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything that decides what the stages work in, beside the arguments, as plain data."""

    @abstractmethod
    def _vram_budget(self) -> int:
        """What a run here may take."""

    def _decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Arguments of the decoder's `decode` beside those given, for so many bytes on the device, weights included."""
        return given

    def _decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """As much of the latents as shows, in a dry run, what decoding all of them takes."""
        return latents
