"""Forecast the VRAM and RAM that each way to run a VAE needs: by a dry run on shapes, or from the cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...memory import striped
from ...memory.planning.forecast import Forecast
from ...memory.rates import ASSUMED
from ...memory.striped import StripedForecast
from ...memory.weights.unit import ManagedModel
from ..decoding.decode import Call, run_decoder, run_encoder
from ..decoding.policy import WayName
from ..decoding.tiling import first_tile, set_tiling
from ..sampling.latents import GENERATOR
from . import forecast_cache
from .forecasts import Forecaster, quietly, shape_of, shapes_in

if TYPE_CHECKING:
    from ..models.model import Model

log = logging.getLogger("ballast")

Method = Literal["decode", "encode"]  # of the VAE

_COPIES_OF_PIXELS = 4  # that tiled decoding holds at most: the tiles with their overlaps, 1.8, the rows, the whole

_not_in_stripes: set[str | None] = set()


class VaeForecasts:
    """Forecasts of each way to run a VAE's `method` by `call`; see `decode.WayForecasts`.

    `arguments(tensor, way)` are those that `call` gives the method. A dry run takes `sample(tensor)`, a part of the
    tensor. `moves_out` says whether the result leaves the device part by part.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        method: Method,
        vae: ManagedModel,
        call: Call,
        arguments: Callable[[torch.Tensor, WayName], Mapping[str, Any]] = lambda tensor, way: {},
        sample: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        moves_out: bool = False,
    ) -> None:
        self.call = call
        self._forecaster, self._method, self._vae = forecaster, method, vae
        self._arguments, self._sample, self._moves_out = arguments, sample, moves_out

    def whole(self, tensor: torch.Tensor) -> Forecast | None:
        """Return the forecast for the tensor at once."""
        dry = functools.partial(self.dry_run, tensor)
        return self._forecaster.forecast(self._key("whole", tensor), self._method, [self._vae], dry)

    def tiles(self, tensor: torch.Tensor) -> Forecast | None:
        """Return the forecast for tiles: the bytes of one, the operations of all."""
        dry = functools.partial(self.dry_run, tensor, tile=True)
        return self._forecaster.forecast(self._key("tiles", tensor), self._method, [self._vae], dry)

    def stripes(
        self, tensor: torch.Tensor, budget_bytes: int, operations_per_byte: float = ASSUMED.operations_per_byte
    ) -> StripedForecast | None:
        """Return the forecast for exact stripes that keep a budget beside the weights."""
        sample = self._sample(tensor)
        key = self._key(f"stripes {budget_bytes} {operations_per_byte:g}", sample)
        if key in _not_in_stripes:
            return None
        found = forecast_cache.stripes(self._forecaster.directory, key) if key else None
        if found is None:
            try:
                with quietly(), self._forecaster.between_stages():
                    found = self._dry_run_stripes(sample, budget_bytes, operations_per_byte)
            except Exception as error:
                log.info("Ballast: %s of %s cannot run in stripes (%s)", self._method, self._forecaster.name, error)
                if key:
                    _not_in_stripes.add(key)
                return None
            if key:
                forecast_cache.put_stripes(self._forecaster.directory, key, found)
        times = tensor.numel() / sample.numel()
        return replace(
            found,
            host_peak_bytes=int(found.host_peak_bytes + (times - 1) * found.result_bytes),
            h2d_bytes=int(found.h2d_bytes * times),
            d2h_bytes=int(found.d2h_bytes * times),
            operations=found.operations * times,
            passes=tuple(one.scaled(times) for one in found.passes),
        )

    def dry_run(self, tensor: torch.Tensor, tile: bool = False) -> tuple[Forecast, Any]:
        """Return the forecast by a dry run, with `tile` for tiles, and the result, which has a shape only."""
        module = self._vae.skeleton()
        sample, beside = self._sample(tensor), 0
        if whole := tile and GENERATOR in self._arguments(tensor, "tiles"):
            set_tiling(module, True)  # what such a decoder does before its tiles is no part of one
        elif tile:
            sample = first_tile(module, sample, pixels=self._method == "encode")
        call = functools.partial(_on, self.call, module, sample)
        forecast, result = self._forecaster.dry_run({self._vae.name: module}, call, self._method)
        times = tensor.numel() / sample.numel()
        if tile and not whole and not self._moves_out:
            beside = _COPIES_OF_PIXELS * int(result.nbytes * times)
        units = {
            name: replace(
                unit,
                working_bytes=unit.working_bytes + beside,
                held=tuple((path, nbytes + beside) for path, nbytes in unit.held),
                operations=unit.operations * times,
                modules=tuple((path, done * times) for path, done in unit.modules),
            )
            for name, unit in forecast.units.items()
        }
        return replace(forecast, units=units), result

    def _dry_run_stripes(self, sample: torch.Tensor, budget_bytes: int, operations_per_byte: float) -> StripedForecast:
        module = self._vae.skeleton()

        def run(tensor: torch.Tensor) -> torch.Tensor:
            return self.call(module, tensor, tensor.device, "stripes")

        how: dict[str, Any] = {"budget_bytes": budget_bytes, "operations_per_byte": operations_per_byte}
        how["fuses"] = self._forecaster.fuses
        return striped.forecast(module, run, sample.float(), **how)[0]

    def _key(self, way: str, tensor: torch.Tensor) -> str | None:
        arguments = self._arguments(tensor, "stripes" if way.startswith("stripes") else "whole")
        return self._forecaster.key(
            stage=self._method, way=way, tensor=shape_of(tensor), arguments=shapes_in(arguments)
        )


def _on(call: Call, module: torch.nn.Module, sample: torch.Tensor, device: torch.device) -> torch.Tensor:
    return call(module, sample, device, "whole").float().cpu()


def vae_forecasts(
    model: Model, method: Method, given: Mapping[str, Any], room_bytes: int, encode: Call = run_encoder
) -> VaeForecasts:
    """Return forecasts of the VAE's method with `given` arguments, in `room_bytes` on the device, weights included."""
    if method == "encode":
        way_of = {"by": getattr(encode, "__name__", type(encode).__name__)}
        return VaeForecasts(
            model.forecaster, method, model.picture_encoder, encode, lambda *_: way_of, moves_out=model.decodes_to_host
        )

    def arguments(latents: torch.Tensor, way: WayName) -> Mapping[str, Any]:
        return model.decode_arguments(latents, given, way, room_bytes)

    def decode(module: torch.nn.Module, latents: torch.Tensor, device: torch.device, way: WayName) -> torch.Tensor:
        return run_decoder(module, latents, device, arguments(latents, way))

    return VaeForecasts(
        model.forecaster, method, model.decoder, decode, arguments, model.decode_sample, model.decodes_to_host
    )
