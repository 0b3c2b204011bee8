"""SampleStage: drawing latents with the transformer, a picture alone or a batch at once."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ...memory.host.flags import host_flags
from ...memory.manager import STRATEGIES
from ..encoding.conditioning import Conditioning, to_host
from ..lora.use import refuse_scales
from ..options import TRUE_CFG, check_numbers, check_values, plain_defaults, plain_number, steps_of
from ..planning.sampling_forecasts import Sampling
from ..sampling.batches import Batch, batch_of, prompts_of
from ..sampling.kernels import AUTO, check_attention, kernels
from ..sampling.latents import check_finite, check_latents, check_noise, check_seed
from ..sampling.parallel import check_cards, check_group, same_everywhere, shared
from .family import Modules, OnStep
from .pictures import Given, Pictures, pictures_of, stretch_notes
from .prompts import TOLD
from .runner import StageRunner

log = logging.getLogger("ballast")

_WORDS = re.compile(r"\w")


@dataclass(frozen=True)
class _Run:
    """The arguments of `_denoise` for a run, save noise, which depends on the pictures to be seen first."""

    cond: Conditioning
    arguments: Mapping[str, Any]
    batch: Batch
    strategy: str
    sees: bool
    using: Callable[..., AbstractContextManager[None]]  # kernels and shares, for these modules
    compile: bool
    on_step: OnStep | None
    cards: int

    def given(self, begin: int, at_once: int) -> dict[str, Any]:
        """Return the arguments for `at_once` pictures, with generators that have drawn nothing yet."""
        return self.batch.arguments(self.arguments, begin, at_once)


class SampleStage(StageRunner):
    """The stage of a pipeline that its transformers run."""

    def sampling_notes(self, cond: Conditioning, guidance: float | None = None, **options: Any) -> list[str]:
        """Return what a user should know of a run with these arguments of `sample`, a sentence each."""
        notes = self._notes(cond, guidance, options)
        TOLD.update(notes)
        return notes

    def _notes(self, cond: Conditioning, guidance: float | None, options: Mapping[str, Any]) -> list[str]:
        notes = []
        if names := ", ".join(self.left_out):
            notes = [f"{self.title} runs without {names}: what these make beside pictures, such as sound, is left out."]
        if not self.takes_negative:
            return notes + self._scale_notes(guidance, None)
        true_cfg = options.get(TRUE_CFG)
        scale = true_cfg if self.distilled else guidance
        if _WORDS.search(cond.info.get("negative_prompt", "")):
            why = self._unguided(guidance, options)
            notes += [why] * bool(why)
        elif scale and scale > 1 and not (self.replays or any(n.startswith("negative_") for n in cond.tensors)):
            of_distilled = "true_cfg has no effect without a negative prompt. Encode one; it may be empty."
            of_others = "Guidance has no effect without a negative prompt. Encode one; it may be empty."
            notes.append(of_distilled if self.distilled else of_others)
            return notes + self._scale_notes(guidance, 1)
        return notes + self._scale_notes(guidance, true_cfg)

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
        return self.with_pictures(given)._stretched(given, width, height) if given else []

    def _stretched(self, pictures: Pictures, width: int | None, height: int | None) -> list[str]:
        wide, high = self._picture_size(width, height)
        return stretch_notes(pictures, wide, high) if wide and high else []

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

        `image` [B,H,W,3] in 0..1 is a picture to start from, or the first frame of a video and `last_image` its last;
        where `mask` [B,H,W] is 1 it is painted anew, and up to 1 `strength` says how much of it is replaced. `control`
        [B,H,W,3] is one of edges, depth or the like, for models and ControlNets that follow it. `video` [F,H,W,3] in
        0..1 are the frames of a video to start from; then `mask` and `control` may have as many. The class of diffusers
        that does this is driven on the same components; it takes pictures in 8 bits.
        """
        width, height, steps, guidance, frames = map(plain_number, (width, height, steps, guidance, frames))
        seed, batch, cards, strength = map(plain_number, (seed, batch, cards, strength))
        options = {name: plain_number(value) for name, value in options.items()}
        check_seed(seed)
        if on_step is not None and not callable(on_step):
            raise ValueError(f"on_step is {str(on_step)[:80]!r}; it takes a function of step, steps and latents.")
        if noise is not None:
            check_noise(noise)
            check_finite(noise, "the noise holds")
        steps = steps_of(steps, self.default_steps, options)
        strategy = host_flags().strategy(strategy, "transformer")
        pictures = pictures_of(cond.pictures, image, mask, last_image, control, strength, video)
        pipe = self.with_pictures(pictures) if pictures else self
        options |= {} if true_cfg is None else {TRUE_CFG: true_cfg}
        arguments = pipe._checked(cond, width, height, steps, guidance, frames, strategy, options)
        for note in pipe._notes(cond, guidance, options):
            if note not in TOLD:
                log.warning("Ballast: %s", note)
                TOLD.add(note)
        for note in pipe._stretched(pictures, width, height):
            log.warning("Ballast: %s", note)
        prompts = prompts_of(cond, self.cond_dims)
        whole = batch_of(batch, seed, noise, prompts, arguments, pipe.own)
        pipe.check_count(max(prompts, whole.count))
        check_attention(attention, [unit.module for unit in pipe.denoisers] if attention != AUTO else ())
        pipe.check_cards(cards, compile=compile, attention=attention)
        if cards > 1:
            check_group(cards)
            cond = same_everywhere(cond)
        chosen = functools.partial(kernels, compile=compile, attention=attention, on_compile=pipe._on_compile)

        @contextmanager
        def using(modules: Collection[nn.Module]) -> Iterator[None]:
            with chosen(modules), shared(modules, cards):
                yield

        report = None if on_step is None else functools.partial(pipe._called, on_step)
        run = _Run(cond, arguments, whole, strategy, bool(pictures) or pipe.looks, using, compile, report, cards)

        # On the CPU nothing is copied that several could share, and one after the other they take less RAM.
        # Nor would all processes find out at once that fewer have to do.
        alone = strategy == "cpu" or self.manager.accelerator.is_cpu or cards > 1
        at_once = 1 if alone else pipe._at_once(whole.count, self)
        drawn: list[torch.Tensor] = []
        while (begin := sum(map(len, drawn))) < whole.count:
            try:
                pipe._draw(run, begin, at_once, drawn)
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
        check_finite(latents, "the transformer made")
        return latents

    def _called(self, on_step: OnStep, step: int, steps: int, latents: torch.Tensor) -> None:
        with self.manager.calling():
            on_step(step, steps, latents)

    def _at_once(self, count: int, texts: SampleStage) -> int:
        """How many of so many pictures may be drawn at once: all, or one where it is not proved to be the same."""
        if count > 1 and (differs := self._batch_differs(texts)):
            log.info("Ballast: %s draws the pictures of a batch one after the other: %s", self.title, differs)
            return 1
        return count

    def _draw(self, run: _Run, begin: int, at_once: int, drawn: list[torch.Tensor]) -> None:
        """Draw the pictures from `begin` on in one stage, so many at once; each part is added to `drawn` when done.

        Raises DoesNotFitError, or that memory ran out, where fewer at once might fit: only for one there is a ladder.
        """
        begins, done = range(begin, run.batch.count, at_once), len(drawn)
        seers = [self._seen(run, at, at_once) for at in begins]

        def draw(device: torch.device, modules: Modules) -> None:
            with run.using(modules.values()):
                for at, seer in list(zip(begins, seers, strict=True))[len(drawn) - done :]:
                    given = run.given(at, at_once)
                    report = _counted(run.on_step, len(drawn), done + len(begins))
                    drawn.append(to_host(seer._denoise(run.cond, given, report, device, modules).float()))

        with self._wearing(self.denoisers):
            for unit in self.denoisers:
                unit.calls = replace(unit.calls, blocks=run.compile)
            stage = seers[0]._sampling(run.given(begin, at_once), reports=run.on_step is not None, cards=run.cards)
            key = stage.key(run.cond)
            forecast = functools.partial(stage.forecast, run.cond, key)
            steps, strategy, only = stage.steps * len(begins), run.strategy, at_once == 1
            expected = self._expected("sample", self.denoisers, forecast, strategy, steps, parts=not only)
            again = only and run.cards == 1
            self._run_stage("sample", self.denoisers, draw, strategy, work=key, **expected, keep=self.keep, again=again)

    def _seen(self, run: _Run, begin: int, at_once: int) -> SampleStage:
        """Return this pipeline with its modules' answers for the pictures of one part, if the run has any."""
        if not run.sees:
            return self
        seer = copy.copy(self)
        seer._then = None if self._then is None else [*self.denoisers, *self._then]
        seer._see(run.cond, run.given(begin, at_once))
        return seer

    def _on_compile(self, compiles: bool) -> None:
        for unit in (unit for unit in self.denoisers if unit.leases):
            self.manager.timeline.tell("compile" if compiles else "compiled", unit)

    def check_cards(self, cards: int, **options: Any) -> None:
        """Raise ValueError, in one line, for what cannot be drawn on so many cards. `options` are as in `sample`."""
        check_cards(cards, {unit.name: unit.module for unit in self.denoisers} if cards > 1 else {}, **options)

    def _sampling(self, arguments: Mapping[str, Any], *, reports: bool = True, cards: int = 1) -> Sampling:
        """Return the stage of a run with these arguments of `_denoise`, to forecast."""
        asked = dict(arguments)
        drawing, noise = asked.pop("generator"), asked.pop("latents")
        return Sampling(
            self._forecaster,
            self.denoisers,
            self._denoise,
            self._dry_run_arguments(asked),
            self._passes(asked),
            reports,
            noise,
            len(drawing) if isinstance(drawing, list) else 1,
            cards,
        )

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
        whole = {"width": width, "height": height, "steps": steps, "frames": frames}
        check_numbers(whole, {"guidance": guidance, TRUE_CFG: options.get(TRUE_CFG)})
        if steps < 1:
            raise ValueError(f"steps is {steps}; it takes at least 1.")
        check_values(options)
        if (given := options.get("init_latents")) is not None:
            check_latents(given)
            check_finite(given, "the latents to start from hold")
        return self._sample_arguments(width, height, steps, guidance, frames, options)


def _counted(on_step: OnStep | None, done: int, parts: int) -> OnStep | None:
    """Wrap `on_step` to report the steps of one part as steps of all `parts`, of which `done` are done."""
    if on_step is None or parts == 1:
        return on_step

    def report(step: int, steps: int, latents: torch.Tensor) -> None:
        on_step(done * steps + step, parts * steps, latents)

    return report
