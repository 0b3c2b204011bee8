"""Plans of a pipeline's run: each stage is rehearsed on shapes, then its units are placed on paper."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..memory.fit import sizes_of
from ..memory.forecast import Forecast
from ..memory.planner import make_plan
from ..memory.probe import rates as measured_rates
from ..memory.rates import ASSUMED, Rates
from ..memory.rehearse import rehearse
from ..memory.runplan import RunPlan, StagePlan
from ..memory.unit import ManagedModel
from . import forecast_cache
from .conditioning import Conditioning, to_host
from .decode import first_tile, run_decoder
from .embedding_cache import cache_key

if TYPE_CHECKING:
    from .staged import StagedPipeline

log = logging.getLogger("ballast")

_not_rehearsable: set[str] = set()  # keys, so that what failed once is not tried before every run

_BYTES_A_STEP = 64  # at most, in the scheduler's tables on the device
_REHEARSED_STEPS = 4  # after which multistep solvers hold all that they ever hold
_COPIES_OF_PIXELS = 4  # that tiled decoding holds at most: the tiles with their overlaps, 1.8, the rows, the whole

# As many words as people write. Some families keep as many tokens as there are words.
TYPICAL_PROMPT = (
    "a weathered fishing boat with a faded red hull lies on the wet sand of a wide bay at low tide, ropes and nets "
    "over its side, gulls on the mast, behind it a row of narrow houses climbing a green hill under heavy clouds, one "
    "beam of evening light on the water, fine detail, soft colours, seen from a low angle"
)


def alike(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to rehearse, the same for all runs that work in the same: guidance on or off, and a few steps."""
    stands_for = dict(arguments)
    for name in ("guidance_scale", "true_cfg_scale", "guider"):
        if isinstance(scale := arguments.get(name), int | float):
            stands_for[name] = 2.0 if scale > 1 else scale
    if arguments.get("sigmas") is None and arguments.get("timesteps") is None:
        stands_for["num_inference_steps"] = min(_REHEARSED_STEPS, arguments["num_inference_steps"])
    return stands_for


def sampling_key(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], reports: bool, noise: torch.Tensor | None
) -> str | None:
    """The digest of all that decides what sampling works in; None if there is something that has none."""
    tensors = {
        name: [_shape(tensor) for tensor in (value if isinstance(value, list) else [value])]
        for name, value in cond.tensors.items()
    }
    given = None if noise is None else _shape(noise)
    given_to = {k: _shape(v) if isinstance(v, torch.Tensor) else v for k, v in pipe._stands_for(arguments).items()}
    facts = {"stage": "sample", "arguments": given_to, "cond": tensors, "reports": reports, "noise": given}
    return cache_key(pipe.facts() | facts)


def _shape(tensor: torch.Tensor) -> Any:
    # Of masks and ids the values count too: some models cut their text to what is not masked.
    return [str(tensor.dtype), list(tensor.shape)] if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the libraries' warnings about long prompts and the like: they belong to a run, not to its rehearsal."""
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
    """What sampling will work in, from the cache or by a rehearsal; None where it cannot be rehearsed."""
    rehearsed = functools.partial(_rehearse_sampling, pipe, cond, arguments, on_step, noise)
    forecast = _forecast(pipe, key, "sample", pipe.denoisers, rehearsed)
    return forecast and _of_steps(forecast, arguments["num_inference_steps"])


