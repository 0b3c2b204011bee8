"""Rehearse a pipeline on echoes of its modules: by its stock call, and in stages. Both have to end alike."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.decode import run_decoder, to_images
from ..encoding.conditioning import Conditioning
from .proof import Modules, Verdict, difference, echoes_of
from .stock import fewest_frames

if TYPE_CHECKING:
    from .pipeline import GenericPipeline

_PROMPT, _NEGATIVE = "a red boat", "blurry, grey"
_SIDE, _STEPS = 64, 2  # pixels; or the next size that the pipeline draws
_GUIDES = 3.0  # a scale that guides
_HOST = torch.device("cpu")


def rehearse(pipeline: GenericPipeline) -> Verdict:
    """How the stages of a pipeline differ from its stock call, and the negative prompt that this takes by default."""
    pipe = copy.copy(pipeline)
    pipe.components = {
        name: replace(component, dtype=torch.float32) if component.is_module else component
        for name, component in pipeline.components.items()
    }
    echoes = echoes_of(list(pipe._units.values()), pipe.stand_ins)
    with torch.inference_mode():
        default = _default_negative(pipe, {name: echo.face for name, echo in echoes.items()})
        pairs = [(None, default)]
        if "negative_prompt" in pipe._call:
            pairs.append((_NEGATIVE, _NEGATIVE))
        for whole, staged in pairs:
            ways = (functools.partial(_run_whole, pipe, whole), functools.partial(_run_stages, pipe, staged))
            if found := difference(*ways, echoes):
                return Verdict(found)
    return Verdict("", default)


def _default_negative(pipe: GenericPipeline, modules: Modules) -> str | None:
    """The negative prompt that the stock call has encoded when it guides and was given none; None if it has none."""
    asked: list[Mapping[str, Any]] = []
    scale = pipe._guidance_name()
    _run_whole(pipe, None, modules, None if scale == "guider" or scale is None else _GUIDES, asked)
    if not asked:
        raise ValueError("it never encodes its prompt")
    if "negative_prompt" in pipe._encode_prompt:
        text = asked[0].get("negative_prompt")
    else:
        text = (asked[1].get("prompt") or "") if len(asked) > 1 else None
    return text[0] if isinstance(text, list | tuple) else text


def _arguments(pipe: GenericPipeline, guidance: float | None = None) -> dict[str, Any]:
    side = -(-_SIDE // pipe.sizes.multiple) * pipe.sizes.multiple
    width, height = (side if name in pipe._call else None for name in ("width", "height"))
    frames = fewest_frames(pipe._pipeline(_HOST, {})) if pipe.is_video else None
    arguments = pipe._sample_arguments(width, height, _STEPS, guidance, frames, {})
    return arguments | {"generator": torch.Generator("cpu").manual_seed(0)}


def _run_whole(
    pipe: GenericPipeline,
    negative: str | None,
    modules: Modules,
    guidance: float | None = None,
    asked: list[Mapping[str, Any]] | None = None,
) -> torch.Tensor:
    """Pictures by the stock call. `asked` gets the arguments of each call of its `encode_prompt`."""
    stock = pipe._pipeline(_HOST, modules, *pipe._without_weights(""))
    stock.vae = modules["vae"]
    if asked is not None:
        encode, signature = stock.encode_prompt, inspect.signature(stock.encode_prompt)

        def listened(*args: Any, **kwargs: Any) -> Any:
            asked.append(signature.bind(*args, **kwargs).arguments)
            return encode(*args, **kwargs)

        stock.encode_prompt = listened
    arguments = _arguments(pipe, guidance) | {"prompt": _PROMPT, "output_type": "pt"}
    arguments.pop("negative_prompt", None)
    made = stock(**arguments, **({} if negative is None else {"negative_prompt": negative}))
    return (made.frames if pipe.is_video else made.images).float().movedim(-3, -1)


def _run_stages(pipe: GenericPipeline, negative: str | None, modules: Modules) -> torch.Tensor:
    encoders, denoisers = ({u.name: modules[u.name] for u in units} for units in (pipe.encoders, pipe.denoisers))
    cond = Conditioning.of(pipe._encode(_PROMPT, negative, {}, _HOST, encoders))
    latents = pipe._denoise(cond, _arguments(pipe) | {"latents": None}, None, _HOST, denoisers).float()
    pipe.check_latents(latents)
    pixels = run_decoder(modules["vae"], latents, _HOST, pipe._decode_arguments(latents, {}, "whole", 0))
    return to_images(pixels.float(), video=pipe.is_video)
