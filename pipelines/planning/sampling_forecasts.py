"""Forecast the VRAM that sampling needs: by a dry run of a few steps, or from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...memory.planning.forecast import Forecast, Operations
from ...memory.shared_cards import divided
from ...memory.weights.unit import ManagedModel
from ..encoding.conditioning import Conditioning, to_host
from ..lora.use import branches
from ..sampling.batches import generators
from ..sampling.control import Control
from ..sampling.guidance_range import GuidanceRange
from ..sampling.latents import note_sound, sound_of
from ..sampling.scheduler_choice import SCHEDULER, SchedulerChoice
from ..sampling.step_cache import CACHE, StepCache, block_paths
from ..sampling.step_range import StepRange
from .forecasts import Forecaster, shape_of, shapes_in

Denoise = Callable[..., torch.Tensor]  # of a model, see `Model.denoise`

_BYTES_A_STEP = 64  # at most, in the scheduler's tables on the device
_DRY_STEPS = 4  # after which multistep solvers hold their full history


@dataclass(frozen=True)
class Sampling:
    """A sampling stage to forecast: `denoise` runs `steps` steps of these units, in a dry run with `dry_arguments`.

    `reports` says whether each step is reported; `noise` is given noise, if any. `pictures` of the one prompt are drawn
    at once, each of `cards` computing a share. `dry_steps` are those of the dry run, all of them guided; `guided`
    says which of the `steps` are, None if all or none. A `cache` skips some of them. They are `part` of a run, if any.
    ControlNets run in some of them, as `control` says.
    """

    forecaster: Forecaster
    units: Sequence[ManagedModel]
    denoise: Denoise
    dry_arguments: Mapping[str, Any]
    steps: int
    reports: bool = True
    noise: torch.Tensor | None = None
    pictures: int = 1
    cards: int = 1
    dry_steps: int = 1
    guided: GuidanceRange | None = None
    cache: StepCache | None = None
    part: StepRange | None = None
    control: Control | None = None

    def key(self, cond: Conditioning) -> str | None:
        """Return the digest of everything that decides the activations, or None if something has no digest."""
        tensors = {
            name: [shape_of(tensor) for tensor in (value if isinstance(value, list) else [value])]
            for name, value in cond.tensors.items()
        }
        noise = None if self.noise is None else shape_of(self.noise)
        arguments = shapes_in(self.dry_arguments)
        if isinstance(choice := arguments.get(SCHEDULER), SchedulerChoice):
            arguments[SCHEDULER] = choice.facts()
        if isinstance(cache := arguments.get(CACHE), StepCache):
            arguments[CACHE] = str(cache)
        given = {"arguments": arguments, "cond": tensors, "reports": self.reports, "noise": noise, **self.size}
        if self.guided is not None:
            given["guided"] = [self._guided_steps(self.guided), self.steps]
        calls = self._calls_of_controlnets()
        if self.cache is not None or calls:
            given["steps"] = self.steps
        if calls:
            given["controlled"] = calls
        return self.forecaster.key(stage="sample", **given, **branches(self.units))

    @property
    def size(self) -> dict[str, int]:
        """The facts that the key of a batch, or of a run on several cards, has beside one picture's."""
        several = {"pictures": self.pictures, "cards": self.cards}
        return {name: number for name, number in several.items() if number > 1}

    def forecast(self, cond: Conditioning, key: str | None) -> Forecast | None:
        """Return the forecast from the cache or a dry run, or None if no dry run is possible."""
        forecast = self.forecaster.forecast(key, "sample", self.units, lambda: self.dry_run(cond))
        return forecast and self.with_all_steps(forecast)

    def dry_run(self, cond: Conditioning) -> tuple[Forecast, torch.Tensor]:
        """Return the forecast of a few steps by a dry run, and the latents, which have a shape only."""
        modules = {unit.name: unit.skeleton() for unit in self.units}

        def sample(device: torch.device) -> torch.Tensor:
            drawing = generators(0, 0, self.pictures)
            given = {**self.dry_arguments, "generator": drawing, "latents": self.noise}
            report = (lambda step, steps, latents: None) if self.reports else None
            drawn = self.denoise(cond, given, report, device, modules)
            made = to_host(drawn.float())
            note_sound(made, [to_host(sound) for sound in sound_of(drawn)])
            return made

        forecast, latents = self.forecaster.dry_run(modules, sample)
        sound = next((tuple(each.shape) for each in sound_of(latents)), ())
        return replace(forecast, steps=self.dry_steps, result=tuple(latents.shape), sound=sound), latents

    def with_all_steps(self, forecast: Forecast) -> Forecast:
        """Extend a dry run's forecast to all steps, on one of the cards. Only the scheduler's tables grow with them."""
        more_bytes = _BYTES_A_STEP * max(0, self.steps - forecast.steps)
        units = {name: replace(unit, live_bytes=unit.live_bytes + more_bytes) for name, unit in forecast.units.items()}
        whole = replace(forecast, idle_bytes=forecast.idle_bytes + more_bytes, units=units)
        if self.guided is not None:
            whole = self._with_guidance(whole, self.guided)
        if self.cache is not None:
            whole = self._with_cache(whole, self.cache)
        if calls := self._calls_of_controlnets():
            whole = self._with_control(whole, calls)
        return divided(whole, self.cards)

    def _guided_steps(self, guided: GuidanceRange) -> int:
        return (self.part or StepRange(0, self.steps, self.steps)).guided(guided)

    def _with_guidance(self, forecast: Forecast, part: GuidanceRange) -> Forecast:
        """Count all steps, of which only part is guided: the others make one prediction of two."""
        predictions, units = self.steps + self._guided_steps(part), {}
        for name, unit in forecast.units.items():
            apart = unit.calls == 2 * forecast.steps
            # Without a negative prompt a class that makes two calls makes one in each step.
            halved = apart or part.in_one_batch
            share = predictions / (2 * forecast.steps) if halved else self.steps / forecast.steps
            modules = tuple((path, done * share) for path, done in unit.modules)
            calls = predictions if apart else self.steps
            units[name] = replace(unit, calls=calls, operations=unit.operations * share, modules=modules)
        return replace(forecast, units=units, steps=self.steps)

    def _calls_of_controlnets(self) -> dict[str, tuple[int, int]]:
        """Return the calls of each ControlNet, and of how many, where some are skipped."""
        nets = {unit.name: unit.module for unit in self.units if unit.name.startswith("controlnet")}
        calls = self.control.calls(nets, self.steps) if self.control else {}
        return {name: (called, of) for name, (called, of) in calls.items() if called < of}

    def _with_control(self, forecast: Forecast, calls: Mapping[str, tuple[int, int]]) -> Forecast:
        """Count all steps, of which ControlNets run in part. One that never runs is counted once."""
        whole, units = self.steps / forecast.steps, {}
        for name, unit in forecast.units.items():
            called, of = calls.get(name, (1, 1))
            share = whole * max(1, called) / of
            modules = tuple((path, done * share) for path, done in unit.modules)
            count, turns = max(1, round(unit.calls * share)), max(1, round(unit.turns * share))
            units[name] = replace(unit, calls=count, turns=turns, operations=unit.operations * share, modules=modules)
        return replace(forecast, units=units, steps=self.steps)

    def _with_cache(self, forecast: Forecast, cache: StepCache) -> Forecast:
        """Count all steps, of which a cache skips the blocks in some."""
        computed, steps = cache.count(self.steps, len(forecast.units)), self.steps
        skipped = {unit.name: tuple(f"{path}." for path in block_paths(unit.module)) for unit in self.units}
        units = {}
        for name, unit in forecast.units.items():
            modules = tuple(
                (path, done * ((computed if path.startswith(skipped[name]) else steps) / forecast.steps))
                for path, done in unit.modules
            )
            operations = sum((done for _, done in modules), Operations())
            calls = max(1, round(unit.calls * computed / forecast.steps))
            units[name] = replace(unit, calls=calls, operations=operations, modules=modules)
        return replace(forecast, units=units, steps=steps)


def dry_run_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dry run's arguments: a few steps, guidance on or off. Runs with equal activations share them."""
    brief = dict(arguments)
    for name in ("guidance_scale", "distilled_guidance_scale", "true_cfg_scale", "guider"):
        if isinstance(scale := arguments.get(name), int | float):
            brief[name] = 2.0 if scale > 1 else scale
    if "strength" in brief:
        brief["strength"] = 1.0  # all of the few steps
    if arguments.get("sigmas") is None and arguments.get("timesteps") is None:
        brief["num_inference_steps"] = min(_DRY_STEPS, arguments["num_inference_steps"])
    return brief
