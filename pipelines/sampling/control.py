"""Strength and range of ControlNets: arguments of the stock call. One whose share is over is not called, and leaves.

The stock code calls a ControlNet in every step, and multiplies what it makes by 0 outside of its range. Zeros in place
of that are equal, and take neither time nor weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from ...memory.weights.interpose import Forward, interpose

CONTROL_STRENGTH, CONTROL_RANGE, CONTROL_MODE = "control_strength", "control_range", "control_mode"  # of `sample`
CONTROL = "control"  # the argument of `denoise` that has them

_SCALE, _START, _END = "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end"  # of calls
_SCALED = "conditioning_scale"  # argument of ControlNets
# ControlNets that make one tensor for each of these lists of blocks: what they make outside of their range is known.
_BLOCKS = {
    "FluxControlNetModel": ("controlnet_blocks", "controlnet_single_blocks"),
    "QwenImageControlNetModel": ("controlnet_blocks",),
    "SD3ControlNetModel": ("controlnet_blocks",),
}


@dataclass(frozen=True)
class Control:
    """The strength of each picture to follow, None for that of the class, and the part of the steps that follows it.

    Step i of n, counted from 0, follows it if start <= i / n and (i + 1) / n <= end, as in the stock code.
    """

    strengths: tuple[float | None, ...]
    ranges: tuple[tuple[float, float], ...]

    def steps(self, at: int, steps: int) -> list[int]:
        """Return the steps that follow a picture, counted from 0."""
        if self.strengths[at] == 0:
            return []
        start, end = self.ranges[at]
        return [step for step in range(steps) if not (step / steps < start or (step + 1) / steps > end)]

    def calls(self, nets: Mapping[str, nn.Module], steps: int) -> dict[str, tuple[int, int]]:
        """Return by the name of each ControlNet that is skipped outside of its range: its calls, and those of stock."""
        if not any(type(net).__name__ in _BLOCKS for net in nets.values()):
            return {}
        pictures = range(len(self.strengths))
        own = {name: pictures if len(nets) == 1 else (at,) for at, name in enumerate(nets)}
        called = {name: sum(len(self.steps(at, steps)) for at in those) for name, those in own.items()}
        return {name: (count, len(own[name]) * steps) for name, count in called.items()}

    def arguments(self, call: Collection[str]) -> dict[str, Any]:
        """Return them as arguments of the stock call: numbers for one picture, lists for several."""
        starts, ends = zip(*self.ranges, strict=True)
        found: dict[str, Sequence[Any]] = {}
        if any(strength is not None for strength in self.strengths):
            found[_SCALE] = self.strengths
        if any(part != (0.0, 1.0) for part in self.ranges):
            found |= {_START: starts, _END: ends}
        return {name: list(values) if len(values) > 1 else values[0] for name, values in found.items() if name in call}


def control_of(
    title: str, cls: Any, pictures: int, call: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> Control | None:
    """Return what options of `sample` ask of ControlNets for so many `pictures`, 0 without any; None for nothing.

    Calls with several take a list for each, and no single number.

    Raises ValueError, in one line, for what the class does not take.
    """
    asked = {name: options[name] for name in (CONTROL_STRENGTH, CONTROL_RANGE) if options.get(name) is not None}
    if not asked and (pictures < 2 or _SCALE in options or _START in options):
        return None
    if not pictures:
        raise ValueError(f"{' and '.join(asked)}: {title} runs without a ControlNet here. Leave that out.")
    for name, own in ((CONTROL_STRENGTH, _SCALE), (CONTROL_RANGE, _START)):
        if name in asked and own not in call:
            raise ValueError(f"{title} takes no {name}: {cls.__name__} has no such argument. Leave it out.")
        if name in asked and (raw := [each for each in (own, own.replace("start", "end")) if each in options]):
            raise ValueError(f"{name} and {raw[0]} are given. Give one of them.")
    usual = call[_SCALE].default if pictures > 1 and _SCALE in call else None
    strengths = [usual] * pictures
    if CONTROL_STRENGTH in asked:
        takes = "a number, such as 0.7"
        strengths = [float(s) for s in _each(asked[CONTROL_STRENGTH], pictures, CONTROL_STRENGTH, _is_strength, takes)]
    where = "where it starts and ends, such as (0.0, 0.6)"
    ranges = _each(asked.get(CONTROL_RANGE, (0.0, 1.0)), pictures, CONTROL_RANGE, _is_range, where)
    return Control(tuple(strengths), tuple((float(start), float(end)) for start, end in ranges))


def _each(asked: Any, pictures: int, name: str, fits: Callable[[Any], bool], takes: str) -> list[Any]:
    """Return one value for each picture: that of all of them, or those of a list."""
    values = [asked] * pictures if fits(asked) else list(asked) if isinstance(asked, list | tuple) else []
    if len(values) != pictures or not all(map(fits, values)):
        several = f", or {pictures} of them" if pictures > 1 else ""
        raise ValueError(f"{name} is {str(asked)[:80]!r}; it takes {takes}{several}.")
    return values


def _is_strength(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_range(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_strength, value))
    return pair and 0 <= value[0] < value[1] <= 1


def check_mode(title: str, modes: Sequence[int | None], asked: Any) -> None:
    """Raise ValueError, in one line, where a union ControlNet is not told what its picture shows.

    `modes` are how many kinds of pictures each one knows, None for one that knows a single kind.
    """
    given = list(asked) if isinstance(asked, list | tuple) else [asked] * len(modes)
    for mode, known in zip(given, modes, strict=False):
        number = isinstance(mode, Integral) and not isinstance(mode, bool)
        if known is not None and not (number and 0 <= mode < known):
            raise ValueError(
                f"control_mode is {str(asked)[:80]!r}; the union ControlNet of {title} takes what its picture "
                f"shows, a number from 0 to {known - 1}: its page says which."
            )
        if known is None and mode is not None and mode != -1:
            raise ValueError(f"control_mode is for a union ControlNet, and this one of {title} is none. Leave it out.")


@contextmanager
def following(
    control: Control,
    nets: Mapping[str, nn.Module],
    position: Callable[[], tuple[int, int]],
    leave: Callable[[str], None],
) -> Iterator[None]:
    """Skip the calls of ControlNets outside of their ranges until the block ends.

    `position` gives the step that runs and the number of steps. `leave(name)` is called when the share of one is over.
    """
    with ExitStack() as stack:
        for at, (name, net) in enumerate(nets.items()):
            if type(net).__name__ in _BLOCKS:
                pictures = range(len(control.strengths)) if len(nets) == 1 else (at,)
                stack.callback(interpose(net, _Skipping(control, pictures, name, net, position, leave)))
        yield


class _Skipping:
    """Runs the calls of a ControlNet, and answers those outside of its range."""

    def __init__(
        self,
        control: Control,
        pictures: Sequence[int],
        name: str,
        net: nn.Module,
        position: Callable[[], tuple[int, int]],
        leave: Callable[[str], None],
    ) -> None:
        self._control, self._pictures, self._name, self._position, self._leave = (
            control,
            pictures,
            name,
            position,
            leave,
        )
        counts = [len(getattr(net, blocks)) for blocks in _BLOCKS[type(net).__name__]]
        self._counts, self._in_tuple = counts, type(net).__name__ != "QwenImageControlNetModel"

    def __call__(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if kwargs.get(_SCALED, 1) != 0 or kwargs.get("return_dict", True):
            return forward(*args, **kwargs)
        step, steps = self._position()
        if all(step > max(self._control.steps(at, steps), default=-1) for at in self._pictures):
            self._leave(self._name)
        # Without dimensions: they add nothing to anything, and change no type.
        zero = kwargs["hidden_states"].new_zeros(())
        made: list[tuple[torch.Tensor, ...] | None] = [(zero,) * count or None for count in self._counts]
        return tuple(made) if self._in_tuple else made[0]
