"""Prove that a run of a stock call that is cut in two ends as the whole does, before anything is loaded.

Code that changes latents between steps, keeps something beside them (the sound of LTX-2), or counts its steps, ends
otherwise. Both ways run on echoes, and have to be equal to the bit.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..sampling.scheduler_choice import CLASSES, SCHEDULER, SchedulerChoice, is_flow
from ..sampling.step_range import STEP_RANGE, StepRange
from .comparison import CHECKS, GUIDES, NEGATIVE, Rehearsal, arguments_of, drawn, encoded
from .verdicts import Modules, Verdict, echoes_of

if TYPE_CHECKING:
    from ..models.diffusers.diffusers_model import DiffusersModel

_STEPS, _CUT = 4, 2  # of the run, and where it is cut


def compare_cut(model: DiffusersModel, texts: DiffusersModel) -> Verdict:
    """How a run of a model that is cut in two differs from the whole. The prompt is encoded by `texts`.

    What the code raises is passed on.
    """
    pipe = Rehearsal(model, texts, model.text_options)
    units = [unit for unit in model.parts.units.values() if unit.name not in CHECKS]
    modules = {name: echo.face for name, echo in echoes_of(units, model.stand_ins).items()}
    scales = [None, GUIDES] if model.scales.cfg else [None]
    with torch.inference_mode():
        same = all(_same_at_a_size(pipe, modules, scale) for scale in scales)
    return Verdict("" if same else "a run that is cut in two does not end as the whole")


def _same_at_a_size(pipe: Rehearsal, modules: Modules, scale: float | None) -> bool:
    try:
        return _same(pipe, modules, True, scale)
    except Exception as error:
        with suppress(Exception):  # some draw nothing of that size
            return _same(pipe, modules, False, scale)
        raise error


def _same(pipe: Rehearsal, modules: Modules, small: bool, scale: float | None) -> bool:
    own = pipe.model.parts.tool("scheduler")
    by = {} if type(own).__name__ == CLASSES[0] or not is_flow(own) else {SCHEDULER: SchedulerChoice(CLASSES[0])}

    def given(part: StepRange | None, latents: torch.Tensor | None) -> dict[str, Any]:
        asked = arguments_of(pipe, small, scale) | {"num_inference_steps": _STEPS, "latents": latents, **by}
        return asked if part is None else asked | {STEP_RANGE: part}

    given(None, None)  # which lays out the pictures that a prompt is encoded with
    cond = encoded(pipe, NEGATIVE if pipe.model.takes_negative else None, modules)
    draw = functools.partial(drawn, pipe, cond, modules=modules)
    whole, part = draw(lambda: given(None, None)), StepRange(0, _CUT, _STEPS)
    left = draw(lambda: given(part, None))
    return torch.equal(draw(lambda: given(replace(part, start=_CUT, end=_STEPS), left)), whole)
