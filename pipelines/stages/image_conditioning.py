"""Encode the pictures of a run before it samples: each module that sees them runs in a stage of its own.

The stock call runs on the CPU until it samples. What it asks of the VAE's encoder and of an image encoder meanwhile is
run here; the answers are told again to the call that samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ..encoding.conditioning import Conditioning, to_host
from ..planning.plans import SEEING, Sight
from ..runner import Runner, Stage
from ..stock.answers import Answers, Posterior
from ..stock.imagined import imagine
from .vae_stages import vae_run

if TYPE_CHECKING:
    from ..models.model import Model, Modules


def encode_images(model: Model, runner: Runner, cond: Conditioning, arguments: Mapping[str, Any]) -> Answers:
    """Run what sees the pictures of this run before it samples."""

    def see(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vae":
            posterior = Posterior()
            run = vae_run(model, runner, "encode", {}, runner.vram_budget(), encode=posterior)
            return posterior.whole(run(*args))
        call, forecaster = model.module_call(name, args, kwargs), model.forecaster
        unit, key = call.unit, call.key(forecaster)

        def run_call(device: torch.device, modules: Modules) -> Any:
            return tree_map_only(torch.Tensor, to_host, call.run(device, modules[unit.name]))

        dry = functools.partial(call.dry_run, forecaster)
        forecast = functools.partial(forecaster.forecast, key, SEEING, [unit], dry)
        expected = runner.expected(SEEING, [unit], forecast, "auto")
        with call.entered(unit.module):
            return runner.run(Stage(SEEING, [unit], run_call, work=key, **expected))

    return model.encode_images(cond, arguments, see)


def plan_image_encoding(
    model: Model, runner: Runner, room_bytes: int, cond: Conditioning, arguments: Mapping[str, Any]
) -> tuple[Answers, list[Sight]]:
    """Return what `encode_images` will run, on shapes, and answers of the right shapes."""
    sights: list[Sight] = []

    def see(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vae":
            run = vae_run(model, runner, "encode", {}, room_bytes, planned=True, encode=Posterior())
            sights.append(Sight(run, *args))
        forecast, made = imagine(model, name, args, kwargs)
        if name != "vae":
            sights.append(Sight(units=[model.module_call(name, args, kwargs).unit], forecast=forecast))
        return made

    on_host = replace(cond, tensors={name: _zeros(value) for name, value in cond.tensors.items()})
    return model.encode_images(on_host, arguments, see), sights


def _zeros(value: torch.Tensor | list[torch.Tensor]) -> Any:
    """Tensors of the same shapes, where a dry run left them without values."""
    return tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t, value)