def forecast_decoding(pipe: StagedPipeline, latents: torch.Tensor, arguments: Mapping[str, Any]) -> Forecast | None:
    """What decoding whole will work in, from the cache or by a rehearsal; None where it cannot be rehearsed."""
    given = {name: _shape(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    key = cache_key(pipe.facts() | {"stage": "decode", "latents": _shape(latents), "arguments": given})
    rehearsed = functools.partial(_rehearse_decoding, pipe, latents, arguments)
    return _forecast(pipe, key, "decode", [pipe.decoder], rehearsed)


def _forecast(
    pipe: StagedPipeline,
    key: str | None,
    stage: str,
    units: Sequence[ManagedModel],
    rehearsed: Callable[[], tuple[Forecast, torch.Tensor]],
) -> Forecast | None:
    if key and (found := forecast_cache.get(pipe.forecasts, key, {stage: _names(units)})):
        return found[stage]
    if key in _not_rehearsable:
        return None
    try:
        with quietly():
            forecast, _ = rehearsed()
    except Exception as error:
        log.info("Ballast: %s of %s cannot be rehearsed, and is measured as it runs (%s)", stage, pipe.name, error)
        if key:
            _not_rehearsable.add(key)
        return None
    if key:
        forecast_cache.put(pipe.forecasts, key, {stage: forecast})
    return forecast


@dataclass(frozen=True)
class Asked:
    """A run to plan: checked `arguments` of sampling, and the conditioning, or a prompt pair to make one of."""

    arguments: Mapping[str, Any]
    strategy: str
    cond: Conditioning | None
    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str]
    size: str


def plan_run(pipe: StagedPipeline, asked: Asked, budget_bytes: int, ram_bytes: int, rates: Rates | None) -> RunPlan:
    """The plan of a whole run. Nothing is loaded. Raises ValueError for what the pipeline cannot run."""
    forecasts = _forecast_run(pipe, asked)
    used = rates or measured_rates(pipe.manager.device)
    place = functools.partial(plan_stage, budget_bytes=budget_bytes, ram_bytes=ram_bytes, rates=used)
    steps = asked.arguments["num_inference_steps"]
    sampling = _of_steps(forecasts["sample"], steps)
    stages = [place("sample", sampling, pipe.denoisers, strategy=asked.strategy, steps=steps)]
    if "encode" in forecasts:
        stages.insert(0, place("encode", forecasts["encode"], pipe.encoders))
    whole = place("decode", forecasts["decode"], [pipe.decoder])
    tiled = place("decode", forecasts["decode in tiles"], [pipe.decoder], strategy="resident")
    if whole.units[0].fits:
        stages.append(whole)
    else:
        stages.append(replace(tiled, note="in tiles" if tiled.units[0].fits else "in tiles or on the CPU"))
    device = str(pipe.manager.device)
    name, caveat = pipe.folder.name, pipe.forecast_caveat
    return RunPlan(name, device, asked.size, steps, budget_bytes, used, tuple(stages), caveat)


def plan_stage(
    name: str,
    forecast: Forecast,
    units: Sequence[ManagedModel],
    *,
    budget_bytes: int,
    ram_bytes: int,
    rates: Rates = ASSUMED,
    strategy: str = "auto",
    steps: int = 1,
) -> StagePlan:
    """The plan of one stage, for what it is forecast to work in."""
    named = {unit.name: unit for unit in units}
    plans = tuple(
        make_plan(
            unit,
            sizes_of(named[unit]),
            work,
            rates,
            budget_bytes,
            ram_bytes,
            steps=forecast.steps,
            strategy=strategy,
            idle_bytes=forecast.idle_bytes,
            in_ram=named[unit].tier != "disk",
            from_disk=sizes_of(named[unit]).total_bytes > ram_bytes and named[unit].source() is not None,
        )
        for unit, work in forecast.units.items()
    )
    return StagePlan(name, plans, forecast.idle_bytes, steps=steps, rates=rates)


def _forecast_run(pipe: StagedPipeline, asked: Asked) -> dict[str, Forecast]:
    if asked.cond:
        key = sampling_key(pipe, asked.cond, asked.arguments, True, None)
        key = key and f"{key}-run"
    else:
        words = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
        key = cache_key(pipe.facts() | words | {"stage": "run", "arguments": pipe._stands_for(asked.arguments)})
    stages = {"sample": _names(pipe.denoisers), "decode": [pipe.decoder.name], "decode in tiles": [pipe.decoder.name]}
    if not asked.cond:
        stages["encode"] = _names(pipe.encoders)
    forecasts = forecast_cache.get(pipe.forecasts, key, stages) if key else None
    if forecasts is None:
        try:
            with quietly():
                forecasts = _rehearse_run(pipe, asked)
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{pipe.name} cannot be planned at {asked.size}: the rehearsal ends with an error ({why})."
            ) from error
        if key:
            forecast_cache.put(pipe.forecasts, key, forecasts)
    return forecasts


