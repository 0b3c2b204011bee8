"""Forecasts of a pipeline's stages: by a dry run on shapes, or from the cache of earlier ones."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.planning.dry_run import StandIns, dry_run
from ...memory.planning.forecast import Forecast
from ...memory.simulated.attention import Fuses
from ...memory.weights.unit import ManagedModel
from ..encoding.embedding_cache import cache_key
from . import forecast_cache

log = logging.getLogger("ballast")

_PACK = Path(__file__).resolve().parents[2]

_no_dry_run: set[str] = set()  # keys, so that what failed once is not tried before every run


@functools.cache
def code_digest(pack: Path) -> str:
    """Return the digest of the code that makes forecasts: another release makes its own."""
    digest = sha256()
    for room in ("memory", "pipelines"):
        for path in sorted((pack / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class RefusedError(ValueError):
    """What is asked for cannot be run: a dry run and the run itself end so, and nobody waits for the run."""


@dataclass(frozen=True)
class Forecaster:
    """Forecasts the stages of one pipeline, called `name` in the log.

    `facts()` is everything that decides their activations, beside their arguments, as plain data. `directory` keeps
    forecasts. `between_stages()` makes stages wait. `stand_ins` replace code that reads values.
    `fuses` tells which attention is one kernel on the device, and `kernels` tells devices apart that differ in it.
    """

    name: str
    facts: Callable[[], Mapping[str, Any]]
    directory: Path
    between_stages: Callable[[], AbstractContextManager[Any]]
    stand_ins: StandIns
    fuses: Fuses | None = None
    kernels: str = ""

    def key(self, **arguments: Any) -> str | None:
        """Return the digest of the pipeline's facts, `arguments` and the code, or None if one has no digest."""
        kernels = {"kernels": self.kernels} if self.kernels else {}
        return cache_key({**self.facts(), **arguments, **kernels, "code": code_digest(_PACK)})

    def forecast(
        self,
        key: str | None,
        stage: str,
        units: Sequence[ManagedModel],
        dry: Callable[[], tuple[Forecast, Any]],
    ) -> Forecast | None:
        """Return the forecast of a stage from the cache or the dry run `dry`, or None if that fails."""
        if key and (found := forecast_cache.get(self.directory, key, {stage: names_of(units)})):
            return found[stage]
        forecast = self.attempt(key, stage, dry)
        if key and forecast:
            forecast_cache.put(self.directory, key, {stage: forecast})
            if last := self.key(last=stage):
                forecast_cache.put(self.directory, last, {stage: forecast})
        return forecast

    def learn_calls(self, stage: str, units: Sequence[ManagedModel]) -> None:
        """Tell units the order of their calls before a size is known: that of the last dry run."""
        unknown = [unit for unit in units if not unit.calls.order]
        last = self.key(last=stage) if unknown else None
        found = forecast_cache.get(self.directory, last, {stage: names_of(units)}) if last else None
        for unit in unknown:
            if found and unit.name in found[stage].units:
                unit.learn(found[stage].units[unit.name].call_order)

    def attempt(self, key: str | None, stage: str, dry: Callable[[], tuple[Forecast, Any]]) -> Forecast | None:
        """Return the forecast of a stage by the dry run `dry`. None if it fails, or failed before for the same key.

        RefusedError comes out.
        """
        if key in _no_dry_run:
            return None
        try:
            with quietly():
                return dry()[0]
        except RefusedError:
            raise
        except Exception as error:
            log.info("Ballast: %s of %s has no dry run, and is measured as it runs (%s)", stage, self.name, error)
            if key:
                _no_dry_run.add(key)
            return None

    def dry_run(
        self,
        modules: dict[str, nn.Module],
        run: Callable[[torch.device], Any],
        method: str = "forward",
    ) -> tuple[Forecast, Any]:
        """Run a stage on shapes, as `memory.planning.dry_run` does, while no other stage runs."""
        with self.between_stages():  # a dry run counts what is done on the simulated device meanwhile, too
            return dry_run(modules, run, self.stand_ins, method, self.fuses)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence the libraries' warnings about long prompts and the like: they belong to a run, not to its dry run."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries: tuple[Any, ...] = (diffusers_logging, transformers_logging)
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)


def names_of(units: Sequence[ManagedModel]) -> list[str]:
    """Return the names of units, in their order."""
    return [unit.name for unit in units]


def shape_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's dtype and shape, as a forecast's key holds them."""
    # Of masks and ids the values count too: some models cut their text to what is not masked.
    return [str(tensor.dtype), list(tensor.shape)] if tensor.is_floating_point() else tensor


def shapes_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the shapes of their tensors in place of these."""
    return {name: _shapes(value) for name, value in arguments.items()}


def _shapes(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shapes(one) for one in value]
    if isinstance(value, dict):
        return shapes_in(value)
    return shape_of(value) if isinstance(value, torch.Tensor) else value
