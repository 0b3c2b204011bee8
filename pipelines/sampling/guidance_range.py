"""Guidance in part of the steps: outside of the range the transformer makes one prediction, that of the prompt.

The stock code stays as it is. It is handed the prompt's prediction for the negative one as well, so that
negative + scale * (prompt - negative) is the prompt's prediction exactly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from ...memory.weights.interpose import Forward, interpose

GUIDANCE_RANGE = "guidance_range"  # option of `sample`

# Classes that predict both in one batch (True), or in two calls, the prompt's first (False), and that guide by a sum of
# both whose factors add up to 1.
_IN_ONE_BATCH = {
    "AuraFlowPipeline": True,
    "ChromaPipeline": False,
    "ChromaImg2ImgPipeline": False,
    "CogVideoXPipeline": True,
    "CogVideoXImageToVideoPipeline": True,
    "FluxPipeline": False,
    "FluxImg2ImgPipeline": False,
    "FluxInpaintPipeline": False,
    "FluxKontextPipeline": False,
    "Flux2KleinPipeline": False,
    "Flux2KleinInpaintPipeline": False,
    "HunyuanVideoPipeline": False,
    "LTXPipeline": True,
    "LTXImageToVideoPipeline": True,
    "Lumina2Pipeline": False,
    "MochiPipeline": True,
    "QwenImagePipeline": False,
    "QwenImageEditPipeline": False,
    "QwenImageImg2ImgPipeline": False,
    "QwenImageInpaintPipeline": False,
    "SanaPipeline": True,
    "StableDiffusion3Pipeline": True,
    "StableDiffusion3Img2ImgPipeline": True,
    "StableDiffusion3InpaintPipeline": True,
    "WanPipeline": False,
    "WanImageToVideoPipeline": False,
    "WanVideoToVideoPipeline": False,
    "ZImagePipeline": True,
    "ZImageImg2ImgPipeline": True,
    "ZImageInpaintPipeline": True,
}
_TEXTS = ("encoder_hidden_states", "cap_feats")  # arguments of the transformers of these classes that have the prompt
# Arguments with a row a prediction.
_ROWS = (
    *_TEXTS, "hidden_states", "x", "timestep", "t", "pooled_projections", "encoder_attention_mask",
)  # fmt: skip
# Options of these classes that use the two predictions otherwise, or hand the transformer tensors of their own.
_AGAINST = (
    "skip_guidance_layers", "guidance_rescale", "cfg_normalization", "joint_attention_kwargs", "attention_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class GuidanceRange:
    """Step i of n, counted from 0, is guided if start <= i / n < end. `in_one_batch` says how the class predicts."""

    start: float
    end: float
    in_one_batch: bool

    def holds(self, step: int, steps: int) -> bool:
        """Return whether this step is guided."""
        return self.start <= step / steps < self.end


def range_of(title: str, class_name: str, experts: int, options: Mapping[str, Any]) -> GuidanceRange:
    """Return the range that options of `sample` ask for. Raises ValueError, in one line, where it is not taken."""
    asked = options[GUIDANCE_RANGE]
    pair = isinstance(asked, list | tuple) and len(asked) == 2 and all(map(_is_fraction, asked))
    if not pair or not asked[0] <= asked[1]:
        raise ValueError(
            f"guidance_range is {str(asked)[:80]!r}; it takes where guidance starts and ends, such as (0.0, 0.6)."
        )
    if class_name not in _IN_ONE_BATCH:
        known = ", ".join(_IN_ONE_BATCH)
        raise ValueError(f"{title} takes no guidance_range: {class_name} is none of {known}. Leave it out.")
    if experts > 1:
        raise ValueError(f"{title} takes no guidance_range: it has {experts} transformers in turn. Leave it out.")
    if against := ", ".join(name for name in _AGAINST if options.get(name)):
        raise ValueError(f"guidance_range does not go together with {against}. Leave one of them out.")
    return GuidanceRange(float(asked[0]), float(asked[1]), _IN_ONE_BATCH[class_name])


def _is_fraction(value: Any) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return number and 0 <= float(value) <= 1


@contextmanager
def guided_within(
    chosen: GuidanceRange,
    modules: Iterable[nn.Module],
    position: Callable[[], tuple[int, int]],
    prompt: Any,
) -> Iterator[None]:
    """Skip the negative predictions outside of the range until the block ends.

    `position` gives the step that runs and the number of steps. `prompt` is its embedding, or a list of them.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.callback(interpose(module, _Skipping(chosen, module, position, prompt)))
        yield


class _Skipping:
    """Runs the calls of a transformer, and answers negative ones outside of the range."""

    def __init__(
        self, chosen: GuidanceRange, module: nn.Module, position: Callable[[], tuple[int, int]], prompt: Any
    ) -> None:
        self._chosen, self._position = chosen, position
        self._prompt: Any = () if prompt is None else prompt
        self._signature = inspect.signature(module.forward)
        self._step, self._half = -1, 0
        self._predicted: Any = None

    def __call__(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        step, steps = self._position()
        is_first = step != self._step
        given = self._signature.bind(*args, **kwargs).arguments
        text: Any = next((given[name] for name in _TEXTS if given.get(name) is not None), ())
        # Classes that truncate guidance hand late steps one prediction.
        is_batch = self._chosen.in_one_batch and len(text) == 2 * len(self._prompt)
        if self._step < 0:
            self._half = self._place_of_prompt(_halves(text) if is_batch else (text,))
        if is_first:
            self._step, self._predicted = step, None
        if self._chosen.holds(step, steps):
            return forward(*args, **kwargs)
        if is_batch:
            rows = {name: _halves(given[name])[self._half] for name in _ROWS if given.get(name) is not None}
            return _twice(forward(**given | rows))
        if is_first:
            self._predicted = forward(*args, **kwargs)
        return self._predicted

    def _place_of_prompt(self, texts: Sequence[Any]) -> int:
        """Return which of the texts is the prompt. Raises RuntimeError if none is."""
        for place, text in enumerate(texts):
            if len(text) and _are_equal(text, self._prompt):
                return place
        raise RuntimeError("this version of diffusers orders its predictions otherwise. Leave guidance_range out.")


def _halves(rows: Any) -> Sequence[Any]:
    """Return the halves of a tensor or a list along its rows."""
    return (rows[: len(rows) // 2], rows[len(rows) // 2 :])


def _twice(made: Any) -> Any:
    """Return a transformer's result with its rows for both predictions."""
    if isinstance(made, dict):
        return type(made)(**{name: _twice(part) for name, part in made.items()})
    if isinstance(made, tuple):
        return tuple(map(_twice, made))
    return made * 2 if isinstance(made, list) else torch.cat([made, made])


def _are_equal(text: Any, prompt: Any) -> bool:
    if isinstance(text, torch.Tensor):
        return isinstance(prompt, torch.Tensor) and torch.equal(text, prompt.to(text))
    return len(text) == len(prompt) and all(map(_are_equal, text, prompt))
