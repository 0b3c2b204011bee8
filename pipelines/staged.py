"""StagedPipeline: open -> encode -> sample -> decode, each stage loading what it needs and giving it back."""

from __future__ import annotations

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from ..memory.batch import BatchDims
from ..memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ..memory.host import management as host
from ..memory.host.flags import host_flags
from ..memory.manager import STRATEGIES, MemoryManager, manager
from ..memory.planning.forecast import Forecast
from ..memory.planning.runplan import RunPlan, StagePlan
from ..memory.probe import rates as measured_rates
from ..memory.rates import Rates
from ..memory.sizes import format_bytes, parse_bytes
from ..memory.units.unit import ManagedModel
from .decoding.vae_stages import VaeStages
from .encoding.conditioning import Conditioning, to_host
from .encoding.embedding_cache import EmbeddingCache, cache_key, shared_cache
from .encoding.listening import Listener
from .planning.forecasts import alike, forecast_sampling, sampling_key
from .planning.plans import TYPICAL_PROMPT, Asked, NoBudgetError, plan_run, plan_stage
from .sampling.kernels import AUTO, check_attention, held_uncompiled, kernels
from .sampling.latents import check_finite, check_latents

log = logging.getLogger("ballast")

Result = TypeVar("Result")
OnStep = Callable[[int, int, torch.Tensor], None]
Prompt = str | Sequence[str]
Modules = Mapping[str, nn.Module]  # by name of their unit
_WORDS = re.compile(r"\w")


class Part(Protocol):
    """What a pipeline is made of, that has weights."""

    @property
    def key(self) -> Hashable:
        """Says which model it is, so that all who run it share it."""

    def unit(self, label: str) -> ManagedModel:
        """It as a managed model; nothing is loaded yet."""


class _Owner:
    """Stands for a pipeline and its copies: what they have claimed is theirs while one of them lives."""


