"""Plans of a pipeline's run: each stage is rehearsed on shapes, then its units are placed on paper."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..memory.fit import sizes_of
from ..memory.forecast import Forecast
from ..memory.planner import Plan, make_plan
from ..memory.rates import ASSUMED, Rates
from ..memory.rehearse import rehearse
from ..memory.runplan import RunPlan, StagePlan
from ..memory.unit import ManagedModel
from . import forecast_cache
from .conditioning import Conditioning, to_host
from .decode import run_decoder
from .embedding_cache import cache_key

if TYPE_CHECKING:
    from .staged import StagedPipeline

log = logging.getLogger("ballast")

# As many words as people write. Some families keep as many tokens as there are words.
TYPICAL_PROMPT = (
    "a weathered fishing boat with a faded red hull lies on the wet sand of a wide bay at low tide, ropes and nets over "
    "its side, gulls on the mast, behind it a row of narrow houses climbing a green hill under heavy clouds, a single "
    "beam of evening light on the water, fine detail, soft colours, seen from a low angle"
)


def sampling_key(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], reports: bool, noise: torch.Tensor | None
) -> str | None:
    """The digest of all that decides what sampling works in; None if there is something that has none."""
    tensors = {
        name: [_shape(tensor) for tensor in (value if isinstance(value, list) else [value])]
        for name, value in cond.tensors.items()
    }
    given = None if noise is None else _shape(noise)
    facts = {"stage": "sample", "arguments": dict(arguments), "cond": tensors, "reports": reports, "noise": given}
    return cache_key(pipe.facts() | facts)


def _shape(tensor: torch.Tensor) -> Any:
    # Of masks and ids the values count too: some models cut their text to what is not masked.
    return [str(tensor.dtype), list(tensor.shape)] if tensor.is_floating_point() else tensor


def forecast_sampling(
    pipe: StagedPipeline,
    key: str | None,
    cond: Conditioning,
    arguments: Mapping[str, Any],
    on_step: bool,
    noise: torch.Tensor | None,
) -> Forecast | None:
    """What sampling will work in, from the cache or by a rehearsal; None where it cannot be rehearsed."""
    found = forecast_cache.get(pipe.forecasts, key) if key else None
    if found is None:
        try:
            forecast, _ = _rehearse_sampling(pipe, cond, arguments, on_step, noise)
        except Exception as error:
            log.info("Ballast: %s cannot be rehearsed, and is measured as it runs (%s)", pipe.name, error)
            return None
        found = {"sample": forecast}
        if key:
            forecast_cache.put(pipe.forecasts, key, found)
    return found["sample"]


def plan_run(
    pipe: StagedPipeline,
    arguments: Mapping[str, Any],
    prompt: str,
    negative_prompt: str,
    work: str,
    steps: int,
    strategy: str,
    budget_bytes: int,
    ram_bytes: int,
    rates: Rates | None,
) -> RunPlan:
    """The plan of a whole run. Nothing is loaded. Raises what the rehearsal raises."""
    facts = {"stage": "run", "arguments": dict(arguments), "prompt": prompt, "negative_prompt": negative_prompt}
    key = cache_key(pipe.facts() | facts)
    forecasts = forecast_cache.get(pipe.forecasts, key) if key else None
    if forecasts is None:
        forecasts = _rehearse_run(pipe, arguments, prompt, negative_prompt)
        if key:
            forecast_cache.put(pipe.forecasts, key, forecasts)
    used = rates or ASSUMED

    def units(stage: str, owned: list[ManagedModel], asked: str = "auto", count: int = 1) -> tuple[Plan, ...]:
        forecast = forecasts[stage]
        named = {unit.name: unit for unit in owned}
        return tuple(
            make_plan(
                name,
                sizes_of(named[name]),
                forecasts[stage].units[name],
                used,
                budget_bytes,
                ram_bytes,
                steps=count,
                strategy=asked,
                idle_bytes=forecast.idle_bytes,
                in_ram=named[name].tier != "disk",
                from_disk=False,
            )
            for name in forecast.units
        )

    whole, tiled = units("decode", [pipe.decoder], "resident"), units("decode in tiles", [pipe.decoder], "resident")
    fits = whole[0].fits or not tiled[0].fits
    stages = (
        StagePlan("encode", units("encode", pipe.encoders), forecasts["encode"].idle_bytes),
        StagePlan("sample", units("sample", pipe.denoisers, strategy, steps), forecasts["sample"].idle_bytes),
        StagePlan(
            "decode", whole if fits else tiled, note="" if whole[0].fits else "in tiles" if not fits else "on the CPU"
        ),
    )
    return RunPlan(pipe.folder.name, str(pipe.manager.device), work, steps, budget_bytes, used, stages)


def _rehearse_run(
    pipe: StagedPipeline, arguments: Mapping[str, Any], prompt: str, negative_prompt: str
) -> dict[str, Forecast]:
    modules = {unit.name: unit.skeleton() for unit in pipe.encoders}

    def encode(device: torch.device) -> Conditioning:
        tensors = pipe._encode(prompt, negative_prompt, {}, device, modules)
        return Conditioning(
            {k: [to_host(t) for t in v] if isinstance(v, list) else to_host(v) for k, v in tensors.items()}
        )

    encoding, cond = rehearse(modules, encode, pipe.stand_ins)
    sampling, latents = _rehearse_sampling(pipe, cond, arguments, True, None)
    forecasts = {"encode": encoding, "sample": sampling}
    for stage, tiled in (("decode", False), ("decode in tiles", True)):
        decoder = {pipe.decoder.name: pipe.decoder.skeleton()}
        run = _decoder_run(pipe, decoder[pipe.decoder.name], latents, tiled)
        forecasts[stage], _ = rehearse(decoder, run, method="decode")
    return forecasts


def _rehearse_sampling(
    pipe: StagedPipeline, cond: Conditioning, arguments: Mapping[str, Any], on_step: bool, noise: torch.Tensor | None
) -> tuple[Forecast, torch.Tensor]:
    modules = {unit.name: unit.skeleton() for unit in pipe.denoisers}

    def sample(device: torch.device) -> torch.Tensor:
        given = {**arguments, "generator": torch.Generator("cpu").manual_seed(0), "latents": noise}
        report = (lambda step, steps, latents: None) if on_step else None
        return to_host(pipe._denoise(cond, given, report, device, modules).float())

    return rehearse(modules, sample, pipe.stand_ins)


def _decoder_run(
    pipe: StagedPipeline, module: torch.nn.Module, latents: torch.Tensor, tiled: bool
) -> Callable[[torch.device], torch.Tensor]:
    arguments = pipe._decode_arguments(latents, {})
    return lambda device: run_decoder(module, latents, device, tiled, arguments)
