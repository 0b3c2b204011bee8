"""What decoding and encoding pictures take, in each of the ways: by a dry run on shapes, or remembered."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...memory import striped
from ...memory.planning.forecast import Forecast
from ...memory.striped import StripedForecast
from ..decoding.decode import Call, first_tile
from ..decoding.policy import WayName
from ..encoding.embedding_cache import cache_key
from .forecasts import dry_run_stage, forecast_stage, quietly, shape_of

if TYPE_CHECKING:
    from ..decoding.vae_stages import VaeStages

log = logging.getLogger("ballast")

_COPIES_OF_PIXELS = 4  # that tiled decoding holds at most: the tiles with their overlaps, 1.8, the rows, the whole
_STEPS = 32  # of budgets between one power of two and the next: those closer than this are one
_MOST = 256

_striped: OrderedDict[str, StripedForecast | None] = OrderedDict()


class VaeTakes:
    """What a pipeline's VAE takes for `call`, which uses its method `name`; see `decode.Takes`.

    `given` are arguments of the call; what it adds to them depends on `room_bytes`.
    """

    def __init__(
        self, pipe: VaeStages, name: Literal["decode", "encode"], call: Call, given: Mapping[str, Any], room_bytes: int
    ) -> None:
        self._pipe, self._name, self._call = pipe, name, call
        self._given, self._room_bytes = given, room_bytes

    def whole(self, tensor: torch.Tensor) -> Forecast | None:
        """Of the tensor at once."""
        dry = functools.partial(self.dry_run, tensor)
        return forecast_stage(self._pipe, self._key("whole", tensor), self._name, [self._pipe.decoder], dry)

    def tiles(self, tensor: torch.Tensor) -> Forecast | None:
        """Of one tile, in the seconds of all."""
        dry = functools.partial(self.dry_run, tensor, tile=True)
        return forecast_stage(self._pipe, self._key("tiles", tensor), self._name, [self._pipe.decoder], dry)

    def stripes(self, tensor: torch.Tensor, budget_bytes: int) -> StripedForecast | None:
        """In exact stripes within a budget beside the weights."""
        budget_bytes -= budget_bytes % max(1, 2 ** (budget_bytes.bit_length() - 1) // _STEPS)
        sample = self._sample(tensor)
        key = self._key(f"stripes {budget_bytes}", sample)
        if key not in _striped:
            try:
                with quietly(), self._pipe.manager.between_stages():
                    found = self._dry_run_stripes(sample, budget_bytes)
            except Exception as error:
                log.info("Ballast: %s of %s cannot run in stripes (%s)", self._name, self._pipe.name, error)
                found = None
            if key is None:
                return found
            _striped[key] = found
            while len(_striped) > _MOST:
                _striped.popitem(last=False)
        found = _striped[key] if key else None
        times = tensor.numel() / sample.numel()
        return found and replace(
            found,
            host_peak_bytes=int(found.host_peak_bytes + (times - 1) * found.result_bytes),
            h2d_bytes=int(found.h2d_bytes * times),
            d2h_bytes=int(found.d2h_bytes * times),
            operations=found.operations * times,
        )

    def dry_run(self, tensor: torch.Tensor, tile: bool = False) -> tuple[Forecast, Any]:
        """The forecast, with `tile` that of one tile in the seconds of all, and the result."""
        module = self._pipe.decoder.skeleton()
        sample = self._sample(tensor)
        if tile:
            sample = first_tile(module, sample, pixels=self._name == "encode")
        call = functools.partial(_on, self._call, module, sample)
        forecast, result = dry_run_stage(self._pipe, {self._pipe.decoder.name: module}, call, method=self._name)
        times = tensor.numel() / sample.numel()
        beside = 0
        if tile and not self._pipe.decodes_to_host:
            beside = _COPIES_OF_PIXELS * int(result.nbytes * times)
        units = {
            name: replace(
                unit,
                working_bytes=unit.working_bytes + beside,
                operations=unit.operations * times,
                block_operations=tuple(operations * times for operations in unit.block_operations),
            )
            for name, unit in forecast.units.items()
        }
        return replace(forecast, units=units), result

    def _dry_run_stripes(self, sample: torch.Tensor, budget_bytes: int) -> StripedForecast:
        module = self._pipe.decoder.skeleton()

        def run(tensor: torch.Tensor) -> torch.Tensor:
            return self._call(module, tensor, tensor.device, "stripes")

        return striped.forecast(module, run, sample.float(), budget_bytes=budget_bytes)[0]

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._pipe._decode_sample(tensor) if self._name == "decode" else tensor

    def _key(self, way: str, tensor: torch.Tensor) -> str | None:
        chosen = self._given
        if self._name == "decode":
            runs: WayName = "stripes" if way.startswith("stripes") else "whole"
            chosen = self._pipe._decode_arguments(tensor, self._given, runs, self._room_bytes)
        arguments = {name: shape_of(v) if isinstance(v, torch.Tensor) else v for name, v in chosen.items()}
        facts = {"stage": self._name, "way": way, "tensor": shape_of(tensor), "arguments": arguments}
        return cache_key(self._pipe.facts() | facts)


def _on(call: Call, module: torch.nn.Module, sample: torch.Tensor, device: torch.device) -> torch.Tensor:
    return call(module, sample, device, "whole").float().cpu()
