"""StagedPipeline: encode, sample, decode, plan. Each stage loads what it needs and gives it back."""

from __future__ import annotations

import functools
from typing import Any

from ...memory.planning.runplan import RunPlan
from ...memory.rates import Rates
from ...memory.sizes import parse_bytes
from ..encoding.conditioning import Conditioning
from ..lora.use import Given as Loras
from ..lora.use import notes_of, open_loras, refuse_scales
from ..options import TRUE_CFG, plain_defaults, plain_number, steps_of
from ..planning.plans import TYPICAL_PROMPT, NoBudgetError, Run, plan_batch, plan_run
from ..sampling.batches import batch_of, prompts_of
from .pictures import Given, as_pictures, pictures_of
from .prompts import Negative, Prompt, as_list
from .runs import ManyRuns


class StagedPipeline(ManyRuns):
    """A pipeline whose encoders, transformer and decoder take turns on one device.

    Made by `open_pipeline`. `keep=False` gives every byte back when a stage ends; with `keep=True` the transformer
    stays on the device between runs for as long as nothing else needs the room.
    """

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
        known = getattr(self, "pipeline_class", None)
        # Names without a transformer's are those of the first.
        units = sorted(self.denoisers, key=lambda unit: unit.role != "transformer")
        self._loras = open_loras(loras, [*units, *self.encoders], known, self._loras, self._converters())

    def notes_of_loras(self) -> list[list[str]]:
        """Return notes on each LoRA in use: which of two transformers it is for, and parts that were left out."""
        return [notes_of(lora, self.denoisers) for lora in self._loras]

    @plain_defaults()
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
        **options: Any,
    ) -> RunPlan:
        """Plan a run without loading anything: placements and why, peaks in bytes, seconds.

        Sizes, `steps`, `guidance`, `true_cfg`, `frames`, `strategy`, pictures, `batch`, `cards` and `options` as in
        `sample`; of several cards it is the plan of each, without what they tell each other. `cond` is what will be
        sampled from, or the prompts that will be encoded, by default one of usual length, `images` with them; then
        `options` may be those of `encode`, too.
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
        steps = steps_of(steps, self.default_steps, options)
        references = as_pictures(images, "images") if cond is None else cond.pictures
        texts = {name: options.pop(name) for name in list(options) if cond is None and self.encodes_with(name)}
        if texts:
            self._check_options(texts)
            refuse_scales(self._loras, texts)
        read = self._pictures_read(references) | texts if cond is None else {}
        if true_cfg is not None:
            options[TRUE_CFG] = true_cfg
            negative_prompt = "" if negative_prompt is None and true_cfg else negative_prompt  # or it does not guide
        encoding = self._encoding(prompt, self._negative(prompt, negative_prompt), read)
        pictures = pictures_of(references, image, mask, last_image, control, strength, video)
        pipe = self.with_pictures(pictures) if pictures else self
        arguments = pipe._checked(cond, width, height, steps, guidance, frames, strategy, options)
        prompts = prompts_of(cond, self.cond_dims) if cond else len(as_list(prompt))
        whole = batch_of(batch, 0, None, prompts, arguments, pipe.own)
        pipe.check_count(max(prompts, whole.count))
        stated = self.vram_bytes if vram is None else parse_bytes(vram)
        if not stated and self.manager.accelerator.is_cpu and strategy != "cpu":
            raise NoBudgetError("vram='8GB'")
        budget_bytes = self._vram_budget() if vram is None else stated or self._free_vram()
        ram_bytes = self._ram_budget(ram)
        size = f"{width or 'default'} x {height or 'default'}" if width or height else "default size"
        size += f" x {frames} frames" if frames else ""
        size += f", {whole.count} pictures" if whole.count > 1 else ""
        size += f", on {cards} cards" if cards > 1 else ""
        guided = cond is None or pipe.replays or any(name.startswith("negative_") for name in cond.tensors)
        size += ", each step twice" if guided and (true_cfg or 0) > 1 else ""

        def planned(count: int, at_once: int) -> RunPlan:
            given = whole.arguments(arguments, 0, at_once)
            see = functools.partial(pipe._foresee, arguments=given, room_bytes=budget_bytes)
            run = Run(
                self.title,
                size,
                _caveat(self.forecast_caveat, cards),
                self.manager.device,
                strategy,
                cond,
                encoding,
                pipe._sampling(given, cards=cards),
                pipe._vae_run("decode", {}, budget_bytes, planned=True),
                see if pictures or pipe.looks else None,
                count,
                0 if ram is None else ram_bytes,
                ram is not None or self.ram_bytes is not None,
            )
            return plan_run(run, budget_bytes, ram_bytes, rates, self.manager.ram_state(ram_bytes))

        with self._wearing([*self.encoders, *pipe.denoisers]):
            return plan_batch(planned, whole.count, lambda: prompts == cards == 1 and pipe._at_once(2, self) > 1)


def _caveat(own: str, cards: int) -> str:
    """Add a sentence if a stage runs on several cards."""
    share = f"Each card computes 1/{cards} of sampling, is brought all weights, and needs at most this VRAM."
    return f"{own} {share}".strip() if cards > 1 else own
