"""Draw latents with the transformer, a picture alone or a batch at once."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ...memory.lockstep.passes_in_turn import Lockstep, passes_of
from ...memory.memory_manager import STRATEGIES
from ...memory.planning.forecast import Forecast
from ..encoding.conditioning import Conditioning, to_host
from ..encoding.pictures import Pictures, stretch_notes
from ..encoding.prompts import TOLD
from ..lora.use import refuse_scales
from ..options import TRUE_CFG, check_numbers, check_values
from ..planning.once_plans import PRECOMPUTE, Split, first_strategy
from ..planning.sampling_forecasts import Sampling
from ..runner import Runner, Stage
from ..sampling.batches import Batch, batch_of
from ..sampling.control import CONTROL
from ..sampling.guidance_range import GUIDANCE_RANGE
from ..sampling.kernels import AUTO, check_attention, kernels
from ..sampling.latents import check_finite, check_latents, decibels, noise_of, note_noise, note_sound, sound_of
from ..sampling.parallel import check_cards, check_group, same_everywhere, shared
from ..sampling.scheduler_choice import SCHEDULER
from ..sampling.step_cache import CACHE, StepCache
from ..sampling.step_range import STEP_RANGE, StepRange, going_on, left_by, mark
from .image_conditioning import encode_images
from .precompute import precompute

if TYPE_CHECKING:
    from ..models.model import Inputs, Model, OnStep, Request
    from ..stock.answers import Answers

log = logging.getLogger("ballast")

_WORDS = re.compile(r"\w")


@dataclass(frozen=True)
class Drawing:
    """Arguments of `sample` that concern no one model: how many pictures, of which noise, and how they are run.

    With `goes_on` the noise is the latents that another run left.
    """

    seed: int = 0
    noise: torch.Tensor | None = None
    batch: int = 1
    cards: int = 1
    strategy: str = "auto"
    compile: bool = False
    attention: str = AUTO
    once: bool = False
    lockstep: bool = False
    goes_on: bool = False


@dataclass(frozen=True)
class Job:
    """A run that is checked: the arguments of `denoise`, save noise, and the pictures to draw.

    `encodes_images` says that modules see pictures before it samples.
    """

    inputs: Inputs
    arguments: Mapping[str, Any]
    batch: Batch
    drawing: Drawing = field(default_factory=Drawing)
    encodes_images: bool = False

    @property
    def model(self) -> Model:
        """The model that draws: the one that takes the run's pictures."""
        return self.inputs.model

    def given(self, begin: int, at_once: int) -> dict[str, Any]:
        """Return the arguments for `at_once` pictures, with generators that have drawn nothing yet."""
        return self.batch.arguments(self.arguments, begin, at_once)


def prepare(
    model: Model,
    runner: Runner,
    cond: Conditioning | None,
    prompts: int,
    pictures: Pictures,
    request: Request,
    drawing: Drawing,
) -> Job:
    """Check the arguments of a run once, for a plan or to sample it. `prompts` is how many are encoded.

    Raises TypeError or ValueError, in one line, for what the model cannot draw.
    """
    inputs = model.inputs_of(pictures)
    drawn_by = inputs.model
    if cond is not None and (made_by := cond.info.get("pipeline", drawn_by.name)) != drawn_by.name:
        raise ValueError(
            f"the conditioning was made by {cond.info.get('model', made_by)}, not {drawn_by.title}. Encode the prompt "
            "with this pipeline."
        )
    if drawing.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {drawing.strategy!r}. Use {', '.join(STRATEGIES)}.")
    options = dict(request.options)
    refuse_scales(runner.loras, options)
    whole = {"width": request.width, "height": request.height, "steps": request.steps, "frames": request.frames}
    check_numbers(whole, {"guidance": request.guidance, TRUE_CFG: options.get(TRUE_CFG)})
    if request.steps < 1:
        raise ValueError(f"steps is {request.steps}; it takes at least 1.")
    check_values(options)
    if (given := options.get("init_latents")) is not None:
        check_latents(given)
        check_finite(given, "the latents to start from hold")
    arguments = drawn_by.sample_arguments(inputs, request)
    if drawing.cards > 1 and GUIDANCE_RANGE in arguments:
        raise ValueError("guidance_range is for one card. Leave it out, or leave cards at 1.")
    if CACHE in arguments:
        _check_cached(drawing)
    if STEP_RANGE in arguments and (drawing.cards > 1 or CACHE in arguments):
        other = "cards" if drawing.cards > 1 else "cache"
        raise ValueError(f"start_step and end_step do not go together with {other}. Leave one of them out.")
    batch = batch_of(drawing.batch, drawing.seed, drawing.noise, prompts, arguments, inputs.own)
    drawn_by.check_count(max(prompts, batch.count))
    return Job(inputs, arguments, batch, drawing, bool(pictures) or drawn_by.looks)


