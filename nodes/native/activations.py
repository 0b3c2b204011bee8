"""Bytes of activations of ComfyUI's own MODEL: the host's own figure, and that of a dry run on shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.planning.dry_run import dry_run
from ...memory.simulated.attention import Fuses
from .module_copies import shapes_of

log = logging.getLogger("ballast")

_TOKENS = 256  # tokens of a usual prompt, where a text encoder does not always give 77
# Keys of a model's config that hold the width of its prompt embeddings. With a wrong width there is no dry run.
_WIDTHS = ("context_dim", "context_in_dim", "text_dim", "cap_feat_dim", "joint_attention_dim", "txt_in_dim")
_WIDTH_OF = {"qwen_image": 3584}  # the config of this one has no such key


@dataclass(frozen=True)
class Expected:
    """The host's figures in bytes: for both prompts in one batch, and for one prompt alone."""

    both_bytes: int
    one_bytes: int

    def with_guidance(self, guidance: float | None) -> int:
        """Return the figure for a scale of classifier-free guidance; None if the sampler has another kind."""
        return self.one_bytes if guidance == 1 else self.both_bytes


def expected(patcher: Any, shape: Sequence[int], conditionings: Mapping[str, Any] | None = None) -> Expected:
    """Ask the host for its figures for latents of `shape`, batch first.

    `conditionings` by name are those that its sampler holds. Their ControlNets count too.
    """
    from comfy import sampler_helpers

    if not conditionings:
        both, one = (patcher.model.memory_required([count, *shape[1:]]) for count in (2 * shape[0], shape[0]))
        return Expected(int(both), int(one))
    beside = int(sampler_helpers.get_additional_models(conditionings, patcher.model_dtype())[1])
    both, one = sampler_helpers.estimate_memory(patcher, shape, conditionings)
    return Expected(int(both) + beside, int(one) + beside)


def dry_run_bytes(model: Any, shape: Sequence[int], prompt: Any = None, fuses: Fuses | None = None) -> int | None:
    """Return the most bytes beside the weights in one call with latents of `shape`, batch first; None if unknown.

    `prompt` is one of the host's CONDITIONING; without, one of usual size is assumed. `fuses` tells which attention is
    one kernel on the device. Nothing is loaded or moved.
    """
    try:
        return _dry_run(model, shape, prompt, fuses)
    except Exception as error:  # the model's code needs values, which a dry run has not: the host's figure is left
        log.info("Ballast: no dry run of %s (%s)", type(model).__name__, " ".join(str(error).split())[:200])
        return None


def _dry_run(model: Any, shape: Sequence[int], prompt: Any, fuses: Fuses | None) -> int:
    double: Any = shapes_of(model)

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
    return forecast.units["model"].peak_bytes


def _attention(chosen: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's own attention: others ask the device how much is free."""
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _prompt(model: Any, prompt: Any) -> tuple[torch.Tensor | None, Mapping[str, Any]]:
    """Return the embeddings of a prompt, and what the host passes beside them."""
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
