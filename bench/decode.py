"""A VAE of FLUX.1's size in float32: whole, in stripes within two budgets, in diffusers' tiles."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..memory import striped
from ..memory.engine.engine import Engine
from ..memory.probe import rates
from ..memory.sizes import format_bytes
from ..memory.striped import Traffic
from ..pipelines.decoding.decode import pace
from ..pipelines.decoding.precision import full_float32
from ..pipelines.decoding.tiling import set_tiling
from .downloads.full_size import FLUX_VAE
from .harness import Run
from .measure import Meter
from .models import weight_bytes
from .stream import placed

_CALLS = 3  # of each way: the first chooses kernels, the second is timed, the third lets the driver be asked
_SECONDS = 12  # of a way, about


@torch.inference_mode()
def measure(to: Run) -> None:
    """Add a row for each side of a picture and each way."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    small = {"sample_size": 64, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 8}
    module: Any = AutoencoderKL(**{**FLUX_VAE, **(small if to.dry else {})})
    module.eval().requires_grad_(False)
    meter = to.meter()
    decoder = _Decoder(to, meter, module, meter.used_bytes())
    to.tell(weight_bytes=weight_bytes(module))
    with placed(Engine(module, meter.device), meter), full_float32():
        for side in to.request["sides"]:
            latents = torch.randn(1, 16, side // 8, side // 8, generator=torch.Generator().manual_seed(side))
            truth = to.attempt(f"whole, {side}", _SECONDS, decoder.row, "whole", latents, None)
            for budget_bytes in to.request["budgets"]:
                way = f"stripes in {format_bytes(budget_bytes)}"
                to.attempt(f"{way}, {side}", _SECONDS, decoder.row, way, latents, truth, budget_bytes)
            set_tiling(module, True)
            to.attempt(f"tiles, {side}", _SECONDS, decoder.row, "tiles", latents, truth)
            set_tiling(module, False)


@dataclass(frozen=True)
class _Decoder:
    """One VAE on the device, whose driver had counted `idle_bytes` before."""

    to: Run
    meter: Meter
    module: nn.Module
    idle_bytes: int | None

    def row(
        self, way: str, latents: torch.Tensor, truth: torch.Tensor | None, budget_bytes: int | None = None
    ) -> torch.Tensor:
        """Add a row, and return the picture. `truth` is that of the whole; with a budget it is made in stripes."""
        meter, traffic, seconds = self.meter, Traffic(), []

        def plain(latents: torch.Tensor) -> torch.Tensor:
            return self.module.decode(latents.to(meter.device), return_dict=False)[0]  # type: ignore[operator]

        def decode() -> torch.Tensor:
            if budget_bytes is None:
                return plain(latents).cpu()
            room_bytes, speed = max(1, budget_bytes - weight_bytes(self.module)), pace(rates(meter.device))
            return striped.run(
                plain, latents, device=meter.device, budget_bytes=room_bytes, traffic=traffic,
                operations_per_byte=speed,
            )  # fmt: skip

        meter.accelerator.empty_cache()
        meter.accelerator.take_peak_bytes()
        for _ in range(_CALLS - 1):
            meter.accelerator.synchronize()
            start = time.perf_counter()
            made = decode()
            seconds.append(time.perf_counter() - start)
        peak_bytes = meter.accelerator.take_peak_bytes()
        with meter.driver_peak() as used:
            decode()
        row: dict[str, Any] = {"way": way, "side": made.shape[-1], "first_seconds": seconds[0], "seconds": seconds[1]}
        row |= {"peak_bytes": peak_bytes, "driver_bytes": used.over(self.idle_bytes), "budget_bytes": budget_bytes}
        if budget_bytes is not None:
            row |= {"h2d_bytes": traffic.h2d_bytes // _CALLS, "d2h_bytes": traffic.d2h_bytes // _CALLS}
            row |= {"host_peak_bytes": traffic.host_peak_bytes}
        difference = None if truth is None else float((made - truth).abs().max())
        self.to.row(**row, difference=difference, is_finite=bool(made.isfinite().all()))
        return made