def _check_cached(drawing: Drawing) -> None:
    """Raise ValueError, in one line, for ways to draw that a step cache does not go together with."""
    ways = {"several cards": drawing.cards > 1, "compile": drawing.compile, "once": drawing.once}
    if against := ", ".join(name for name, is_on in (ways | {"lockstep": drawing.lockstep}).items() if is_on):
        raise ValueError(f"cache does not go together with {against}. Leave one of them out.")


def notes_of(model: Model, cond: Conditioning, guidance: float | None, options: Mapping[str, Any]) -> list[str]:
    """Return what a user should know of a run with these arguments of `sample`, a sentence each."""
    notes = []
    if names := ", ".join(model.left_out):
        notes = [f"{model.title} runs without {names}: what these make beside pictures, such as sound, is left out."]
    if not model.takes_negative:
        return notes + model.scale_notes(guidance, None)
    true_cfg = options.get(TRUE_CFG)
    scale = true_cfg if model.distilled else guidance
    if _WORDS.search(cond.info.get("negative_prompt", "")):
        why = model.unguided(guidance, options)
        notes += [why] * bool(why)
    elif scale and scale > 1 and not (model.replays or any(n.startswith("negative_") for n in cond.tensors)):
        of_distilled = "true_cfg has no effect without a negative prompt. Encode one; it may be empty."
        of_others = "Guidance has no effect without a negative prompt. Encode one; it may be empty."
        notes.append(of_distilled if model.distilled else of_others)
        return notes + model.scale_notes(guidance, 1)
    return notes + model.scale_notes(guidance, true_cfg)


def stretched(inputs: Inputs, pictures: Pictures, width: int | None, height: int | None) -> list[str]:
    """Say which pictures of a run are stretched, a sentence each."""
    wide, high = inputs.model.picture_size(inputs, width, height)
    return stretch_notes(pictures, wide, high) if wide and high else []


def tell_notes(cond: Conditioning, pictures: Pictures, job: Job, request: Request) -> None:
    """Log what a user should know of a run; what was told in this process is not told again."""
    for note in notes_of(job.model, cond, request.guidance, request.options):
        if note not in TOLD:
            log.warning("Ballast: %s", note)
            TOLD.add(note)
    for note in stretched(job.inputs, pictures, request.width, request.height):
        log.warning("Ballast: %s", note)


def most_at_once(model: Model, texts: Model, own: Collection[str], count: int) -> int:
    """Return how many of `count` pictures may be drawn at once: all, or one where it is not proved to be the same."""
    if count > 1 and (differs := model.batch_differs(texts, own)):
        log.info("Ballast: %s draws the pictures of a batch one after the other: %s", model.title, differs)
        return 1
    return count


def check_run_on_cards(model: Model, cards: int, **options: Any) -> None:
    """Raise ValueError, in one line, for what cannot be drawn on so many cards. `options` are as in `sample`."""
    check_cards(cards, {unit.name: unit.module for unit in model.denoisers} if cards > 1 else {}, **options)


