"""A modular pipeline's own call at full size, on shapes: what calls of its transformer take on a simulated card."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ballast.memory.planning.dry_run import lay_stand_ins, lay_weights
from ballast.memory.rates import Rates
from ballast.memory.simulated.card import Card
from ballast.memory.simulated.dry import DEVICE, dry_card
from diffusers import ModularPipeline
from torch import nn


class _DecodingBegins(Exception):
    pass


@dataclass(frozen=True)
class ModuleCall:
    """A call of the transformer: its peak in bytes beside the weights, and the seconds at which it began and ended."""

    peak_bytes: int
    began: float
    ended: float


def calls_of_transformer(folder: Path, model: Any, rates: Rates, given: dict[str, Any]) -> list[ModuleCall]:
    """Run the own call of a folder's pipeline until it decodes, with all weights on the card of a dry run.

    `model` is Ballast's, whose units have the structures. `given` are arguments of the pipeline's call.
    """
    calls: list[ModuleCall] = []
    with torch.inference_mode(), dry_card() as card:
        copies = rates.pinned_bytes_per_second
        card.configure(None, 0, copies, copies, rates.operations_per_second)
        pipe: Any = ModularPipeline.from_pretrained(folder, local_files_only=True)
        structures = {name: unit.double() for name, unit in model.folder_parts.units.items()}
        tools = [name for name in pipe.pretrained_component_names if name not in structures]
        pipe.load_components(names=tools, local_files_only=True)
        for structure in structures.values():
            lay_weights(structure, card)
            lay_stand_ins(structure, model.stand_ins)
        pipe.update_components(**structures)
        if getattr(pipe, "prompt_upsampler", True) is None:  # FLUX.3's own way to encode a prompt as given
            pipe._blocks.sub_blocks.pop("prompt_upsampler")
        _record(structures["transformer"], card, calls)
        decoder: Any = structures.get("diffusion_decoder") or structures["vae"]
        decoder.decode = _begin_to_decode
        with _on_the_card(pipe):
            try:
                pipe(generator=torch.Generator().manual_seed(0), output_type="pt", **given)
            except _DecodingBegins:
                return calls
    raise AssertionError("the call ended without decoding")


def _begin_to_decode(*args: Any, **kwargs: Any) -> Any:
    raise _DecodingBegins


def _record(transformer: nn.Module, card: Card, calls: list[ModuleCall]) -> None:
    forward = transformer.forward

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        card.take_interval_peak()
        began = card.stats().clock_seconds
        made = forward(*args, **kwargs)
        calls.append(ModuleCall(card.take_interval_peak(), began, card.stats().clock_seconds))
        return made

    transformer.forward = recorded  # type: ignore[method-assign]


@contextmanager
def _on_the_card(pipe: Any) -> Iterator[None]:
    there = property(lambda self: DEVICE)
    with mock.patch.object(type(pipe), "_execution_device", there):
        yield