class StagedPipeline(VaeStages):
    """A pipeline whose encoders, transformer and decoder take turns on one device.

    Made by `open_pipeline`. `keep=False` gives every byte back when a stage ends; with `keep=True` the transformer
    stays on the device between runs for as long as nothing else needs the room.
    """

    name: str  # of the pipeline's class; `title` is what people call the model
    frame_rate = 24  # of a video, frames a second
    starts_from_latents: ClassVar[bool] = False  # whether `sample` takes `init_latents`
    default_steps: int
    default_guidance: float | None = None  # None for that of the stock pipeline
    titles: ClassVar[Mapping[str, str]] = {}  # what people call the models, by the name of their unit
    knows = ""  # a sentence on the words that it knows, where those are few
    takes_negative = True
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
        self.title = title_of(folder)
        self.manager: MemoryManager = manager(device)
        self.vram_bytes = None if vram is None else parse_bytes(vram)
        self.ram_bytes = None if ram is None else parse_bytes(ram)
        self.keep = keep
        self.cache = cache or shared_cache()
        self.forecasts = self.cache.directory / "forecasts"
        self.encoders: list[ManagedModel] = []
        self.denoisers: list[ManagedModel] = []
        self._listener = Listener()
        self._text_files: Any = None  # the digests of the encoders' files, once asked for
        self._owner = _Owner()

    def within(self, vram: int | str | None = None, ram: int | str | None = None, keep: bool = False) -> StagedPipeline:
        """The same pipeline with other budgets for its runs, as in `open_pipeline`. Both share all that they load."""
        other = copy.copy(self)
        other.vram_bytes = None if vram is None else parse_bytes(vram)
        other.ram_bytes = None if ram is None else parse_bytes(ram)
        other.keep = keep
        return other

    def _claim(self, part: Part, label: str) -> ManagedModel:
        """The managed model of a part, which every pipeline of this device that has the same part shares."""
        return self.manager.claim(part.key, lambda: part.unit(label), self._owner)

    def encode(self, prompt: Prompt, negative_prompt: Prompt = "", **options: Any) -> Conditioning:
        """The conditioning of a prompt pair, on the CPU; from the cache if it was ever made before.

        `options` are further arguments of the pipeline's own `encode_prompt`. No encoder stays on the device.
        """
        self._check_options(options)
        negative_prompt = _for_each(prompt, negative_prompt)
        key = self._encoding_key(prompt, negative_prompt, options)
        if key and (found := self.cache.get(key)):
            return found

        words = {"prompt": prompt, "negative_prompt": negative_prompt, "pipeline": self.name, "model": self.title}
        info = {name: str(value) for name, value in words.items()}
        self._listener.start()

        def run(device: torch.device, modules: Modules) -> Conditioning:
            tensors = self._encode(prompt, negative_prompt, options, device, modules)
            notes = self._encoding_notes(_listed(prompt), _listed(negative_prompt))
            return Conditioning.of(tensors, info | {"notes": "\n".join(notes)})

        prompts = 1 if isinstance(prompt, str) else len(prompt)
        conditioning = self._run_stage("encode", self.encoders, run, work=("encode", prompts))
        for tensors in conditioning.tensors.values():  # before it is kept for good
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                check_finite(tensor, "the text encoders made")
        self._encoding_key(prompt, negative_prompt, options)  # raises where a file was changed meanwhile
        if key:
            self.cache.put(key, conditioning)
        return conditioning

    def _encoding_key(self, prompt: Prompt, negative_prompt: Prompt, options: dict[str, Any]) -> str | None:
        """The key of an embedding in the cache. ValueError if the files are others than they were."""
        facts = self._encoding_facts(prompt, negative_prompt, options)
        if self._text_files not in (None, facts["files"]):
            raise ValueError(f"files in {self.folder} were changed. Open the pipeline again.")
        self._text_files = facts["files"]
        return cache_key(facts | {"notes": 1})  # which are kept with the embedding

    def _encoding_notes(self, prompts: Sequence[str], negatives: Sequence[str]) -> list[str]:
        """What a user should know of how the prompts were read; kept in the conditioning."""
        notes = self._listener.notes(self.title, prompts, negatives, self.knows)
        if not self.takes_negative and any(text.strip() for text in negatives):
            notes.append(f"The negative prompt has no effect: {self.title} takes none.")
        return notes

    def sampling_notes(self, cond: Conditioning, guidance: float | None = None, **options: Any) -> list[str]:
        """What a user should know of a run with these arguments of `sample`, a sentence each."""
        if not self.takes_negative or not _WORDS.search(cond.info.get("negative_prompt", "")):
            return []
        return [why] if (why := self._unguided(guidance, options)) else []

    def _unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        """Why the negative prompt has no effect, in a sentence; nothing where it has one."""
        scale = self.default_guidance if guidance is None else guidance
        return no_effect(scale, guidance is None) if scale is not None and scale <= 1 else ""

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
        strategy = host_flags().strategy(strategy, "transformer")
        arguments = self._checked(cond, width, height, steps, guidance, frames, strategy, options)
        check_attention(attention, [unit.module for unit in self.denoisers] if attention != AUTO else ())

        def run(device: torch.device, modules: Modules) -> torch.Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            given = arguments | {"generator": generator, "latents": noise}
            with kernels(modules.values(), compile, attention, on_compile=self._on_compile):
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
        or as "6GB", by default those of the pipeline; `vram` 0 is all that is free. `rates` are those of the machine by
        default. At full size it takes seconds, once for each size. Raises ValueError for a budget that nobody stated,
        without a GPU, and for a size that the pipeline's own code cannot run.
        """
        if strategy == "cpu":
            raise ValueError("strategy is cpu, which takes no VRAM: there is nothing to plan. Use auto.")
        steps = self.default_steps if steps is None else steps
        arguments = self._checked(cond, width, height, steps, guidance, frames, strategy, options)
        stated = self.vram_bytes if vram is None else parse_bytes(vram)
        if not stated and self.manager.accelerator.is_cpu:
            raise NoBudgetError("vram='8GB'")
        budget_bytes = self._vram_budget() if vram is None else stated or self._free_vram()
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
        if self.vram_bytes is None:
            return self._free_vram()
        return self.vram_bytes if self.manager.accelerator.is_cpu else min(self.vram_bytes, self._free_vram())

    def _free_vram(self) -> int:
        return self.manager.budget_bytes + host.movable_bytes(self.manager.device)

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
                f"the conditioning was made by {cond.info.get('model', made_by)}, not {self.title}. Encode the prompt "
                "with this pipeline."
            )
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}. Use {', '.join(STRATEGIES)}.")
        if steps < 1:
            raise ValueError(f"steps is {steps}; it takes at least 1.")
        if (given := options.get("init_latents")) is not None:
            check_latents(given)
            check_finite(given, "the latents to start from hold")
        return self._sample_arguments(width, height, steps, guidance, frames, options)

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
        strategy = host_flags().strategy(strategy, units[0].role if units else "other")
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
                self.manager.make_room()
                if attempt == "leafwise" or strategy == attempt == "cpu":
                    raise self._out_of_memory(name, units, error) from None
                log.warning("Ballast: out of memory in %s; trying again in less", name)
        raise AssertionError("unreachable")

    def _out_of_memory(self, stage: str, units: list[ManagedModel], error: BaseException) -> DoesNotFitError:
        working = max((self.manager.work.working_bytes(unit) for unit in units), default=0)
        return DoesNotFitError(
            f"{stage} ran out of memory on {self.manager.device} even leafwise: its activations take "
            f"{format_bytes(working)} beside its weights, of a budget of {format_bytes(self.manager.budget_bytes)}. "
            f"Choose a smaller size or fewer frames, or raise the vram budget. ({error})"
        )

    # What a family supplies

    @abstractmethod
    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError for options that `_encode` does not know."""

    @abstractmethod
    def _encoding_facts(self, prompt: Prompt, negative_prompt: Prompt, options: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides the embeddings, as plain data; under "files" the digests of all files among it."""

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
        """The arguments of `_denoise` for a dry run: the same for all runs that work in the same, and quickly done."""
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


def no_effect(scale: float, by_default: bool) -> str:
    """That guidance of this scale leaves the negative prompt out."""
    return (
        f"The negative prompt has no effect: guidance is {scale:g}{' by default' * by_default}. Above 1 it counts, "
        "and each step runs twice."
    )


def _listed(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else list(prompt)


def title_of(path: Path) -> str:
    """What people call a model: the folder or file that it lies in, and not the digest that a download cache has."""
    cached = re.search(r"models--(?:[^/\\]+--)?([^/\\]+)[/\\]snapshots[/\\][0-9a-f]+$", str(path))
    if cached:
        return cached[1]
    path = path if path.name not in ("", "..") else path.resolve()
    return path.stem if path.is_file() else path.name


def _for_each(prompt: Prompt, negative_prompt: Prompt) -> Prompt:
    """The negative prompts: one for each prompt, where one is for all. ValueError for another number of them."""
    if isinstance(prompt, str) and isinstance(negative_prompt, str):
        return negative_prompt
    count = 1 if isinstance(prompt, str) else len(prompt)
    negative = [negative_prompt] if isinstance(negative_prompt, str) else list(negative_prompt)
    if len(negative) not in (1, count):
        raise ValueError(f"there are {count} prompts and {len(negative)} negative ones. Give one, or as many.")
    return negative if len(negative) == count else negative * count