def sample(texts: Model, runner: Runner, cond: Conditioning, job: Job, on_step: OnStep | None) -> torch.Tensor:
    """Return the latents of a job, float32 on the CPU. The prompt was encoded by `texts`."""
    model, drawing, cards = job.model, job.drawing, job.drawing.cards
    if STEP_RANGE in job.arguments or drawing.goes_on:
        part = going_on(job.arguments.get(STEP_RANGE), drawing.noise if drawing.goes_on else None)
        job = replace(job, arguments={**job.arguments, STEP_RANGE: part})
    check_attention(drawing.attention, [u.module for u in model.denoisers] if drawing.attention != AUTO else ())
    check_run_on_cards(model, cards, compile=drawing.compile, attention=drawing.attention)
    if cards > 1:
        check_group(cards)
        cond = same_everywhere(cond)
    run = _Drawing(runner, cond, job, None if on_step is None else functools.partial(_called, runner, on_step))
    # On the CPU nothing is copied that several could share, and one after the other they take less RAM.
    # Nor would all processes find out at once that fewer have to do.
    alone = drawing.strategy == "cpu" or runner.manager.accelerator.is_cpu or cards > 1
    at_once = 1 if alone else most_at_once(model, texts, job.inputs.own, job.batch.count)
    drawn: list[torch.Tensor] = []
    while (begin := sum(map(len, drawn))) < job.batch.count:
        try:
            run.draw(begin, at_once, drawn)
        except Exception as error:
            release_frames(error)
            if cards > 1 and is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
                raise DoesNotFitError(
                    f"memory ran out on one of {cards} cards, and the others cannot begin anew with it. State a "
                    f"smaller vram budget, which leaves it more, or choose a smaller size. ({error})"
                ) from None
            if at_once == 1 or not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
                raise
            at_once = -(-at_once // 2)
            log.info("Ballast: the batch is drawn %d at a time (%s)", at_once, error)
    with torch.inference_mode(False):
        latents = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        note_sound(latents, [sound for each in drawn for sound in sound_of(each)])
        note_noise(latents, [state for each in drawn for state in noise_of(each)])
        if STEP_RANGE in job.arguments and (left := left_by(drawn[0])):
            mark(latents, left)
    check_finite(latents, "the transformer made")
    for sound in sound_of(latents):
        check_finite(sound, "of the sound the transformer made")
    return latents


def measured(texts: Model, runner: Runner, cond: Conditioning, job: Job, on_step: OnStep | None) -> torch.Tensor:
    """Return the latents of a job with a step cache, and tell the reports how far it is from one without.

    That is run first. The steps of both are reported. Raises ValueError, in one line, for a job without a cache.
    """
    if CACHE not in job.arguments:
        raise ValueError(
            "measure compares a run with one without a cache, and it has none. Give cache, or leave measure out."
        )
    plain = replace(job, arguments={name: value for name, value in job.arguments.items() if name != CACHE})
    expected = sample(texts, runner, cond, plain, _counted(on_step, 0, 2))
    latents = sample(texts, runner, cond, job, _counted(on_step, 1, 2))
    stages = runner.manager.timeline.stages
    if record := next((stage for stage in reversed(stages) if any(u.counted for u in stage.units.values())), None):
        record.cache_decibels = decibels(latents, expected)
    return latents


def sampling_of(
    model: Model, arguments: Mapping[str, Any], *, reports: bool = True, cards: int = 1, answers: Answers | None = None
) -> Sampling:
    """Return the stage of a run with these arguments of `denoise`, to forecast."""
    asked = dict(arguments)
    drawing, noise = asked.pop("generator"), asked.pop("latents")
    part: StepRange | None = asked.get(STEP_RANGE)
    dry = model.dry_run_arguments(asked)
    return Sampling(
        model.forecaster,
        model.denoisers,
        functools.partial(model.denoise, answers=answers),
        dry,
        model.passes(asked),
        reports,
        None if part is not None and part.start else noise,  # latents of the loop are not noise
        len(drawing) if isinstance(drawing, list) else 1,
        cards,
        model.passes(dry) if SCHEDULER in dry else dry["num_inference_steps"],
        asked.get(GUIDANCE_RANGE),
        asked.get(CACHE),
        part,
        asked.get(CONTROL),
    )


def keeping(job: Job) -> AbstractContextManager[None]:
    """Keep on the device the weights that run in steps that a cache skips too, until the block ends."""
    cache: StepCache | None = job.arguments.get(CACHE)
    return nullcontext() if cache is None else cache.keeping(job.model.denoisers)


@dataclass(frozen=True)
class _Drawing:
    """A job that is being drawn."""

    runner: Runner
    cond: Conditioning
    job: Job
    on_step: OnStep | None

    def draw(self, begin: int, at_once: int, drawn: list[torch.Tensor]) -> None:
        """Draw the pictures from `begin` on in one stage, `at_once` at a time; each part is added to `drawn` when done.

        Raises DoesNotFitError, or that memory ran out, where fewer at once might fit: only for one there is a ladder.
        """
        job, model, drawing = self.job, self.job.model, self.job.drawing
        begins, done = range(begin, job.batch.count, at_once), len(drawn)
        seen = [self._images_encoded(at, at_once) for at in begins]
        part: StepRange | None = job.arguments.get(STEP_RANGE)

        def draw(device: torch.device, modules: Mapping[str, nn.Module]) -> None:
            with self._using(modules.values()):
                for at, answers in list(zip(begins, seen, strict=True))[len(drawn) - done :]:
                    given = job.given(at, at_once)
                    report = _counted(self.on_step, len(drawn), done + len(begins))
                    # No name for the latents: it would keep them on the device while the next part is drawn.
                    drawn.append(_on_host(model.denoise(self.cond, given, report, device, modules, answers), part))

        with self.runner.adapters(model.denoisers), keeping(job):
            for unit in model.denoisers:
                unit.calls = replace(unit.calls, blocks=drawing.compile)
            stage = sampling_of(
                model,
                job.given(begin, at_once),
                reports=self.on_step is not None,
                cards=drawing.cards,
                answers=seen[0],
            )
            key = stage.key(self.cond)
            forecast = functools.partial(stage.forecast, self.cond, key)
            steps, only = stage.steps * len(begins), at_once == 1
            expect = functools.partial(self.runner.expected, strategy=drawing.strategy, parts=not only)
            again, keep = only and drawing.cards == 1, self.runner.settings.keep

            def loops(device: torch.device, modules: Mapping[str, nn.Module]) -> None:
                for at, answers in zip(begins, seen, strict=True):
                    model.denoise(self.cond, job.given(at, at_once), None, device, modules, answers)

            with ExitStack() as exits:
                if (drawing.once or drawing.lockstep) and (found := self._split(forecast(), steps)):
                    with found.calling(model.denoisers, computes_once=True):
                        some, strategy = found.units(model.denoisers), first_strategy(drawing.strategy)
                        expected = expect(PRECOMPUTE, some, lambda: found.first, strategy=strategy) if some else {}
                        first = Stage(PRECOMPUTE, some, _call_each, strategy, (PRECOMPUTE, key), **expected)
                    if tables := precompute(self.runner, found, model, loops, first):
                        forecast = functools.partial(getattr, found, "other")
                        exits.enter_context(found.calling(model.denoisers, computes_once=False))
                        for unit, known in tables.items():
                            if unit in some:
                                exits.enter_context(known.answering(unit.module))
                            if found.passes > 1:
                                device = self.runner.manager.execution_device(drawing.strategy)
                                exits.enter_context(Lockstep(device, passes_of(known.calls)).sharing(unit.module))
                expected = expect("sample", model.denoisers, forecast, steps=steps)
                whole = Stage(
                    "sample", model.denoisers, draw, drawing.strategy, key, **expected, keep=keep, again=again
                )
                self.runner.run(whole)

    def _split(self, forecast: Forecast | None, steps: int) -> Split | None:
        """Return the parts in which the stage takes less time. Compiled blocks and several cards run it whole."""
        drawing, model = self.job.drawing, self.job.model
        if forecast is None or drawing.compile or drawing.cards > 1:
            return None
        ways = {"once": drawing.once, "lockstep": drawing.lockstep}
        return self.runner.split(forecast, model.denoisers, drawing.strategy, steps, **ways)

    def _images_encoded(self, begin: int, at_once: int) -> Answers | None:
        """Return what modules answer for the pictures of one part, if the run has any."""
        if not self.job.encodes_images:
            return None
        model, then = self.job.model, self.runner.settings.then
        runner = self.runner.set(then=None if then is None else [*model.denoisers, *then])
        return encode_images(model, runner, self.cond, self.job.given(begin, at_once))

    @contextmanager
    def _using(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """Run these modules with the chosen kernels, each of several cards on its share."""
        drawing = self.job.drawing
        chosen = kernels(modules, compile=drawing.compile, attention=drawing.attention, on_compile=self._on_compile)
        with chosen, shared(modules, drawing.cards):
            yield

    def _on_compile(self, compiles: bool) -> None:
        for unit in (unit for unit in self.job.model.denoisers if unit.leases):
            self.runner.manager.timeline.tell("compile" if compiles else "compiled", unit)


def _on_host(latents: torch.Tensor, part: StepRange | None) -> torch.Tensor:
    """Return latents on the CPU in float32, with a mark if steps are left."""
    made = to_host(latents.float())
    note_sound(made, [to_host(sound) for sound in sound_of(latents)])
    note_noise(made, noise_of(latents))
    if part is not None and part.ends_early:
        mark(made, replace(part, loop=latents.dtype))
    return made


def _call_each(device: torch.device, modules: Mapping[str, nn.Module]) -> None:
    """Call each module of a stage that computes what it does in place of its calls."""
    for module in modules.values():
        module()


def _called(runner: Runner, on_step: OnStep, step: int, steps: int, latents: torch.Tensor) -> None:
    with runner.manager.calling():
        on_step(step, steps, latents)


def _counted(on_step: OnStep | None, done: int, parts: int) -> OnStep | None:
    """Wrap `on_step` to report the steps of one part as steps of all `parts`, of which `done` are done."""
    if on_step is None or parts == 1:
        return on_step

    def report(step: int, steps: int, latents: torch.Tensor) -> None:
        on_step(done * steps + step, parts * steps, latents)

    return report
