"""A VAE of FLUX.1's size in float32: whole, in stripes within two budgets, in diffusers' tiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...memory import striped
from ...memory.engine.engine import Engine
from ...memory.probe import rates
from ...memory.sizes import format_bytes
from ...memory.striped import Traffic
from ...pipelines.decoding.decode import pace
from ...pipelines.decoding.precision import full_float32
from ...pipelines.decoding.tiling import set_tiling
from ..models import weight_bytes
from . import section
from .section import Section

_CALLS = 3  # of each way: the first chooses kernels, the second is timed, the third lets the driver be asked
_SECONDS = 12  # of a way, about


def main(argv: Sequence[str]) -> None:
    """Run as a process of its own."""
    section.run(argv, lambda to: _Decoder(to).measure())


def _build(dry: bool) -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    widths = (8, 8, 8, 8) if dry else (128, 256, 512, 512)
    module: Any = AutoencoderKL(
        sample_size=64 if dry else 1024, block_out_channels=widths, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1 if dry else 2, latent_channels=16,
        norm_num_groups=8 if dry else 32, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return module.eval().requires_grad_(False)


class _Decoder:
    """Rows of one VAE: for each side of a picture, each way."""

    def __init__(self, to: Section) -> None:
        self.to, self.meter = to, to.meter()
        self.idle_bytes = self.meter.used_bytes()
        self.module = _build(to.dry)
        self.weight_bytes = weight_bytes(self.module)
        to.tell(weight_bytes=self.weight_bytes)

    @torch.inference_mode()
    def measure(self) -> None:
        placement = Engine(self.module, self.meter.device)
        placement.place()
        try:
            with full_float32():
                for side in self.to.request["sides"]:
                    self._rows(side)
        finally:
            placement.remove()

    def _rows(self, side: int) -> None:
        attempt = self.to.attempt
        latents = torch.randn(1, 16, side // 8, side // 8, generator=torch.Generator().manual_seed(side))
        truth = attempt(f"whole, {side}", _SECONDS, self._row, "whole", side, latents, None, self._decode)
        for budget_bytes in self.to.request["budgets"]:
            way = f"stripes in {format_bytes(budget_bytes)}"
            attempt(f"{way}, {side}", _SECONDS, self._stripes, way, side, latents, truth, budget_bytes)
        set_tiling(self.module, True)
        attempt(f"tiles, {side}", _SECONDS, self._row, "tiles", side, latents, truth, self._decode)
        set_tiling(self.module, False)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.module.decode(latents.to(self.meter.device), return_dict=False)[0].cpu()  # type: ignore[operator]

    def _stripes(
        self, way: str, side: int, latents: torch.Tensor, truth: torch.Tensor | None, budget_bytes: int
    ) -> None:
        traffic = Traffic()

        def decode(latents: torch.Tensor) -> torch.Tensor:
            return self.module.decode(latents, return_dict=False)[0]  # type: ignore[operator]

        run = partial(
            striped.run, decode, device=self.meter.device, budget_bytes=max(1, budget_bytes - self.weight_bytes),
            traffic=traffic, operations_per_byte=pace(rates(self.meter.device)),
        )  # fmt: skip
        self._row(way, side, latents, truth, run, traffic, budget_bytes=budget_bytes)

    def _row(
        self,
        way: str,
        side: int,
        latents: torch.Tensor,
        truth: torch.Tensor | None,
        decode: Callable[[torch.Tensor], torch.Tensor],
        traffic: Traffic | None = None,
        **more: int,
    ) -> torch.Tensor:
        """Its row, and the picture. `truth` is that of the whole."""
        meter = self.meter
        meter.accelerator.empty_cache()
        seconds = []
        meter.accelerator.take_peak_bytes()
        for _ in range(_CALLS - 1):
            meter.accelerator.synchronize()
            start = time.perf_counter()
            made = decode(latents)
            seconds.append(time.perf_counter() - start)
        peak_bytes = meter.accelerator.take_peak_bytes()
        with meter.driver_peak() as used:
            decode(latents)
        self.to.row(
            way=way, side=side, first_seconds=seconds[0], seconds=seconds[1], peak_bytes=peak_bytes,
            driver_bytes=used.over(self.idle_bytes),
            h2d_bytes=traffic and traffic.h2d_bytes // _CALLS, d2h_bytes=traffic and traffic.d2h_bytes // _CALLS,
            host_peak_bytes=traffic and traffic.host_peak_bytes,
            difference=None if truth is None else float((made - truth).abs().max()),
            is_finite=bool(made.isfinite().all()), **more,
        )  # fmt: skip
        return made
