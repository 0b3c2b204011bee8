"""Check the options of `sample`, some of which only one family knows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from typing import Any

import torch

TRUE_CFG = "true_cfg"

# Those of the families that have a loop of their own, and one of a kind of models.
OWNERS = {
    TRUE_CFG: "guidance-distilled models (others take guidance)",
    **dict.fromkeys(("sampler", "shift", "cfg_trunc", "renorm_cfg", "denoise"), "NewBie"),
    **dict.fromkeys(
        ("first_frame_steps", "video_steps", "video_guidance", "linear_guidance", "guidance_alpha", "min_guidance"),
        "Pyramid-Flow",
    ),
}

# What stands for arguments of diffusers' pipelines here.
_INSTEAD = {
    **dict.fromkeys(("callback", "callback_on_step_end", "callback_on_step_end_tensor_inputs"), "on_step"),
    **dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), "a list of prompts, to encode"),
    **dict.fromkeys(("guidance_scale", "distilled_guidance_scale", "true_cfg_scale"), "guidance"),
    **dict.fromkeys(("num_frames", "video_length"), "frames"),
    "generator": "seed, or noise",
    "latents": "noise",
    "num_inference_steps": "steps",
}
_LISTS = {"sigmas", "timesteps"}  # of a schedule: an empty one counts as none for some code, and not for other
_COUNTS = {"max_sequence_length"}


class UnknownOptionError(TypeError):
    """Options that the model `title` does not know: `names`."""

    def __init__(self, title: str, names: Iterable[str], known: Collection[str]) -> None:
        self.title, self.names = title, tuple(names)
        foreign = [f"{name} is for {OWNERS[name]}, not for {title}: leave it out." for name in names if name in OWNERS]
        instead = _INSTEAD | ({"true_cfg_scale": TRUE_CFG} if TRUE_CFG in known else {})
        foreign += [f"{name}: give {instead[name]} instead." for name in names if name in instead]
        strange = ", ".join(name or "''" for name in self.names if name not in OWNERS and name not in _INSTEAD)
        takes = f"It takes: {', '.join(sorted(known)) or 'none'}."
        super().__init__(" ".join([*foreign, *([f"{title} has no argument {strange}. {takes}"] if strange else [])]))


class ForeignOptionError(TypeError):
    """Options of opening that models of the family `family` do not have: `names`."""

    def __init__(self, family: str, names: Iterable[str], known: Collection[str]) -> None:
        self.names = tuple(names)
        takes = ", ".join(known) or "nothing of its own"
        super().__init__(f"{family} takes no {', '.join(self.names)}. It takes {takes}.")


def check_known(title: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise UnknownOptionError for options that are not among the known ones."""
    if unknown := sorted(set(options) - set(known)):
        raise UnknownOptionError(title, unknown, known)


def check_numbers(whole: Mapping[str, Any], scales: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for sizes and counts that are no whole numbers, and for scales that are none.

    None of them is what the pipeline is made for.
    """
    for name, value in whole.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{name} is {str(value)[:80]!r}; it takes a whole number.")
    for name, scale in scales.items():
        number = isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale)
        if scale is not None and not number:
            raise ValueError(f"{name} is {str(scale)[:80]!r}; it takes a number.")


def check_values(options: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for values that stock code would take for something else, or fail on late."""
    for name in _LISTS & options.keys():
        # A name of sigmas is known to those models that take one.
        if options[name] is not None and not is_list(options[name]) and not _is_name(name, options[name]):
            raise ValueError(f"{name} is {str(options[name])[:80]!r}; it takes a list of numbers.")
    most = {name: options[name] for name in _COUNTS & options.keys()}
    check_numbers(most, {})
    for name, value in most.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it takes at least 1.")


def steps_of(steps: int | None, default: int, options: Mapping[str, Any]) -> int:
    """Return the number of steps: that asked for, or that of a schedule given as a list, which stock code follows.

    Raises ValueError, in one line, where the two differ.
    """
    for name in sorted(_LISTS & options.keys()):
        listed = options[name]
        count = len(listed) if hasattr(listed, "__len__") and is_list(listed) else steps
        if count is not None and steps not in (None, count):
            raise ValueError(f"steps is {steps}, but {name} has {count} values. Leave steps out, or give as many.")
        steps = count
    return default if steps is None else steps


def _is_name(name: str, value: Any) -> bool:
    return name == "sigmas" and isinstance(value, str)


def is_list(value: Any) -> bool:
    """Return whether a value is a list of numbers, in any form."""
    try:
        numbers = [] if isinstance(value, str) else [float(each) for each in value]
    except (TypeError, ValueError, RuntimeError):
        return False
    return bool(numbers) and all(map(math.isfinite, numbers))


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Run as if the caller had not set another default device or type of torch, which files and stock code count on."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    with ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


def plain_number(value: Any) -> Any:
    """Return a number of NumPy, or any other kind, as Python's own; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_stage(title: str, options: Iterable[str], for_text: Collection[str]) -> None:
    """Raise TypeError for options of `sample` that only encoding reads, and would have no effect there."""
    if misplaced := sorted(set(options) & set(for_text)):
        raise TypeError(f"{', '.join(misplaced)}: {title} reads this when it encodes the prompt. Give it to encode.")
