"""Find the modules that make the sound of a stock call, and whether the stages make the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..sampling.latents import sound_of
from ..stock.postprocess import SOUND_TAILS
from ..stock.sound import SoundDecoder, as_waveform
from .verdicts import Modules, Verdict, close

if TYPE_CHECKING:
    from ..models.diffusers.diffusers_model import DiffusersModel
    from ..models.diffusers.folder_parts import Components
    from ..models.modular.modular_model import ModularModel

_HOST = torch.device("cpu")


def with_sound(
    model: DiffusersModel | ModularModel, parts: Components, silent: Verdict, compared: Callable[[], Verdict]
) -> Verdict:
    """Return the verdict of stages that make the sound of a stock call, or the `silent` one where it is not the same.

    It is made by the modules that only the stock call runs, one after the other. `compared()` is the verdict of the
    stages with the sound that the model has then.
    """
    named = [name for name in silent.left_out if name in parts.units]
    calls = [f"{name}.{'decode' if name.endswith('vae') else 'forward'}" for name in named]
    orders = [] if silent.differs or not calls else itertools.permutations(calls)
    for order, tail in itertools.product(orders, SOUND_TAILS):
        with suppress(Exception):  # of calls in another order, or other sound
            model.set_sound(SoundDecoder.of(order, tail, parts))
            verdict = compared()
            if not verdict.differs:
                return replace(verdict, sound=order, sound_tail=tail)
    model.set_sound(None)
    return silent


def check_sound(sound: SoundDecoder | None, latents: torch.Tensor, modules: Modules, heard: Any) -> None:
    """Raise ValueError if the sound of `latents` is not that which the stock call made, [B,C,T] or [B,T]."""
    if sound is None:
        return
    with sound.calling(modules):
        made = [sound.run(_HOST, modules, each).float() for each in sound_of(latents)]
    if not made or heard is None or not close(torch.cat(made), as_waveform(heard.float())):
        raise ValueError("its call makes other sound")
