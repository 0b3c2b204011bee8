"""A dry run of ComfyUI's own MODEL: what a call of it takes, on shapes alone, where its code allows that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...memory.planning.dry_run import dry_run
from ...memory.planning.forecast import Operations
from ...memory.simulated.attention import Fuses
from ...memory.simulated.dry import held_bytes
from .structure import shapes_of

log = logging.getLogger("ballast")

_TOKENS = 256  # of a prompt of usual length, where a text encoder does not always give 77
# Of a model's config: the width of the embeddings that it attends to.
_WIDTHS = ("context_dim", "context_in_dim", "text_dim", "cap_feat_dim", "joint_attention_dim", "txt_in_dim")
_WIDTH_OF = {"qwen_image": 3584}  # where the config does not say


@dataclass(frozen=True)
class Foreseen:
    """The forecast of a call: its most bytes on the device beside the weights, and how much it computes.

    `around` tells of each module by name the bytes there beside the weights when it is called, and until it is done.
    """

    peak_bytes: int
    operations: Operations
    around: Mapping[str, tuple[int, int]]


def foresee(model: Any, shape: Sequence[int], prompt: Any = None, fuses: Fuses | None = None) -> Foreseen | None:
    """Return the memory of a call beside the weights, for latents of `shape`, batch first; None if unknown.

    `prompt` is one of the host's CONDITIONING, else one of usual size is assumed. `fuses` tells which attention is one
    kernel on the device, by default all. Nothing is loaded or moved.
    """
    try:
        return _foresee(model, shape, prompt, fuses)
    except Exception as error:  # of code that needs values, which there are none of; the host's figure is left
        log.info("Ballast: no dry run of %s (%s)", type(model).__name__, " ".join(str(error).split())[:200])
        return None


def _foresee(model: Any, shape: Sequence[int], prompt: Any, fuses: Fuses | None) -> Foreseen:
    double: Any = shapes_of(model)
    around = _watched(double)

    def run(device: torch.device) -> Any:
        noise = torch.zeros(tuple(shape), device=device)
        embeddings, beside = _prompt(model, prompt)
        named = {name: _moved(value, device) for name, value in beside.items()}
        conds = double.extra_conds(
            cross_attn=_moved(embeddings, device), noise=noise, device=device, latent_image=noise, denoise_mask=None,
            width=shape[-1] * 8, height=shape[-2] * 8, prompt_type="positive", seed=0, model_conds={}, **named,
        )  # fmt: skip
        given = {name: cond.process_cond(batch_size=shape[0], area=None).cond for name, cond in conds.items()}
        options = {"optimized_attention_override": _attention}
        times = torch.full((shape[0],), 1.0, device=device)
        return double.apply_model(noise, times, transformer_options=options, **given)

    forecast, _ = dry_run({"model": double}, run, method="apply_model", fuses=fuses)
    seen = forecast.units["model"]
    return Foreseen(seen.peak_bytes, seen.operations, around)


def _watched(double: torch.nn.Module) -> Mapping[str, tuple[int, int]]:
    """Return what will be on the device around the calls of each module inside, at the most of them."""
    around: dict[str, tuple[int, int]] = {}

    def note(name: str, *_: Any, done: bool) -> None:
        before, during = around.get(name, (0, 0))
        held = held_bytes()
        around[name] = before if done else max(before, held), max(during, held)

    for name, part in double.named_modules():
        part.register_forward_pre_hook(partial(note, name, done=False))
        part.register_forward_hook(partial(note, name, done=True))
    return around


def _attention(chosen: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own attention, as on a card: others ask the device how much is free."""
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _prompt(model: Any, prompt: Any) -> tuple[torch.Tensor | None, Mapping[str, Any]]:
    if prompt:
        embeddings, beside = prompt[0]
        return embeddings, {name: value for name, value in beside.items() if name not in ("control", "hooks")}
    config = model.model_config.unet_config
    width = next((config[name] for name in _WIDTHS if config.get(name)), _WIDTH_OF.get(config.get("image_model")))
    if isinstance(width, list | tuple):
        width = max(width)
    pooled = config.get("vec_in_dim") or (1280 if config.get("adm_in_channels") else 768)
    tokens = 77 if "context_dim" in config else _TOKENS
    return None if width is None else torch.zeros(1, tokens, width), {"pooled_output": torch.zeros(1, pooled)}
