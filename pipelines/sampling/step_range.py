"""Part of the steps of a run: it ends early, or goes on from the latents that another run left.

The noise levels are those of all steps, of which the scheduler is handed a part. The latents that cross the cut are
those of the loop, in the pipeline's own layout, and no noise is added to them. So runs of steps 0..k and k..n are one
run of n steps, to the bit, where a step follows from the latents before it alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .guidance_range import GuidanceRange

if TYPE_CHECKING:
    import torch

START_STEP, END_STEP = "start_step", "end_step"  # options of `sample`
STEP_RANGE = "step_range"  # the argument of `denoise` that they become

_SOLVERS = ("euler", "heun")  # of FlowSampler, whose steps follow from the latents alone
# Options of diffusers that count steps, and would count those of each part anew.
_AGAINST = ("skip_guidance_layers", "cfg_trunc_ratio", "guidance_schedule", "control_guidance_start",
            "control_guidance_end", "timesteps")  # fmt: skip
_MARK = "_ballast_step_range"  # attribute of latents that a run left before its last step


@dataclass(frozen=True)
class StepRange:
    """The steps from `start` to `end` of `steps`, counted from 0; `end` is not among them.

    A scheduler is called `order` times a step, and once in the last. `loop` is the dtype of the latents that cross the
    cut, where it is known, and `model` that of the run: some loops begin in float32, and go on in another (Wan).
    """

    start: int
    end: int
    steps: int
    order: int = 1
    loop: torch.dtype | None = None
    model: torch.dtype | None = None

    @property
    def whole(self) -> int:
        """The calls of all steps."""
        return self.order * self.steps - self.order + 1

    @property
    def first(self) -> int:
        """The number of the first call that runs, of all calls counted from 0."""
        return self.order * self.start

    @property
    def calls(self) -> int:
        """The calls that run."""
        return min(self.order * self.end, self.whole) - self.first

    @property
    def ends_early(self) -> bool:
        """Return whether steps are left when it ends."""
        return self.end < self.steps

    def guided(self, part: GuidanceRange) -> int:
        """Return how many of the calls that run are guided."""
        return sum(part.holds(self.first + call, self.whole) for call in range(self.calls))

    def cut(self, scheduler: Any) -> None:
        """Make a scheduler step through this part of its noise levels, from its next `set_timesteps` on."""
        cls = type(scheduler)

        @functools.wraps(cls.set_timesteps)
        def set_timesteps(own: Any, *args: Any, **kwargs: Any) -> None:
            cls.set_timesteps(own, *args, **kwargs)
            if (found := len(own.timesteps)) != self.whole:
                raise RuntimeError(f"the schedule has {found} steps, not {self.whole}. Leave start_step and end_step "
                                   "out.")  # fmt: skip
            stop = self.first + self.calls
            own.sigmas, own.timesteps = own.sigmas[self.first : stop + 1], own.timesteps[self.first : stop]

        scheduler.__class__ = type(cls.__name__, (cls,), {"set_timesteps": set_timesteps, "__module__": cls.__module__})


def steps_between(title: str, scheduler: Any, steps: int, options: Mapping[str, Any]) -> StepRange | None:
    """Return the part of the steps that options of `sample` ask for, or None for all of them.

    `scheduler` is that of the run, which has `steps` of them. Raises ValueError, in one line, where it is not taken.
    """
    start, end = options.get(START_STEP) or 0, options.get(END_STEP)
    end = steps if end is None else end
    for name, value in ((START_STEP, start), (END_STEP, end)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} is {str(value)[:80]!r}; it takes a whole number.")
    if not 0 <= start < end <= steps:
        raise ValueError(
            f"start_step is {start} and end_step is {end}; of {steps} steps they take 0 <= start_step < end_step <= "
            f"{steps}."
        )
    if (start, end) == (0, steps):
        return None
    if against := ", ".join(name for name in _AGAINST if options.get(name) is not None):
        raise ValueError(f"start_step and end_step do not go together with {against}. Leave one of them out.")
    if (kind := _keeps_more(scheduler)) is not None:
        raise ValueError(
            f"{title} takes no start_step and no end_step with {kind}: its steps need earlier ones, or draw noise, and "
            "neither is there after the cut. Give scheduler euler or heun."
        )
    return StepRange(int(start), int(end), steps, getattr(scheduler, "order", 1))


def _keeps_more(scheduler: Any) -> str | None:
    """Return the name of a scheduler whose steps follow from more than the latents, None for any other."""
    name = type(scheduler).__name__
    if name == "FlowSampler":
        return None if scheduler.solver_name in _SOLVERS else str(scheduler.solver_name)
    if name == "FlowMatchEulerDiscreteScheduler":
        return f"{name} (stochastic_sampling)" if scheduler.config.get("stochastic_sampling") else None
    return None if name == "FlowMatchHeunDiscreteScheduler" else name


def mark(latents: torch.Tensor, part: StepRange) -> None:
    """Note on latents that `part` left them before the last step, in the dtype of its `loop`."""
    setattr(latents, _MARK, part)


def left_by(latents: torch.Tensor) -> StepRange | None:
    """Return the part of a run that left these latents before the last step, None for any others."""
    found: StepRange | None = getattr(latents, _MARK, None)
    return found


def going_on(part: StepRange | None, latents: torch.Tensor | None) -> StepRange | None:
    """Return the part of a run that goes on from these latents, in the dtype of their loop if the run has the same.

    Raises ValueError, in one line, where they do not go together.
    """
    starts = part is not None and part.start > 0
    if latents is None and starts:
        assert part is not None
        raise ValueError(
            f"start_step is {part.start}, but there is nothing to go on from. Give latents that a run "
            "left at this step."
        )
    if latents is None:
        return part
    if part is None or not starts:
        raise ValueError("latents are given, but no start_step to go on at. Give both; for the noise to start from, "
                         "give noise.")  # fmt: skip
    left = left_by(latents)
    if left is not None and left.end * part.steps != part.start * left.steps:
        raise ValueError(
            f"the latents were left at step {left.end} of {left.steps}, and this run goes on at step {part.start} of "
            f"{part.steps}. Give start_step {left.end} and steps {left.steps}."
        )
    return replace(part, loop=left.loop) if left is not None and left.model == part.model else part
