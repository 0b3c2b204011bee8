"""StagedPipeline: encode, sample, decode, plan. Each stage loads what it needs and gives it back."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...memory.host.flags import host_flags
from ...memory.manager import STRATEGIES
from ...memory.planning.runplan import RunPlan
from ...memory.rates import Rates
from ...memory.sizes import parse_bytes
from ..encoding.conditioning import Conditioning, to_host
from ..planning.plans import TYPICAL_PROMPT, NoBudgetError, Run, plan_run
from ..planning.sampling_forecasts import Sampling
from ..sampling.kernels import AUTO, check_attention, kernels
from ..sampling.latents import check_finite, check_latents, check_noise, check_seed
from ..sampling.loras import Given as Loras
from ..sampling.loras import open_loras, refuse_scales
from .family import Modules, OnStep
from .pictures import Given, as_pictures, pictures_of
from .prompts import Negative, Prompt
from .text import TextStage
from .vae import VaeStages

_WORDS = re.compile(r"\w")


class StagedPipeline(TextStage, VaeStages):
    """A pipeline whose encoders, transformer and decoder take turns on one device.

    Made by `open_pipeline`. `keep=False` gives every byte back when a stage ends; with `keep=True` the transformer
    stays on the device between runs for as long as nothing else needs the room.
    """

    def set_loras(self, loras: Loras) -> None:
        """Run with these LoRAs from now on, and with no others: (file, strength) each, in this order.

        The strength is a number for all models that the file is for, or a number for each that it is to be used for, by
        its name, such as `transformer_2` or `text_encoder`. Prompts are encoded anew where an encoder has others. They
        run as branches beside the weights, which stay as they are, and another strength moves nothing. A file that is
        in use already is not read again. Raises FileNotFoundError, or ValueError in one line for a file that cannot be
        run exactly; the LoRAs are then those of before.
        """
        known = getattr(self, "pipeline_class", None)
        # Names without a transformer's are those of the first.
        units = sorted(self.denoisers, key=lambda unit: unit.role != "transformer")
        units += [unit for unit in self.encoders if unit.name in getattr(known, "_lora_loadable_modules", ())]
        self._loras = open_loras(loras, units, known, self._loras, self._converters())

    def sampling_notes(self, cond: Conditioning, guidance: float | None = None, **options: Any) -> list[str]:
        """What a user should know of a run with these arguments of `sample`, a sentence each."""
        notes = []
        if names := ", ".join(self.left_out):
            notes = [f"{self.title} runs without {names}: what these make beside pictures, such as sound, is left out."]
        if not self.takes_negative:
            return notes
        if _WORDS.search(cond.info.get("negative_prompt", "")):
            why = self._unguided(guidance, options)
            notes += [why] * bool(why)
        elif guidance and guidance > 1 and not any(name.startswith("negative_") for name in cond.tensors):
            notes.append("Guidance has no effect without a negative prompt. Encode one; it may be empty.")
        return notes

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
        image: Given = None,
        mask: Given = None,
        strength: float | None = None,
        last_image: Given = None,
        **options: Any,
    ) -> torch.Tensor:
        """Latents, float32 on the CPU, as the decoder takes them: [B,C,h,w], or [B,C,f,h,w] where it wants frames.

        Sizes are in pixels. Sizes, steps and guidance are by default those that the pipeline is made for. `guidance` is
        the scale of classifier-free guidance (`true_cfg_scale` where the pipeline has one, else `guidance_scale`).
        `seed` gives the noise that the stock pipeline draws from `torch.Generator("cpu").manual_seed(seed)`; `noise`
        gives it outright, in the layout of the pipeline's `latents`. `strategy` is auto, resident, streamed, leafwise
        (streamed in the least VRAM) or cpu.

        `on_step(step, steps, latents)` is called after each step, steps counted from 1, with the latents in the
        pipeline's own layout: as they are or, where the scheduler is flow matching, as they are expected to become.
        What it raises ends the run. `compile` compiles the transformer's blocks, `attention` is one of diffusers'
        attention backends (see `kernels`). `options` are further arguments of the pipeline's own call.

        `image` [B,H,W,3] in 0..1 is a picture to start from, or the first frame of a video and `last_image` its last;
        where `mask` [B,H,W] is 1 it is painted anew, and up to 1 `strength` says how much of it is replaced. The class
        of diffusers that does this is driven on the same components; it takes pictures in 8 bits.
        """
        check_seed(seed)
        if noise is not None:
            check_noise(noise)
            check_finite(noise, "the noise holds")
        steps = self.default_steps if steps is None else steps
        strategy = host_flags().strategy(strategy, "transformer")
        pictures = pictures_of(cond.pictures, image, mask, last_image, strength)
        pipe = self.with_pictures(pictures) if pictures else self
        arguments = pipe._checked(cond, width, height, steps, guidance, frames, strategy, options)
        check_attention(attention, [unit.module for unit in pipe.denoisers] if attention != AUTO else ())

        def run(device: torch.device, modules: Modules) -> torch.Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            given = arguments | {"generator": generator, "latents": noise}
            with kernels(modules.values(), compile, attention, on_compile=pipe._on_compile):
                latents = pipe._denoise(cond, given, on_step, device, modules)
            return to_host(latents.float())

        if pictures:
            pipe._see(cond, arguments | {"generator": torch.Generator("cpu").manual_seed(seed), "latents": noise})
        for unit in pipe.denoisers:
            unit.calls = replace(unit.calls, blocks=compile)
        with self._wearing(pipe.denoisers):
            stage = pipe._sampling(arguments, reports=on_step is not None, noise=noise)
            key = stage.key(cond)
            forecast = functools.partial(stage.forecast, cond, key)
            expected = pipe._expected("sample", pipe.denoisers, forecast, strategy, stage.steps)
            latents = pipe._run_stage("sample", pipe.denoisers, run, strategy, work=key, **expected, keep=self.keep)
        check_finite(latents, "the transformer made")
        return latents

    def _on_compile(self, compiles: bool) -> None:
        for unit in (unit for unit in self.denoisers if unit.leases):
            self.manager.timeline.tell("compile" if compiles else "compiled", unit)

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
        negative_prompt: Negative = None,
        vram: int | str | None = None,
        ram: int | str | None = None,
        strategy: str = "auto",
        rates: Rates | None = None,
        images: Given = None,
        image: Given = None,
        mask: Given = None,
        strength: float | None = None,
        last_image: Given = None,
        **options: Any,
    ) -> RunPlan:
        """What a run would take, and why: placements, peaks in bytes, seconds. Nothing is loaded.

        Sizes, `steps`, `guidance`, `frames`, `strategy`, pictures and `options` as in `sample`; `cond` is what will be
        sampled from, or the prompts that will be encoded, by default one of usual length, `images` with them. `vram`
        and `ram` are budgets in bytes or as "6GB", by default those of the pipeline; `vram` 0 is all that is free.
        `rates` are those of the machine by default. At full size it takes seconds, once for each size. Raises
        ValueError for a budget that nobody stated, without a GPU, and for a size that the pipeline's own code cannot
        run.
        """
        if strategy == "cpu":
            raise ValueError("strategy is cpu, which takes no VRAM: there is nothing to plan. Use auto.")
        steps = self.default_steps if steps is None else steps
        references = as_pictures(images, "images") if cond is None else cond.pictures
        read = self._pictures_read(references) if cond is None else {}
        encoding = self._encoding(prompt, self._negative(prompt, negative_prompt), read)
        pictures = pictures_of(references, image, mask, last_image, strength)
        pipe = self.with_pictures(pictures) if pictures else self
        arguments = pipe._checked(cond, width, height, steps, guidance, frames, strategy, options)
        stated = self.vram_bytes if vram is None else parse_bytes(vram)
        if not stated and self.manager.accelerator.is_cpu:
            raise NoBudgetError("vram='8GB'")
        budget_bytes = self._vram_budget() if vram is None else stated or self._free_vram()
        ram_bytes = self._ram_budget(ram)
        size = f"{width or 'default'} x {height or 'default'}" if width or height else "default size"
        size += f" x {frames} frames" if frames else ""
        run = Run(
            self.title,
            size,
            self.forecast_caveat,
            self.manager.device,
            strategy,
            cond,
            encoding,
            pipe._sampling(arguments),
            pipe._vae_run("decode", {}, budget_bytes, planned=True),
            functools.partial(pipe._foresee, arguments=arguments, room_bytes=budget_bytes) if pictures else None,
        )
        with self._wearing([*self.encoders, *pipe.denoisers]):
            return plan_run(run, budget_bytes, ram_bytes, rates)

    def _sampling(
        self, arguments: Mapping[str, Any], *, reports: bool = True, noise: torch.Tensor | None = None
    ) -> Sampling:
        brief, steps = self._dry_run_arguments(arguments), self._passes(arguments)
        return Sampling(self._forecaster, self.denoisers, self._denoise, brief, steps, reports, noise)

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
                f"the conditioning was made by {cond.info.get('model', made_by)}, not {self.title}. Encode the prompt "
                "with this pipeline."
            )
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}. Use {', '.join(STRATEGIES)}.")
        refuse_scales(self._loras, options)
        if steps < 1:
            raise ValueError(f"steps is {steps}; it takes at least 1.")
        if (given := options.get("init_latents")) is not None:
            check_latents(given)
            check_finite(given, "the latents to start from hold")
        return self._sample_arguments(width, height, steps, guidance, frames, options)
