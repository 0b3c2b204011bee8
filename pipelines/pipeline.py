"""Pipeline: encode, sample, decode, plan. It has a model, and a runner that runs its stages."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..collector import paused_collector
from ..memory.host.flags import host_flags
from ..memory.memory_manager import MemoryManager
from ..memory.planning.runplan import RunPlan
from ..memory.rates import Rates
from ..memory.sizes import parse_bytes
from ..memory.weights.unit import ManagedModel
from .decoding.decode import to_images
from .encoding.conditioning import Conditioning
from .encoding.embedding_cache import EmbeddingCache
from .encoding.pictures import Given, as_pictures, pictures_of
from .encoding.prompt_weights import PROMPT_WEIGHTS
from .encoding.prompts import TOLD, Negative, Prompt, as_list, check_text
from .files.keys import key_text
from .lora.use import Given as Loras
from .lora.use import named, notes_of, open_loras
from .models.model import Model, OnStep, Request
from .options import TRUE_CFG, check_values, plain_defaults, plain_number, steps_of
from .planning.plans import TYPICAL_PROMPT, NoBudgetError, PlanSound, Run, plan_batch, plan_run
from .runner import Runner, Settings
from .sampling.batches import prompts_of
from .sampling.kernels import AUTO
from .sampling.latents import check_decodable, check_finite, check_noise, check_seed, sound_of
from .sampling.step_range import STEP_RANGE, StepRange
from .stages import sample as sampling
from .stages.batch_runs import BatchRuns, Item, Latents, Made
from .stages.encode import check_text_options, encode_text, encoding_of, text_of
from .stages.image_conditioning import plan_image_encoding
from .stages.vae_stages import decode_pictures, decode_sound, pixels_of, vae_run
from .stock.sound import DECODING_SOUND, Sound

StageName = Literal["encode", "sample", "decode"]


class Pipeline:
    """A pipeline whose encoders, transformer and decoder take turns on one device.

    Made by `open_pipeline`. `keep=False` gives every byte back when a stage ends; with `keep=True` the transformer
    stays on the device between runs for as long as nothing else needs the room.
    """

    def __init__(self, model: Model, runner: Runner) -> None:
        self.model, self.runner = model, runner

    # What it is

    @property
    def name(self) -> str:
        """The name of the pipeline's class."""
        return self.model.name

    @property
    def title(self) -> str:
        """The name that people call the model."""
        return self.model.title

    @property
    def titles(self) -> Mapping[str, str]:
        """The names that people call its parts, by the name of their unit."""
        return self.model.titles

    @property
    def folder(self) -> Path:
        """The folder, or the file, that it was opened from."""
        return self.model.folder

    @property
    def is_video(self) -> bool:
        """Return whether it makes videos."""
        return self.model.is_video

    @property
    def frame_rate(self) -> int:
        """The frames a second of its videos."""
        return self.model.frame_rate

    @property
    def default_steps(self) -> int:
        """The steps of a run where none are given."""
        return self.model.default_steps

    @property
    def edits(self) -> bool:
        """Return whether pictures belong to the prompt."""
        return self.model.edits

    @property
    def starts_from_latents(self) -> bool:
        """Return whether `sample` takes `init_latents`."""
        return self.model.starts_from_latents

    @property
    def takes_negative(self) -> bool:
        """Return whether it takes a negative prompt."""
        return self.model.takes_negative

    @property
    def distilled(self) -> bool:
        """Return whether `guidance` is a scale that the model was distilled with."""
        return self.model.distilled

    @property
    def latent_dimensions(self) -> int:
        """The dimensions of its latents: 5 with frames, else 4."""
        return self.model.latent_dimensions

    @property
    def encoders(self) -> list[ManagedModel]:
        """The units that encode prompts."""
        return self.model.encoders

    @property
    def denoisers(self) -> list[ManagedModel]:
        """The units that sample."""
        return self.model.denoisers

    @property
    def decoder(self) -> ManagedModel:
        """The VAE."""
        return self.model.decoder

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The VAE's config."""
        return self.model.decoder_config

    @property
    def manager(self) -> MemoryManager:
        """The manager of its device. Raises RuntimeError in a forked process, before a stage begins to wait there."""
        return self.runner.manager

    @property
    def cache(self) -> EmbeddingCache:
        """The cache of embeddings."""
        return self.model.claims.cache

    @property
    def vram_bytes(self) -> int | None:
        """The stated budget of VRAM, None for what is free."""
        return self.runner.settings.vram_bytes

    @property
    def ram_bytes(self) -> int | None:
        """The stated budget of RAM, None for what is free."""
        return self.runner.settings.ram_bytes

    @property
    def keep(self) -> bool:
        """Return whether the transformer stays on the device between runs."""
        return self.runner.settings.keep

    def digest(self) -> str:
        """Tells what this pipeline makes from what any other does: by its files, LoRAs, forms and libraries."""
        adapters = named(self.runner.loras, [*self.encoders, *self.denoisers])
        facts = [self.model.facts(), self.model.files(), self.model.claims.weights, adapters]
        return hashlib.sha256(key_text(facts).encode()).hexdigest()

    # How it runs

    def within(self, vram: int | str | None = None, ram: int | str | None = None, keep: bool = False) -> Pipeline:
        """Return the same pipeline with other budgets, as in `open_pipeline`. Both share all that they load."""
        stated = Settings.of(vram, ram, keep)
        return self.with_settings(vram_bytes=stated.vram_bytes, ram_bytes=stated.ram_bytes, keep=keep)

    def with_settings(self, **settings: Any) -> Pipeline:
        """Return the same pipeline with other values of `Settings`."""
        return Pipeline(self.model, self.runner.set(**settings))

    def followed_by(self, *stages: StageName) -> Pipeline:
        """Return the same pipeline for a stage that `stages` follow. Their models are read ahead, if RAM has room.

        ValueError for a stage that there is not.
        """
        return self.with_settings(then=[unit for stage in stages for unit in self.units_of(stage)])

    def units_of(self, stage: StageName) -> list[ManagedModel]:
        """Return the units that a stage will run, to read them ahead. Raises ValueError for an unknown stage."""
        sound = self.model.sound
        decoders = [self.decoder, *(sound.units if sound else ())]
        runs = {"encode": self.encoders, "sample": self.denoisers, "decode": decoders}
        if stage not in runs:
            raise ValueError(f"unknown stage {stage!r}. Use {', '.join(runs)}.")
        if stage == "sample":
            self.model.forecaster.learn_calls(stage, self.denoisers)  # or what is read would be laid out anew
        return runs[stage]

    @plain_defaults()
    def set_loras(self, loras: Loras | None) -> None:
        """Run with these LoRAs from now on, and with no others: (file, strength) each, in this order.

        The strength is a number for all models that the file is for, or a number for each that it is to be used for, by
        its name, such as `transformer_2` or `text_encoder`. Prompts are encoded anew where an encoder has others. They
        run as branches beside the weights, which stay as they are, and another strength moves nothing. A file that is
        in use already is not read again. Of two transformers, a file with "low noise" in its name is for the second.
        A third item names parts that a model may lack, as "k_img, v_img": what the file has for these is left out
        then. Raises FileNotFoundError, or ValueError in one line for a file that cannot be
        run exactly; the LoRAs are then those of before.
        """
        # Names without a transformer's are those of the first.
        units = sorted(self.denoisers, key=lambda unit: unit.role != "transformer")
        known, model = self.model.pipeline_class, self.model
        opened = open_loras(loras, [*units, *self.encoders], known, self.runner.loras, model.converters())
        self.runner = replace(self.runner, loras=opened)

    def notes_of_loras(self) -> list[list[str]]:
        """Return notes on each LoRA in use: which of two transformers it is for, and parts that were left out."""
        return [notes_of(lora, self.denoisers) for lora in self.runner.loras]

    # Encode

    def encodes_with(self, name: str) -> bool:
        """Return whether an option of this name is one of `encode`, and not of `sample`."""
        return name == PROMPT_WEIGHTS or name in self.model.encode_options()

    @plain_defaults()
    def encode(
        self, prompt: Prompt, negative_prompt: Negative = None, images: Given = None, **options: Any
    ) -> Conditioning:
        """Return the conditioning of a prompt pair, on the CPU; from the cache if it was ever made before.

        Without a negative prompt it is that of the stock pipeline, which tells none from an empty one in some families.
        `images` [B,H,W,3] in 0..1, or a list of them, are those that an edit model works from; they stay with the
        conditioning. `options` are further arguments of the pipeline's own `encode_prompt`. No encoder stays on the
        device.

        Where all encoders are CLIP, T5 or BERT, brackets are weights as in ComfyUI: `(word)` is 1.1, `(word:1.3)` is
        1.3, `\\(` is a bracket. With `prompt_weights=False`, and for other encoders, they are plain text.
        """
        options = {name: plain_number(value) for name, value in options.items()}
        check_text(prompt, negative_prompt)
        prompt = prompt if isinstance(prompt, str) else list(prompt)  # stock tells them from tuples
        check_values(options)
        check_text_options(self.model, self.runner, options)
        pictures = as_pictures(images, "images")
        text = text_of(self.model, prompt, negative_prompt, self.model.pictures_read(pictures) | options)
        return replace(encode_text(self.model, self.runner, text), pictures=pictures)

    # Sample

    def sampling_notes(self, cond: Conditioning, guidance: float | None = None, **options: Any) -> list[str]:
        """Return what a user should know of a run with these arguments of `sample`, a sentence each."""
        notes = sampling.notes_of(self.model, cond, guidance, options)
        TOLD.update(notes)
        return notes

    def picture_notes(
        self,
        cond: Conditioning,
        width: int | None = None,
        height: int | None = None,
        **pictures: Any,
    ) -> list[str]:
        """Say which pictures of a run with these arguments of `sample` are stretched, a sentence each."""
        names = ("image", "mask", "last_image", "control", "strength", "video")
        given = pictures_of(cond.pictures, *(pictures.get(name) for name in names))
        return sampling.stretched(self.model.inputs_of(given), given, width, height) if given else []

    def check_count(self, count: int) -> None:
        """Raise ValueError, in one line, for more results of one run than this pipeline tells apart."""
        self.model.check_count(count)

    def check_cards(self, cards: int, **options: Any) -> None:
        """Raise ValueError, in one line, for what cannot be drawn on so many cards. `options` are as in `sample`."""
        sampling.check_run_on_cards(self.model, cards, **options)

    @plain_defaults()
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
        control: Given = None,
        batch: int = 1,
        cards: int = 1,
        video: Given = None,
        true_cfg: float | None = None,
        once: bool = False,
        lockstep: bool = False,
        latents: torch.Tensor | None = None,
        measure: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Latents, float32 on the CPU, as the decoder takes them: [B,C,h,w], or [B,C,f,h,w] where it wants frames.

        Sizes are in pixels. Sizes, steps and guidance are by default those that the pipeline is made for. `guidance` is
        the scale that a guidance-distilled model (Flux-dev, HunyuanVideo) is told, of any other that of classifier-free
        guidance. `true_cfg` above 1 adds that to a distilled model: each step then runs twice.
        `seed` gives the noise that the stock pipeline draws from `torch.Generator("cpu").manual_seed(seed)`; `noise`
        gives it outright, in the layout of the pipeline's `latents`. `strategy` is auto, resident, streamed, leafwise
        (streamed in the least VRAM) or cpu.

        `batch` pictures of one prompt are drawn at once, so that they share the copies of weights: as many as fit the
        budget, else half of them, and so on. Picture i has `seed` + i, and is the one that this seed makes alone, up to
        rounding. Where that cannot be proved of a pipeline's class they are drawn one after the other. Several pictures
        or latents to start from, or pictures to follow, make a batch of as many.

        With `cards` each of so many processes draws its share of every picture, on a card of its own: they are those of
        torch.distributed's group, and all of them call this alike. All get the latents, of the conditioning that the
        first was given. Classes that are not proved to make the same are refused. Memory that runs out is an error.

        `on_step(step, steps, latents)` is called after each step, steps counted from 1, with the latents in the
        pipeline's own layout: as they are or, where the scheduler is flow matching, as they are expected to become.
        What it raises ends the run. It may run pipelines itself; one that another thread runs on this device while it
        waits for that thread is refused after a minute. `compile` compiles the transformer's blocks, `attention` is one
        of diffusers' attention backends (see `kernels`). `options` are further arguments of the pipeline's own call.

        With `once` the parts of the transformer that see no latents, such as modulation, are computed once for all
        steps before the first, where that takes less time: then their weights need not come again. With `lockstep` the
        passes of guidance share each copy of streamed weights. The bits are the same with either.

        Models of diffusers also take `scheduler`, `shift` and `sigmas`. `scheduler` is a sampler by ComfyUI's name
        ("euler", "dpmpp_2m", "unipc", ...), a class of diffusers by its name, or an object of one. `shift` takes the
        place of the model's own. `sigmas` are noise levels before the shift, or a schedule by ComfyUI's name ("simple",
        "beta", ...). Without them the levels are those of the model. The stock code runs with the scheduler as it is.

        `guidance_range=(start, end)` guides part of the steps, in fractions of them: step i of n, counted from 0, is
        guided if start <= i / n < end. The others run one pass. Calls of a sampler count as steps, two a step of heun.
        Classes that are not proved to skip a pass exactly refuse it. `guider` guides by "cfg", "cfg_zero_star", "apg",
        "tcfg" or an object of diffusers.guiders, where the model has a guider.

        `start_step` and `end_step` draw part of the `steps`, counted from 0. A run that ends early returns the latents
        of its loop, in the layout of that and not denoised yet, and one that starts later goes on from these
        `latents`. No noise is added. So two runs, with other models, LoRAs or guidance, may share the steps: with the
        same settings they are one run, to the bit. `scheduler` is euler or heun then, by name or as the model's own.

        `cache` skips the blocks of the transformer in some steps, and adds what they added before. It is lossy, and off
        by default. "static:2" computes every second step after a fifth of them. "easycache:0.05", "firstblock:0.05",
        "magcache:0.06" and "seacache:0.25" skip where the change stays below a threshold; each number may be left out.
        Skipped steps move no weights. Classes whose blocks hand on more than their results refuse it. With `measure`
        the run is made without the cache first, and reports tell the PSNR of the latents against that, in dB.

        `image` [B,H,W,3] in 0..1 is a picture to start from, or the first frame of a video and `last_image` its last;
        where `mask` [B,H,W] is 1 it is painted anew, and up to 1 `strength` says how much of it is replaced. `control`
        [B,H,W,3] is one of edges, depth or the like, for models and ControlNets that follow it. With a ControlNet
        `control_strength` says how much it counts, and `control_range=(start, end)` in which part of the steps, in
        fractions of them, as in diffusers. It is not called in the others, and leaves the device after its last. With
        several each of the three is a list. `video` [F,H,W,3] in 0..1 are the frames of a video to start from; then
        `mask` and `control` may have as many. The class of diffusers that does this is driven on the same components;
        it takes pictures in 8 bits.
        """
        width, height, steps, guidance, frames = map(plain_number, (width, height, steps, guidance, frames))
        seed, batch, cards, strength = map(plain_number, (seed, batch, cards, strength))
        options = {name: plain_number(value) for name, value in options.items()}
        check_seed(seed)
        if on_step is not None and not callable(on_step):
            raise ValueError(f"on_step is {str(on_step)[:80]!r}; it takes a function of step, steps and latents.")
        if noise is not None and latents is not None:
            raise ValueError("noise and latents are given; a run that goes on from latents has no noise. Give one.")
        for given, what in ((noise, "the noise holds"), (latents, "the latents to go on from hold")):
            if given is not None:
                check_noise(given)
                check_finite(given, what)
        options |= {} if true_cfg is None else {TRUE_CFG: true_cfg}
        request = self._request(width, height, steps, guidance, frames, options)
        strategy = host_flags().strategy(strategy, "transformer")
        pictures = pictures_of(cond.pictures, image, mask, last_image, control, strength, video)
        start, goes_on = noise if latents is None else latents, latents is not None
        drawing = sampling.Drawing(seed, start, batch, cards, strategy, compile, attention, once, lockstep, goes_on)
        prompts = prompts_of(cond, self.model.cond_dims)
        job = sampling.prepare(self.model, self.runner, cond, prompts, pictures, request, drawing)
        sampling.tell_notes(cond, pictures, job, request)
        if measure:
            return sampling.measured(self.model, self.runner, cond, job, on_step)
        return sampling.sample(self.model, self.runner, cond, job, on_step)

    def _request(
        self,
        width: int | None,
        height: int | None,
        steps: int | None,
        guidance: float | None,
        frames: int | None,
        options: dict[str, Any],
    ) -> Request:
        steps = steps_of(steps, self.model.default_steps, options)
        return Request(width, height, steps, guidance, frames, options)

    # Decode

    @plain_defaults()
    def decode(self, latents: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Pictures from latents, decoded in float32: [B,H,W,3], for a video [B,F,H,W,3], float32 in 0..1 on the CPU.

        `arguments` are further ones of the VAE's own `decode`.
        """
        self.check_latents(latents)
        model = self.model
        model.decode_arguments(latents, arguments, "whole", 0)  # unknown ones are refused before anything is loaded
        pixels = decode_pictures(model, self.runner, latents, arguments)
        check_finite(pixels, "the decoder made")
        return model.finish(to_images(model.colours(pixels), video=model.is_video))

    @plain_defaults()
    def decode_sound(self, latents: torch.Tensor) -> Sound | None:
        """Return the sound that was drawn with these latents of videos: [B,C,T] float32 on the CPU, and its rate in Hz.

        None for a pipeline that draws none, and for latents that carry none: `sample` and `load_latents` note it on
        the tensor itself, and a copy of that has no note.
        """
        self.check_latents(latents)
        model, noted = self.model, sound_of(latents)
        if model.sound is None or not noted:
            return None
        sound = decode_sound(model, self.runner, model.sound, noted)
        check_finite(sound.waveform, "the decoder of sound made")
        return sound

    def decode_all(self, latents: torch.Tensor) -> dict[str, Any]:
        """Return all results by name: "images" as of `decode`, and "sound" as of `decode_sound` where there is any."""
        images, sound = self.decode(latents), self.decode_sound(latents)
        return {"images": images} | ({} if sound is None else {"sound": sound})

    @property
    def makes_sound(self) -> bool:
        """Return whether its videos have sound."""
        return self.model.sound is not None

    def check_latents(self, latents: Any) -> None:
        """Raise TypeError or ValueError, in one line, for what this pipeline cannot decode."""
        check_decodable(self.model, latents)

    @plain_defaults()
    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        """Latents of pictures [B,H,W,3] in 0..1, to start a run from: [B,C,h,w], or [B,C,1,h,w] where there are frames.

        As `decode` takes them, float32 on the CPU. Not every family has a use for them.
        """
        pixels = pixels_of(self.model, image)
        return vae_run(self.model, self.runner, "encode", {}, self.runner.vram_budget())(pixels)

    # Many prompts

    def run(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        negative_prompt: Negative = None,
        **settings: Any,
    ) -> Iterator[torch.Tensor]:
        """Yield the pictures of each prompt, as `decode` gives them: all encoded, then all sampled, then all decoded.

        So each model comes to the device once for all of them. `seeds` are by default 0; `settings` are arguments of
        `sample`. What is wrong with a prompt is raised when it would be encoded or sampled.
        """
        seeds = [0] * len(prompts) if seeds is None else seeds
        if isinstance(prompts, str) or len(seeds) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(seeds)} seeds. Give a list, and as many seeds."
            )
        items = [
            Item(prompt, negative_prompt, sampling=functools.partial(dict, settings, seed=seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with closing(self.run_items(items)) as running:
            for made in running:
                if made.error is not None:
                    raise made.error
                if made.images is not None:
                    yield made.images

    def run_items(
        self, items: Sequence[Item], latents: Latents | None = None, known: Mapping[int, Conditioning] | None = None
    ) -> Generator[Made, None, None]:
        """Run items stage by stage, in chunks whose embeddings RAM holds, and tell what becomes of each.

        One that fails stops no other. `latents` hold what is sampled until its pictures are taken; what is there
        already is not sampled again, and that they take no more ends the run. `known` are conditionings of some items.
        """
        return BatchRuns(self).run(items, latents, known)

    @plain_defaults()
    def encode_items(self, items: Sequence[Item]) -> list[Conditioning | Exception]:
        """Encode items, with an exception for one that fails. Each encoder is loaded once for as many as RAM holds."""
        return BatchRuns(self).encode(items)

    # Plan

    @plain_defaults()
    @paused_collector()
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
        control: Given = None,
        batch: int = 1,
        cards: int = 1,
        video: Given = None,
        true_cfg: float | None = None,
        once: bool = False,
        lockstep: bool = False,
        **options: Any,
    ) -> RunPlan:
        """Plan a run without loading anything: placements and why, peaks in bytes, seconds.

        Sizes, `steps`, `guidance`, `true_cfg`, `frames`, `strategy`, pictures, `batch`, `cards`, `once`, `lockstep` and
        `options` as in `sample`; of several cards it is the plan of each, without what they tell each other. `cond` is
        what will be sampled from, or the prompts that will be encoded, by default one of usual length, `images` with
        them; then `options` may be those of `encode`, too.
        `vram` and `ram` are budgets in bytes or as "6GB", by default those of the pipeline; `vram` 0 is all that is
        free. It also names the batch that is best for the budget.
        With `strategy` "cpu" it is the plan of a run in RAM, and tells what is read from disk in each step.
        `rates` are those of the machine by default. At full size it takes seconds, once for each size. Raises
        ValueError for a budget that nobody stated, without a GPU, and for a size that the pipeline's own code cannot
        run.
        """
        width, height, steps, guidance, frames = map(plain_number, (width, height, steps, guidance, frames))
        batch, cards, strength = map(plain_number, (batch, cards, strength))
        options = {name: plain_number(value) for name, value in options.items()}
        model, runner = self.model, self.runner
        references = as_pictures(images, "images") if cond is None else cond.pictures
        texts = {name: options.pop(name) for name in list(options) if cond is None and self.encodes_with(name)}
        if texts:
            check_text_options(model, runner, texts)
        read = model.pictures_read(references) | texts if cond is None else {}
        if true_cfg is not None:
            options[TRUE_CFG] = true_cfg
            negative_prompt = "" if negative_prompt is None and true_cfg else negative_prompt  # or it does not guide
        encoding = encoding_of(model, text_of(model, prompt, negative_prompt, read))
        pictures = pictures_of(references, image, mask, last_image, control, strength, video)
        request = self._request(width, height, steps, guidance, frames, options)
        prompts = prompts_of(cond, model.cond_dims) if cond else len(as_list(prompt))
        drawing = sampling.Drawing(batch=batch, cards=cards, strategy=strategy, once=once, lockstep=lockstep)
        job = sampling.prepare(model, runner, cond, prompts, pictures, request, drawing)
        stated = self.vram_bytes if vram is None else parse_bytes(vram)
        if not stated and self.manager.accelerator.is_cpu and strategy != "cpu":
            raise NoBudgetError("vram='8GB'")
        budget_bytes = runner.vram_budget() if vram is None else stated or runner.free_vram()
        ram_bytes = runner.ram_budget(ram)
        size = f"{width or 'default'} x {height or 'default'}" if width or height else "default size"
        size += f" x {frames} frames" if frames else ""
        size += f", {job.batch.count} pictures" if job.batch.count > 1 else ""
        size += f", on {cards} cards" if cards > 1 else ""
        part: StepRange | None = job.arguments.get(STEP_RANGE)
        size += f", steps {part.start} to {part.end} of {part.steps}" if part is not None else ""
        guided = cond is None or job.model.replays or any(name.startswith("negative_") for name in cond.tensors)
        size += ", each step twice" if guided and (true_cfg or 0) > 1 else ""

        def planned(count: int, at_once: int) -> RunPlan:
            given = job.given(0, at_once)
            see = functools.partial(plan_image_encoding, job.model, runner, budget_bytes, arguments=given)
            run = Run(
                self.title,
                size,
                _caveat(model.forecast_caveat, cards),
                self.manager.device,
                strategy,
                cond,
                encoding,
                sampling.sampling_of(job.model, given, cards=cards),
                vae_run(job.model, runner, "decode", {}, budget_bytes, planned=True),
                see if job.encodes_images else None,
                count,
                0 if ram is None else ram_bytes,
                ram is not None or self.ram_bytes is not None,
                once,
                lockstep,
                _plan_sound(job.model),
            )
            return plan_run(run, budget_bytes, ram_bytes, rates, self.manager.ram_state(ram_bytes))

        def together() -> bool:
            return prompts == cards == 1 and sampling.most_at_once(job.model, model, job.inputs.own, 2) > 1

        with runner.adapters([*self.encoders, *job.model.denoisers]), sampling.keeping(job):
            return plan_batch(planned, job.batch.count, together)


def _plan_sound(model: Model) -> PlanSound | None:
    """Return the stage that decodes the sound of a model, to plan; None for one that draws none."""
    if (sound := model.sound) is None:
        return None
    return PlanSound(DECODING_SOUND, sound.units, functools.partial(sound.forecast, model.forecaster))


def _caveat(own: str, cards: int) -> str:
    """Add a sentence if a stage runs on several cards."""
    share = f"Each card computes 1/{cards} of sampling, is brought all weights, and needs at most this VRAM."
    return f"{own} {share}".strip() if cards > 1 else own
