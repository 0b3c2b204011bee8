"""Guidance in part of the steps: outside of the range the transformer makes one prediction, that of the prompt.

The stock code stays as it is. It is handed the prompt's prediction for the negative one as well, so that
negative + scale * (prompt - negative) is the prompt's prediction exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from ...memory.weights.interpose import Forward, interpose

GUIDANCE_RANGE = "guidance_range"  # option of `sample`

# Classes that predict both in one batch, the negative half first (True), or in two calls, the prompt's first (False).
_IN_ONE_BATCH = {
    "FluxPipeline": False,
    "LTXPipeline": True,
    "QwenImagePipeline": False,
    "StableDiffusion3Pipeline": True,
    "WanPipeline": False,
}
_TEXT = "encoder_hidden_states"  # argument of the transformers of these classes
_ROWS = ("hidden_states", _TEXT, "timestep", "pooled_projections", "encoder_attention_mask")  # with a row a prediction
# Options of these classes that use the two predictions otherwise, or hand the transformer tensors of their own.
_AGAINST = ("skip_guidance_layers", "guidance_rescale", "joint_attention_kwargs", "attention_kwargs")


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
    prompt: torch.Tensor | None,
) -> Iterator[None]:
    """Skip the negative predictions outside of the range until the block ends.

    `position` gives the step that runs and the number of steps, and `prompt` is its embedding.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.callback(interpose(module, _Skipping(chosen, position, prompt)))
        yield


class _Skipping:
    """Runs the calls of a transformer, and answers negative ones outside of the range."""

    def __init__(
        self, chosen: GuidanceRange, position: Callable[[], tuple[int, int]], prompt: torch.Tensor | None
    ) -> None:
        self._chosen, self._position, self._prompt = chosen, position, prompt
        self._step = -1
        self._predicted: Any = None

    def __call__(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        step, steps = self._position()
        is_first = step != self._step
        if self._step < 0:
            self._check_prompt(kwargs)
        if is_first:
            self._step, self._predicted = step, None
        if self._chosen.holds(step, steps):
            return forward(*args, **kwargs)
        if self._chosen.in_one_batch:
            rows = {name: kwargs[name].chunk(2)[1] for name in _ROWS if kwargs.get(name) is not None}
            return tuple(torch.cat([made, made]) for made in forward(*args, **kwargs | rows))
        if is_first:
            self._predicted = forward(*args, **kwargs)
        return self._predicted

    def _check_prompt(self, kwargs: Mapping[str, Any]) -> None:
        """Raise RuntimeError if the prompt is not where the class is known to have it."""
        given = kwargs.get(_TEXT)
        if given is not None and self._chosen.in_one_batch:
            given = given.chunk(2)[1]
        if given is None or self._prompt is None or not torch.equal(given, self._prompt.to(given)):
            raise RuntimeError("this version of diffusers orders its predictions otherwise. Leave guidance_range out.")