def _names(units: Sequence[ManagedModel]) -> list[str]:
    return [unit.name for unit in units]


def _rehearse_run(pipe: StagedPipeline, asked: Asked) -> dict[str, Forecast]:
    forecasts, cond = {}, asked.cond
    if cond is None:
        modules = {unit.name: unit.skeleton() for unit in pipe.encoders}
        forecasts["encode"], cond = rehearse(
            modules,
            lambda device: Conditioning.of(pipe._encode(asked.prompt, asked.negative_prompt, {}, device, modules)),
            pipe.stand_ins,
        )
    forecasts["sample"], latents = _rehearse_sampling(pipe, cond, asked.arguments, True, None)
    arguments = pipe._decode_arguments(latents, {})

    forecasts["decode"], pixels = _rehearse_decoding(pipe, latents, arguments)
    one, _ = _rehearse_decoding(pipe, latents, arguments, tile=True)
    copies = 0 if pipe.decodes_to_host else _COPIES_OF_PIXELS
    forecasts["decode in tiles"] = _beside(one, copies * pixels.nbytes)
    return forecasts


def _rehearse_decoding(
    pipe: StagedPipeline, latents: torch.Tensor, arguments: Mapping[str, Any], tile: bool = False
) -> tuple[Forecast, torch.Tensor]:
    """What decoding takes: with `tile` that of one tile, in the seconds of all. Returns the pixels as well."""
    module = pipe.decoder.skeleton()
    sample = pipe._decode_sample(latents)
    sample = first_tile(module, sample) if tile else sample
    run = functools.partial(run_decoder, module, sample, tiled=False, arguments=dict(arguments))
    forecast, pixels = rehearse({pipe.decoder.name: module}, run, method="decode")
    times = latents.numel() / sample.numel()
    units = {
        name: replace(
            unit,
            operations=unit.operations * times,
            block_operations=tuple(operations * times for operations in unit.block_operations),
        )
        for name, unit in forecast.units.items()
    }
    return replace(forecast, units=units), pixels


def _beside(forecast: Forecast, more_bytes: int) -> Forecast:
    """The same with more held while the units run."""
    units = {
        name: replace(unit, working_bytes=unit.working_bytes + more_bytes) for name, unit in forecast.units.items()
    }
    return replace(forecast, units=units)


def _of_steps(forecast: Forecast, steps: int) -> Forecast:
    """The same for more steps than were rehearsed. Per step nothing changes."""
    more_bytes = _BYTES_A_STEP * max(0, steps - forecast.steps)
    units = {name: replace(unit, live_bytes=unit.live_bytes + more_bytes) for name, unit in forecast.units.items()}
    return replace(forecast, idle_bytes=forecast.idle_bytes + more_bytes, units=units)


def _rehearse_sampling(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], on_step: bool, noise: torch.Tensor | None
) -> tuple[Forecast, torch.Tensor]:
    modules = {unit.name: unit.skeleton() for unit in pipe.denoisers}
    stands_for = pipe._stands_for(arguments)

    def sample(device: torch.device) -> torch.Tensor:
        given = {**stands_for, "generator": torch.Generator("cpu").manual_seed(0), "latents": noise}
        report = (lambda step, steps, latents: None) if on_step else None
        return to_host(pipe._denoise(cond, given, report, device, modules).float())

    forecast, latents = rehearse(modules, sample, pipe.stand_ins)
    return replace(forecast, steps=stands_for["num_inference_steps"]), latents
