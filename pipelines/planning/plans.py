"""Plans of a pipeline's run: each stage has a dry run on shapes, then its units are placed on paper."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...memory.planning.fit import sizes_of
from ...memory.planning.forecast import Forecast, UnitForecast
from ...memory.planning.planner import make_plan
from ...memory.planning.runplan import RunPlan, StagePlan
from ...memory.probe import rates as measured_rates
from ...memory.rates import ASSUMED, Rates
from ...memory.sizes import format_bytes
from ...memory.units.unit import ManagedModel
from ..encoding.conditioning import Conditioning
from ..encoding.embedding_cache import cache_key
from . import forecast_cache
from .forecasts import dry_run_sampling, dry_run_stage, names_of, of_steps, quietly, sampling_key

if TYPE_CHECKING:
    from ..staged import StagedPipeline

# As many words as people write. Some families keep as many tokens as there are words.
TYPICAL_PROMPT = (
    "a weathered fishing boat with a faded red hull lies on the wet sand of a wide bay at low tide, ropes and nets "
    "over its side, gulls on the mast, behind it a row of narrow houses climbing a green hill under heavy clouds, one "
    "beam of evening light on the water, fine detail, soft colours, seen from a low angle"
)


class NoBudgetError(ValueError):
    """There is no GPU whose free memory could be the budget, and none was stated."""

    def __init__(self, such_as: str) -> None:
        super().__init__(f"there is no GPU here to plan for. State a budget, such as {such_as}.")


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
    sampling = of_steps(forecasts["sample"], steps)
    stages = [place("sample", sampling, pipe.denoisers, strategy=asked.strategy, steps=steps)]
    if "encode" in forecasts:
        stages.insert(0, place("encode", forecasts["encode"], pipe.encoders))
    stages.append(_plan_decoding(pipe, torch.zeros(sampling.result), budget_bytes, ram_bytes, used))
    device = str(pipe.manager.device)
    name, caveat = pipe.title, pipe.forecast_caveat
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
    by_user: bool = True,
    steps: int = 1,
) -> StagePlan:
    """The plan of one stage, for what it is forecast to work in. `strategy` is the user's, or settled `by_user` not."""
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
            by_user=by_user,
            idle_bytes=forecast.idle_bytes,
            in_ram=named[unit].tier != "disk",
            from_disk=sizes_of(named[unit]).total_bytes > ram_bytes and named[unit].source() is not None,
        )
        for unit, work in forecast.units.items()
    )
    return StagePlan(name, plans, forecast.idle_bytes, steps=steps, rates=rates)


def _plan_decoding(
    pipe: StagedPipeline, latents: torch.Tensor, budget_bytes: int, ram_bytes: int, rates: Rates
) -> StagePlan:
    run = pipe._vae_run("decode", {}, budget_bytes)
    run.takes = run.takes or pipe._vae_takes("decode", {}, budget_bytes)  # for another machine
    if len(latents) > 1 and run.choose(latents, ram_bytes, rates).name != "whole":
        latents = latents[:1]
    way = run.choose(latents, ram_bytes, rates)
    work = run.takes.tiles(latents) if way.name in ("tiles", "cpu") else run.takes.whole(latents)
    assert work is not None
    note = way.words if way.name != "cpu" else "in tiles or on the CPU"
    if way.name == "stripes":
        (name,) = work.units
        peak = (way.peak_bytes or 0) - pipe.decoder.size_bytes
        takes = UnitForecast(0, peak, peak, peak, 1, (way.seconds or 0) * rates.operations_per_second)
        work = Forecast(0, {name: takes})
        note += f", {format_bytes(way.ram_bytes)} of feature maps in RAM"
    plan = plan_stage(
        "decode",
        work,
        [pipe.decoder],
        budget_bytes=budget_bytes,
        ram_bytes=ram_bytes,
        rates=rates,
        strategy="auto" if way.name == "whole" else "resident",
        by_user=False,
    )
    return plan if way.name == "whole" else replace(plan, note=note)


def _forecast_run(pipe: StagedPipeline, asked: Asked) -> dict[str, Forecast]:
    if asked.cond:
        key = sampling_key(pipe, asked.cond, asked.arguments, True, None)
        key = key and f"{key}-run"
    else:
        words = {"prompt": asked.prompt, "negative_prompt": asked.negative_prompt}
        key = cache_key(pipe.facts() | words | {"stage": "run", "arguments": pipe._stands_for(asked.arguments)})
    stages = {"sample": names_of(pipe.denoisers)}
    if not asked.cond:
        stages["encode"] = names_of(pipe.encoders)
    forecasts = forecast_cache.get(pipe.forecasts, key, stages) if key else None
    if forecasts is None:
        try:
            with quietly():
                forecasts = _dry_run(pipe, asked)
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{pipe.title} cannot be planned at {asked.size}: the dry run ends with an error ({why})."
            ) from error
        if key:
            forecast_cache.put(pipe.forecasts, key, forecasts)
    return forecasts


def _dry_run(pipe: StagedPipeline, asked: Asked) -> dict[str, Forecast]:
    forecasts, cond = {}, asked.cond
    if cond is None:
        modules = {unit.name: unit.skeleton() for unit in pipe.encoders}
        forecasts["encode"], cond = dry_run_stage(
            pipe,
            modules,
            lambda device: Conditioning.of(pipe._encode(asked.prompt, asked.negative_prompt, {}, device, modules)),
        )
    forecasts["sample"], _ = dry_run_sampling(pipe, cond, asked.arguments, True, None)
    return forecasts
