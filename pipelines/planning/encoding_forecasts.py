"""Forecast the VRAM that encoding needs: by a dry run that runs each encoder once for each length of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...memory.planning.dry_run import dry_run_known
from ...memory.planning.forecast import Forecast
from ...memory.planning.known_calls import KnownCalls
from ...memory.weights.unit import ManagedModel
from ..encoding.conditioning import Conditioning
from ..lora.use import branches
from . import forecast_cache
from .forecasts import Forecaster

Encode = Callable[[torch.device, Mapping[str, nn.Module]], Mapping[str, torch.Tensor | list[torch.Tensor]]]


@dataclass(frozen=True)
class Encoding:
    """An encoding stage to forecast: `encode` runs these units on the prompts.

    `texts` are the prompts and all options, as plain data.
    """

    forecaster: Forecaster
    units: Sequence[ManagedModel]
    texts: Mapping[str, Any]
    encode: Encode

    def forecast(self) -> Forecast | None:
        """Return the forecast, or None if no dry run is possible. A prompt of a known length takes no time."""
        key = self.forecaster.key(stage="encode", **self.texts, **branches(self.units))
        return self.forecaster.attempt(key, "encode", self.dry_run)

    def dry_run(self) -> tuple[Forecast, Conditioning]:
        """Return the forecast by a dry run, and the conditioning, which has shapes only."""
        directory = self.forecaster.directory
        stage = self.forecaster.key(stage="calls of encode", **branches(self.units))
        known, sizes = {}, {}
        for unit in self.units:
            _ = unit.module  # made first: what is kept of its results names classes that come with it
            known[unit.name] = forecast_cache.calls(directory, f"{stage}-{unit.name}") if stage else KnownCalls()
            sizes[unit.name] = len(known[unit.name])
        try:
            with self.forecaster.between_stages():
                return dry_run_known(
                    self.units,
                    known,
                    lambda device, modules: Conditioning.of(self.encode(device, modules)),
                    self.forecaster.fuses,
                )
        finally:
            for name, calls in known.items():
                if stage and len(calls) > sizes[name]:
                    forecast_cache.put_calls(directory, f"{stage}-{name}", calls)
