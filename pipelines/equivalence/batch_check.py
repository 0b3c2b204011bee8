"""Prove that pictures drawn at once by a stock call are those that it draws alone, before anything is loaded.

A call is asked for some pictures at once, and for each of them alone, on echoes that answer for each sample by itself.
Where code mixes samples up, or draws noise in another order, these end differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..sampling.batches import Batch
from ..sampling.latents import sound_of
from .comparison import CHECKS, GUIDES, NEGATIVE, Rehearsal, arguments_of, drawn, encoded
from .fingerprints import EchoOfEach
from .verdicts import Modules, Verdict, close, echoes_of

if TYPE_CHECKING:
    from ..models.diffusers.diffusers_model import DiffusersModel

_PICTURES, _SEED = 3, 5  # which is no number of channels


def compare_batch(model: DiffusersModel, texts: DiffusersModel, own: Collection[str]) -> Verdict:
    """How pictures drawn at once by a model differ from those drawn alone, whose prompt `texts` encodes.

    `own` are the arguments that hold something for each picture. What the code raises is passed on.
    """
    pipe = Rehearsal(model, texts, model.text_options)
    units = [unit for unit in model.parts.units.values() if unit.name not in CHECKS]
    echoes = echoes_of(units, model.stand_ins, EchoOfEach)
    for unit in model.denoisers:
        echoes[unit.name].dims = model.batch_dims  # type: ignore[attr-defined]
    modules = {name: echo.face for name, echo in echoes.items()}
    scales = [None, GUIDES] if model.scales.cfg else [None]
    with torch.inference_mode():
        same = all(_same_at_a_size(pipe, modules, own, scale) for scale in scales)
    return Verdict("" if same else "pictures drawn at once are not those that are drawn alone")


def _same_at_a_size(pipe: Rehearsal, modules: Modules, own: Collection[str], scale: float | None) -> bool:
    try:
        return _same(pipe, modules, own, functools.partial(arguments_of, pipe, True, scale))
    except Exception as error:
        with suppress(Exception):  # some draw nothing of that size
            return _same(pipe, modules, own, functools.partial(arguments_of, pipe, False, scale))
        raise error


def _same(pipe: Rehearsal, modules: Modules, own: Collection[str], arguments: Callable[[], dict[str, Any]]) -> bool:
    batch = Batch(_PICTURES, _SEED, own=tuple(name for name in own if name in pipe.model.inputs))

    def given(begin: int, count: int) -> dict[str, Any]:
        asked = arguments()
        for name in batch.own:
            asked[name] = (*asked[name], asked[name][0].flip(0), asked[name][0].flip(1))
        return batch.arguments(asked, begin, count)

    given(0, 1)  # which lays out the pictures that a prompt is encoded with
    cond = encoded(pipe, NEGATIVE if pipe.model.takes_negative else None, modules)
    together = drawn(pipe, cond, functools.partial(given, 0, _PICTURES), modules)
    alone = [drawn(pipe, cond, functools.partial(given, i, 1), modules) for i in range(_PICTURES)]
    heard, heard_alone = sound_of(together), [sound for each in alone for sound in sound_of(each)]
    same_sound = len(heard) == len(heard_alone) and all(map(close, heard, heard_alone))
    return len(together) == _PICTURES and close(together, torch.cat(alone)) and same_sound
