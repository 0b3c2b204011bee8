"""What the stages of a pipeline take: by a dry run on shapes, or remembered from an earlier one."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...memory.planning.dry_run import dry_run
from ...memory.planning.forecast import Forecast
from ...memory.units.unit import ManagedModel
from ..encoding.conditioning import Conditioning, to_host
from ..encoding.embedding_cache import cache_key
from . import forecast_cache

if TYPE_CHECKING:
    from ..decoding.vae_stages import VaeStages
    from ..staged import StagedPipeline

log = logging.getLogger("ballast")

_no_dry_run: set[str] = set()  # keys, so that what failed once is not tried before every run

_BYTES_A_STEP = 64  # at most, in the scheduler's tables on the device
_DRY_STEPS = 4  # after which multistep solvers hold all that they ever hold


def alike(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a dry run, the same for all runs that work in the same: guidance on or off, and a few steps."""
    stands_for = dict(arguments)
    for name in ("guidance_scale", "true_cfg_scale", "guider"):
        if isinstance(scale := arguments.get(name), int | float):
            stands_for[name] = 2.0 if scale > 1 else scale
    if arguments.get("sigmas") is None and arguments.get("timesteps") is None:
        stands_for["num_inference_steps"] = min(_DRY_STEPS, arguments["num_inference_steps"])
    return stands_for


def sampling_key(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], reports: bool, noise: torch.Tensor | None
) -> str | None:
    """The digest of all that decides what sampling works in; None if there is something that has none."""
    tensors = {
        name: [shape_of(tensor) for tensor in (value if isinstance(value, list) else [value])]
        for name, value in cond.tensors.items()
    }
    given = None if noise is None else shape_of(noise)
    given_to = {k: shape_of(v) if isinstance(v, torch.Tensor) else v for k, v in pipe._stands_for(arguments).items()}
    facts = {"stage": "sample", "arguments": given_to, "cond": tensors, "reports": reports, "noise": given}
    return cache_key(pipe.facts() | facts)


def shape_of(tensor: torch.Tensor) -> Any:
    # Of masks and ids the values count too: some models cut their text to what is not masked.
    return [str(tensor.dtype), list(tensor.shape)] if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the libraries' warnings about long prompts and the like: they belong to a run, not to its dry run."""
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


def forecast_sampling(
    pipe: StagedPipeline,
    key: str | None,
    cond: Conditioning,
    arguments: Mapping[str, Any],
    on_step: bool,
    noise: torch.Tensor | None,
) -> Forecast | None:
    """What sampling will work in, from the cache or by a dry run; None where there can be none."""
    dry = functools.partial(dry_run_sampling, pipe, cond, arguments, on_step, noise)
    forecast = forecast_stage(pipe, key, "sample", pipe.denoisers, dry)
    return forecast and of_steps(forecast, arguments["num_inference_steps"])


def forecast_stage(
    pipe: VaeStages,
    key: str | None,
    stage: str,
    units: Sequence[ManagedModel],
    dry: Callable[[], tuple[Forecast, Any]],
) -> Forecast | None:
    """The forecast of a stage, from the cache or by a dry run; None where there can be none."""
    if key and (found := forecast_cache.get(pipe.forecasts, key, {stage: names_of(units)})):
        return found[stage]
    if key in _no_dry_run:
        return None
    try:
        with quietly():
            forecast, _ = dry()
    except Exception as error:
        log.info("Ballast: %s of %s has no dry run, and is measured as it runs (%s)", stage, pipe.name, error)
        if key:
            _no_dry_run.add(key)
        return None
    if key:
        forecast_cache.put(pipe.forecasts, key, {stage: forecast})
    return forecast


def names_of(units: Sequence[ManagedModel]) -> list[str]:
    return [unit.name for unit in units]


def dry_run_stage(
    pipe: VaeStages,
    modules: dict[str, nn.Module],
    run: Callable[[torch.device], Any],
    method: str = "forward",
) -> tuple[Forecast, Any]:
    """`dry_run`, while no stage runs."""
    with pipe.manager.between_stages():  # a dry run counts what is done on the simulated device meanwhile, too
        return dry_run(modules, run, pipe.stand_ins, method)


def of_steps(forecast: Forecast, steps: int) -> Forecast:
    """The same for more steps than the dry run had. Per step nothing changes."""
    more_bytes = _BYTES_A_STEP * max(0, steps - forecast.steps)
    units = {name: replace(unit, live_bytes=unit.live_bytes + more_bytes) for name, unit in forecast.units.items()}
    return replace(forecast, idle_bytes=forecast.idle_bytes + more_bytes, units=units)


def dry_run_sampling(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], on_step: bool, noise: torch.Tensor | None
) -> tuple[Forecast, torch.Tensor]:
    modules = {unit.name: unit.skeleton() for unit in pipe.denoisers}
    stands_for = pipe._stands_for(arguments)

    def sample(device: torch.device) -> torch.Tensor:
        given = {**stands_for, "generator": torch.Generator("cpu").manual_seed(0), "latents": noise}
        report = (lambda step, steps, latents: None) if on_step else None
        return to_host(pipe._denoise(cond, given, report, device, modules).float())

    forecast, latents = dry_run_stage(pipe, modules, sample)
    return replace(forecast, steps=stands_for["num_inference_steps"], result=tuple(latents.shape)), latents
