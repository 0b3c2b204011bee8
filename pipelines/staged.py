"""StagedPipeline: open -> encode -> sample -> decode, each stage loading what it needs and giving it back."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from ..memory.batch import BatchDims
from ..memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ..memory.forecast import Forecast
from ..memory.manager import STRATEGIES, MemoryManager, manager
from ..memory.probe import rates as measured_rates
from ..memory.rates import Rates
from ..memory.rehearse import StandIns
from ..memory.runplan import RunPlan, StagePlan
from ..memory.sizes import format_bytes, parse_bytes
from ..memory.unit import ManagedModel
from .conditioning import Conditioning, to_host
from .decode import check_finite, decode_latents, encode_pixels, to_images
from .embedding_cache import EmbeddingCache, cache_key, shared_cache
from .kernels import AUTO, check_attention, held_uncompiled, kernels
from .planning import (
    TYPICAL_PROMPT,
    Asked,
    alike,
    forecast_decoding,
    forecast_sampling,
    plan_run,
    plan_stage,
    sampling_key,
)

log = logging.getLogger("ballast")

Result = TypeVar("Result")
OnStep = Callable[[int, int, torch.Tensor], None]
Prompt = str | Sequence[str]
Modules = Mapping[str, nn.Module]  # by name of their unit


class StagedPipeline(ABC):
    """A pipeline whose encoders, transformer and decoder take turns on one device.

    Made by `open_pipeline`. `keep=False` gives every byte back when a stage ends; with `keep=True` the transformer
    stays on the device between runs for as long as nothing else needs the room.
    """

    name: str
    is_video = False
    frame_rate = 24  # of a video, frames a second
    latent_dimensions = 4
    decodes_to_host: ClassVar[bool] = False  # whether what is decoded leaves the device part by part
    starts_from_latents: ClassVar[bool] = False  # whether `sample` takes `init_latents`
    default_steps: int
    default_guidance: float | None = None  # None for that of the stock pipeline
    decoder_config: dict[str, Any]
    stand_ins: ClassVar[StandIns] = {}  # for code that looks at values that a rehearsal has none of
    forecast_caveat: ClassVar[str] = ""  # a sentence for plans, where those make the forecast a bound
    batch_dims: ClassVar[BatchDims] = {}  # arguments of the transformer whose batch is not their first dimension

    def __init__(
        self,
        folder: Path,
        device: str | torch.device,
        vram: int | str | None,
        ram: int | str | None,
        keep: bool,
        cache: EmbeddingCache | None,
    ) -> None:
        self.folder = folder
        self.manager: MemoryManager = manager(device)
        self.vram_bytes = None if vram is None else parse_bytes(vram)
        self.ram_bytes = None if ram is None else parse_bytes(ram)
        self.keep = keep
        self.cache = cache or shared_cache()
        self.forecasts = self.cache.directory / "forecasts"
        self.encoders: list[ManagedModel] = []
        self.denoisers: list[ManagedModel] = []
        self.decoder: ManagedModel

    def encode(self, prompt: Prompt, negative_prompt: Prompt = "", **options: Any) -> Conditioning:
        """The conditioning of a prompt pair, on the CPU; from the cache if it was ever made before.

        `options` are further arguments of the pipeline's own `encode_prompt`. No encoder stays on the device.
        """
        self._check_options(options)
        negative_prompt = _for_each(prompt, negative_prompt)
        key = cache_key(self._encoding_facts(prompt, negative_prompt, options))
        if key and (found := self.cache.get(key)):
            return found

        words = {"prompt": prompt, "negative_prompt": negative_prompt, "pipeline": self.name}
        info = {name: str(value) for name, value in words.items()}

        def run(device: torch.device, modules: Modules) -> Conditioning:
            return Conditioning.of(self._encode(prompt, negative_prompt, options, device, modules), info)

        prompts = 1 if isinstance(prompt, str) else len(prompt)
        conditioning = self._run_stage("encode", self.encoders, run, work=("encode", prompts))
        for tensors in conditioning.tensors.values():  # before it is kept for good
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                check_finite(tensor, "the text encoders made")
        if key:
            self.cache.put(key, conditioning)
        return conditioning

    def sample(
        self,
        cond: Conditioning,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int = 0,
        frames: int | None = None,
        strategy: str = "auto",
        on_step: OnStep | None = None,
        noise: torch.Tensor | None = None,
        compile: bool = False,
        attention: str = AUTO,
        **options: Any,
    ) -> torch.Tensor:
        """Latents, float32 on the CPU, as the decoder takes them: [B,C,h,w], or [B,C,f,h,w] where it wants frames.

        Sizes are in pixels. Sizes, steps and guidance are by default those that the pipeline is made for. `guidance` is
        the scale of classifier-free guidance (`true_cfg_scale` where the pipeline has one, else `guidance_scale`).
        `seed` gives the noise that the stock pipeline draws from `torch.Generator("cpu").manual_seed(seed)`; `noise`
        gives it outright, in the layout of the pipeline's `latents`. `strategy` is auto, resident, streamed, leafwise
        or cpu.

        `on_step(step, steps, latents)` is called after each step, steps counted from 1, with the latents in the
        pipeline's own layout: as they are or, where the scheduler is flow matching, as they are expected to become.
        What it raises ends the run. `compile` compiles the transformer's blocks, `attention` is one of diffusers'
        attention backends (see `kernels`). `options` are further arguments of the pipeline's own call.
        """
        steps = self.default_steps if steps is None else steps
        arguments = self._checked(cond, width, height, steps, guidance, frames, strategy, options)
        check_attention(attention, [unit.module for unit in self.denoisers] if attention != AUTO else ())

        def run(device: torch.device, modules: Modules) -> torch.Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            given = arguments | {"generator": generator, "latents": noise}
            with kernels(modules.values(), compile, attention):
                latents = self._denoise(cond, given, on_step, device, modules)
            return to_host(latents.float())

        for unit in self.denoisers if compile else ():
            if unit.placement is not None and held_uncompiled(unit.module):
                self.manager.evict(unit)

        key = sampling_key(self, cond, arguments, on_step is not None, noise)
        expected: dict[str, Any] = {"work": key}
        if strategy != "cpu" and not self.manager.accelerator.is_cpu:
            forecast = forecast_sampling(self, key, cond, arguments, on_step is not None, noise)
            expected |= {"forecast": forecast, "planned": forecast and self._planned(forecast, strategy, arguments)}
        latents = self._run_stage("sample", self.denoisers, run, strategy, **expected, keep=self.keep)
        check_finite(latents, "the transformer made")
        return latents

    def plan(
        self,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        frames: int | None = None,
        *,
        cond: Conditioning | None = None,
        prompt: Prompt = TYPICAL_PROMPT,
        negative_prompt: Prompt = "",
        vram: int | str | None = None,
        ram: int | str | None = None,
        strategy: str = "auto",
        rates: Rates | None = None,
        **options: Any,
    ) -> RunPlan:
        """What a run would take, and why: placements, peaks in bytes, seconds. Nothing is loaded.

        Sizes, `steps`, `guidance`, `frames`, `strategy` and `options` as in `sample`; `cond` is what will be sampled
        from, or the prompts that will be encoded, by default one of usual length. `vram` and `ram` are budgets in bytes
        or as "6GB", by default those of the pipeline. `rates` are those of the machine by default. At full size it
        takes seconds, once for each size. Raises ValueError for a budget that nobody stated, without a GPU, and for a
        size that the pipeline's own code cannot run.
        """
        if strategy == "cpu":
            raise ValueError("strategy is cpu, which takes no VRAM: there is nothing to plan. Use auto.")
        steps = self.default_steps if steps is None else steps
        arguments = self._checked(cond, width, height, steps, guidance, frames, strategy, options)
        if vram is None and self.vram_bytes is None and self.manager.accelerator.is_cpu:
            raise ValueError("there is no GPU here to plan for. State a budget, such as vram='8GB'.")
        budget_bytes = self._vram_budget() if vram is None else parse_bytes(vram)
        ram_bytes = self._ram_budget(ram)
        size = f"{width or 'default'} x {height or 'default'}" if width or height else "default size"
        size += f" x {frames} frames" if frames else ""
        asked = Asked(arguments, strategy, cond, prompt, _for_each(prompt, negative_prompt), size)
        return plan_run(self, asked, budget_bytes, ram_bytes, rates)

    def _planned(self, forecast: Forecast, strategy: str, arguments: Mapping[str, Any]) -> StagePlan | None:
        """The plan of a sampling stage that is about to run here; None if others may stay beside it."""
        if any(unit.resident_bytes for unit in self.manager.units() if unit not in self.denoisers):
            return None
        return plan_stage(
            "sample",
            forecast,
            self.denoisers,
            budget_bytes=self._vram_budget(),
            ram_bytes=self._ram_budget(None),
            rates=measured_rates(self.manager.device),
            strategy=strategy,
            steps=arguments["num_inference_steps"],
        )

    def _vram_budget(self) -> int:
        """What a run here may take: the stated budget, for which others make room, or what is free now."""
        manager = self.manager
        if self.vram_bytes is None:
            return manager.budget_bytes
        if manager.accelerator.is_cpu:  # a plan for another machine
            return self.vram_bytes
        return min(self.vram_bytes, max(0, manager.accelerator.total_bytes() - manager.budget.reserve_bytes))

    def _ram_budget(self, ram: int | str | None) -> int:
        limit = self.ram_bytes if ram is None else parse_bytes(ram)
        return self.manager.ram_budget_bytes if limit is None else limit

    def _checked(
        self,
        cond: Conditioning | None,
        width: int | None,
        height: int | None,
        steps: int,
        guidance: float | None,
        frames: int | None,
        strategy: str,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        if cond is not None and (made_by := cond.info.get("pipeline", self.name)) != self.name:
            raise ValueError(
                f"the conditioning was made by {made_by}, not {self.name}. Encode the prompt with this pipeline."
            )
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}. Use {', '.join(STRATEGIES)}.")
        if steps < 1:
            raise ValueError(f"steps is {steps}; it takes at least 1.")
        return self._sample_arguments(width, height, steps, guidance, frames, options)

    def decode(self, latents: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Pictures from latents, decoded in float32: [B,H,W,3], for a video [B,F,H,W,3], float32 in 0..1 on the CPU.

        `arguments` are further ones of the VAE's own `decode`.
        """
        takes = self.decoder_config.get("latent_channels") or self.decoder_config.get("z_dim")
        if latents.ndim != self.latent_dimensions or takes not in (None, latents.shape[1]):
            has = latents.shape[1] if latents.ndim > 1 else 0
            raise ValueError(
                f"the latents have {has} channels in {latents.ndim} dimensions; the VAE of {self.name} takes {takes} "
                f"in {self.latent_dimensions}. Sample and decode with the same pipeline."
            )
        arguments = self._decode_arguments(latents, arguments)
        stage = {"alone": not self.keep, "vram": self.vram_bytes, "ram": self.ram_bytes}
        # Only a stated budget needs it: without one, tiles come when memory runs out.
        stated = self.vram_bytes is not None and not self.manager.accelerator.is_cpu
        forecast = forecast_decoding(self, latents, arguments) if stated else None
        pixels = decode_latents(self.manager, self.decoder, latents, stage, arguments, forecast)
        return to_images(pixels, video=self.is_video)

    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        """Latents of pictures [B,H,W,3] in 0..1, to start a run from: [B,C,h,w], or [B,C,1,h,w] where there are frames.

        As `decode` takes them, float32 on the CPU. Not every family has a use for them.
        """
        if image.ndim != 4 or image.shape[3] != 3:
            raise ValueError(f"the picture is {list(image.shape)}; it takes [pictures, height, width, 3].")
        pixels = image.permute(0, 3, 1, 2) * 2 - 1
        if self.latent_dimensions == 5:
            pixels = pixels.unsqueeze(2)
        stage = {"alone": not self.keep, "vram": self.vram_bytes, "ram": self.ram_bytes}
        return encode_pixels(self.manager, self.decoder, pixels, stage)

    def _run_stage(
        self,
        name: str,
        units: list[ManagedModel],
        run: Callable[[torch.device, Modules], Result],
        strategy: str = "auto",
        *,
        work: Hashable = None,
        forecast: Forecast | None = None,
        planned: StagePlan | None = None,
        keep: bool = False,
    ) -> Result:
        """Run a stage; if the device runs out of memory, again with everything else gone: streamed, then leafwise."""
        stage: dict[str, Any] = {
            "work": work,
            "forecast": forecast,
            "planned": planned,
            "alone": not self.keep,
            "keep": keep,
            "vram": self.vram_bytes,
            "ram": self.ram_bytes,
        }
        ladder = ("auto", "resident", "streamed", "leafwise")
        less = ladder[max(2, ladder.index(strategy) + 1) :] if strategy in ladder else ()
        for attempt in (strategy, *less):
            device = torch.device("cpu") if attempt == "cpu" else self.manager.device
            try:
                with self.manager.stage(name, units, attempt, **stage):
                    return run(device, {unit.name: unit.module for unit in units})
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release_frames(error)
                self.manager.free()
                if attempt == "leafwise" or strategy == attempt == "cpu":
                    raise self._out_of_memory(name, units, error) from None
                log.warning("Ballast: out of memory in %s; trying again in less", name)
        raise AssertionError("unreachable")

    def _out_of_memory(self, stage: str, units: list[ManagedModel], error: BaseException) -> DoesNotFitError:
        working = max((unit.working_bytes for unit in units), default=0)
        return DoesNotFitError(
            f"{stage} ran out of memory on {self.manager.device} even leafwise: it works in {format_bytes(working)} "
            f"beside its weights, of a budget of {format_bytes(self.manager.budget_bytes)}. Choose a smaller size or "
            f"fewer frames, or raise the vram budget. ({error})"
        )

    # What a family supplies

    @abstractmethod
    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError for options that `_encode` does not know."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything that decides what the stages work in, beside the arguments, as plain data."""

    @abstractmethod
    def _encoding_facts(self, prompt: Prompt, negative_prompt: Prompt, options: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides the embeddings, as plain data."""

    @abstractmethod
    def _encode(
        self, prompt: Prompt, negative_prompt: Prompt, options: dict[str, Any], device: torch.device, modules: Modules
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Named embeddings, on any device, made by these encoders."""

    @abstractmethod
    def _sample_arguments(
        self,
        width: int | None,
        height: int | None,
        steps: int,
        guidance: float | None,
        frames: int | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Checked arguments of `_denoise`, before anything is loaded."""

    def _stands_for(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `_denoise` to rehearse: the same for all runs that work in the same, and quickly done."""
        return alike(arguments)

    @abstractmethod
    def _denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Modules,
    ) -> torch.Tensor:
        """Latents as the decoder takes them, on any device, made by these transformers."""

    def _decode_arguments(self, latents: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the decoder's `decode`."""
        return arguments

    def _decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """As much of the latents as shows, in a rehearsal, what decoding all of them takes."""
        return latents


def _for_each(prompt: Prompt, negative_prompt: Prompt) -> Prompt:
    """The negative prompts: one for each prompt, where one is for all. ValueError for another number of them."""
    if isinstance(prompt, str) and isinstance(negative_prompt, str):
        return negative_prompt
    count = 1 if isinstance(prompt, str) else len(prompt)
    negative = [negative_prompt] if isinstance(negative_prompt, str) else list(negative_prompt)
    if len(negative) not in (1, count):
        raise ValueError(f"there are {count} prompts and {len(negative)} negative ones. Give one, or as many.")
    return negative if len(negative) == count else negative * count
