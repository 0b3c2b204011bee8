"""The scheduler that a run is asked for: a sampler, a class or an object, its shift, and its noise levels.

The stock code runs with it as with its own. Names are ComfyUI's, or those of classes of diffusers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..options import check_known, is_list
from .schedules import SCHEDULES

SCHEDULER, SHIFT, SIGMAS = "scheduler", "shift", "sigmas"  # options of `sample`
SAMPLERS = (
    "euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_2m_sde", "unipc", "res_multistep", "lcm", "er_sde",
)  # fmt: skip
CLASSES = (
    "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler",
    "UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
)  # fmt: skip
_UNIPC = "UniPCMultistepScheduler"  # what "unipc" stands for
_BASE = CLASSES[0]
_OF_SIZES = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")  # which pipelines ask a config for
_DEIS = "DEISMultistepScheduler"  # whose own noise levels of a flow stop before the last
_EDGE = 1e-6  # by which classes that take a logarithm of the noise begin below 1, as UniPC does, or end above 0
_TYPICAL_MU = 0.5  # to count steps by, which do not depend on it


@dataclass(frozen=True)
class SchedulerChoice:
    """What a run is asked for. `scheduler` is a name, an object of diffusers, or None for the model's own class.

    `schedule` names noise levels, and `sigmas` are some before they are shifted.
    """

    scheduler: Any = None
    shift: float | None = None
    schedule: str = ""
    sigmas: tuple[float, ...] = ()

    @property
    def is_named(self) -> bool:
        """Return whether the scheduler is made for the run, and is no object that was given."""
        return self.scheduler is None or isinstance(self.scheduler, str)

    def facts(self) -> list[Any]:
        """Return what tells its runs from others, as plain data."""
        chosen = self.scheduler
        if not self.is_named:
            chosen = [type(chosen).__name__, {k: str(v) for k, v in chosen.config.items()}]
        return [chosen, self.shift, self.schedule, list(self.sigmas)]

    def make(self, own: Any) -> Any:
        """Return the scheduler of one run, in place of the model's own."""
        if not self.is_named:
            return copy.deepcopy(self.scheduler)
        if not is_flow(own):
            return _class_of(self.scheduler).from_config(own.config)
        shift = _shift_of(own) if self.shift is None else self.shift
        asked = {"shift": shift, "flow_shift": shift, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        asked |= {} if self.shift is None else {"use_dynamic_shifting": False}
        base = _built(_class_of(_BASE), own, asked)
        cls = type(own) if self.scheduler is None else _class_of(self.scheduler)
        made = _built(_placing(cls, self, base), own, asked)
        if cls.__name__ == "FlowSampler":
            made.solver_name = self.scheduler
        return made

    def calls(self, own: Any, steps: int) -> int:
        """Return how often a run of `steps` calls the scheduler, and the model before it."""
        made = self.make(own)
        taken = inspect.signature(made.set_timesteps).parameters
        config = own.config if self.is_named else made.config
        dynamic = "mu" in taken and config.get("use_dynamic_shifting")
        made.set_timesteps(steps, device="cpu", **({"mu": _TYPICAL_MU} if dynamic else {}))
        return len(made.timesteps)


def is_flow(scheduler: Any) -> bool:
    """Return whether a scheduler is one of flow matching."""
    if type(scheduler).__name__ in CLASSES[:3]:
        return True
    config = scheduler.config
    return config.get("prediction_type") == "flow_prediction" and bool(config.get("use_flow_sigmas"))


def choice_of(title: str, cls: Any, own: Any, options: Mapping[str, Any]) -> tuple[SchedulerChoice | None, set[str]]:
    """Return the scheduler that options of `sample` ask for, None for the model's own, and the options that say so.

    `cls` is the class of the pipeline, `own` its scheduler. Raises ValueError, in one line, for what it does not take.
    """
    asked = {name for name in (SCHEDULER, SHIFT, SIGMAS) if options.get(name) is not None}
    takes = inspect.signature(cls.__call__).parameters
    if asked <= ({SIGMAS} if SIGMAS in takes and is_list(options.get(SIGMAS)) else set()):
        return None, set()  # as the call of the class takes it
    if own is None:
        check_known(title, asked, ())
    scheduler, shift, sigmas = (options.get(name) for name in (SCHEDULER, SHIFT, SIGMAS))
    _check_shift(shift)
    named = sigmas if isinstance(sigmas, str) else ""
    if named and named not in SCHEDULES:
        raise ValueError(f"sigmas is {named[:80]!r}; it takes a list of numbers, or one of {', '.join(SCHEDULES)}.")
    if scheduler is None or isinstance(scheduler, str):
        _check_name(title, cls, own, scheduler)
        if not is_flow(own) and asked - {SCHEDULER}:
            raise ValueError(
                f"{title} takes no {' and no '.join(sorted(asked - {SCHEDULER}))} here: its "
                f"{type(own).__name__} is no flow matching. It takes scheduler: {_known(own)}."
            )
        listed = () if named or sigmas is None else tuple(map(float, sigmas))
        return SchedulerChoice(scheduler, None if shift is None else float(shift), named, listed), asked
    _check_object(scheduler)
    if shift is not None or named:
        what = SHIFT if shift is not None else SIGMAS
        raise ValueError(f"{what} is given, but a scheduler object has its own. Leave it out, or name the scheduler.")
    takes_sigmas = SIGMAS in inspect.signature(scheduler.set_timesteps).parameters
    if sigmas is not None and (SIGMAS not in takes or not takes_sigmas or scheduler.config.get("use_flow_sigmas")):
        raise ValueError(
            f"{title} hands no sigmas to an object of {type(scheduler).__name__}. Leave them out, or name a scheduler."
        )
    return SchedulerChoice(scheduler), {SCHEDULER}


def _check_shift(shift: Any) -> None:
    number = isinstance(shift, Real) and not isinstance(shift, bool) and math.isfinite(shift) and float(shift) > 0
    if shift is not None and not number:
        raise ValueError(f"shift is {str(shift)[:80]!r}; it takes a number above 0.")


def _check_name(title: str, cls: Any, own: Any, name: str | None) -> None:
    if name is not None and name not in _names(own):
        raise ValueError(
            f"{title} takes no scheduler {name[:80]!r}. It takes {_known(own)}, or a scheduler object of diffusers."
        )
    if own.config.get("invert_sigmas"):
        raise ValueError(f"{title} counts its noise upwards. It takes a scheduler object of diffusers, and no other.")
    if name not in (None, _BASE) and _steps_by_token(cls):
        raise ValueError(f"{title} steps each token by a time of its own. It takes scheduler: {_BASE}.")


def _check_object(scheduler: Any) -> None:
    from diffusers import SchedulerMixin

    if not isinstance(scheduler, SchedulerMixin):
        raise ValueError(
            f"scheduler is {str(scheduler)[:80]!r}; it takes a name, such as {', '.join(SAMPLERS)}, or a scheduler "
            "object of diffusers."
        )


def _names(own: Any) -> tuple[str, ...]:
    if is_flow(own):
        return SAMPLERS + CLASSES
    return tuple(sorted({type(own).__name__, *(each.__name__ for each in own.compatibles)}))


def _known(own: Any) -> str:
    return ", ".join(_names(own))


@functools.cache
def _steps_by_token(cls: Any) -> bool:
    """Return whether a pipeline tells its scheduler the time of each token, which only one class takes."""
    try:
        return "per_token_timesteps" in inspect.getsource(cls.__call__)
    except (OSError, TypeError):
        return False


def _class_of(name: str) -> Any:
    import diffusers

    if name in SAMPLERS and name != "unipc":
        from .samplers import FlowSampler

        return FlowSampler
    return getattr(diffusers, _UNIPC if name == "unipc" else name)


def _shift_of(own: Any) -> float:
    """Return the static shift of a scheduler."""
    if hasattr(type(own), "shift"):
        return float(own.shift)
    return float(own.config.get("shift") or own.config.get("flow_shift") or 1.0)


def _built(cls: Any, own: Any, asked: Mapping[str, Any]) -> Any:
    """Return a scheduler of a class, with what it knows of another's config, as `from_config` does, and as asked."""
    default = own.config.get("_use_default_values", ())
    config = {name: value for name, value in own.config.items() if name not in default} | dict(asked)
    taken = inspect.signature(cls.__init__).parameters
    made = cls(**{name: value for name, value in config.items() if name in taken})
    sizes = {name: own.config[name] for name in _OF_SIZES if name in own.config and name not in made.config}
    made.register_to_config(**sizes)
    return made


def _placing(cls: Any, choice: SchedulerChoice, base: Any) -> Any:
    """Return a class that takes the noise levels of a choice, and those that a pipeline hands it, whatever `cls` takes.

    What `cls` does not take, `base` makes of it: one of FlowMatchEulerDiscreteScheduler.
    """
    taken = inspect.signature(cls.set_timesteps).parameters

    def set_timesteps(
        self: Any,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Set the noise levels of the run."""
        mu = mu if base.config.use_dynamic_shifting else None
        sigmas = list(choice.sigmas) or sigmas
        count = num_inference_steps if sigmas is None else len(sigmas)
        own = {"mu": mu, "timesteps": timesteps}
        if timesteps is not None and (choice.schedule or "timesteps" not in taken):
            raise ValueError(
                f"this pipeline sets the times of its steps itself. {cls.__name__} takes none: name another."
            )
        placed = None
        if choice.schedule:
            assert count is not None
            placed = torch.tensor(SCHEDULES[choice.schedule](count, _shift_by(base, mu)), dtype=torch.float32)
        elif SIGMAS in taken:
            own[SIGMAS] = None if sigmas is None else np.asarray(sigmas)
        elif sigmas is not None or (mu is not None and "mu" not in taken) or cls.__name__ == _DEIS:
            assert count is not None
            even = [1.0 + step * (1.0 / count - 1.0) / max(1, count - 1) for step in range(count)]
            base.set_timesteps(count, sigmas=even if sigmas is None else sigmas, mu=mu)
            placed = base.sigmas
        count = count if placed is None else len(placed) - 1
        cls.set_timesteps(self, count, device, **{k: v for k, v in own.items() if k in taken and v is not None})
        if placed is not None:
            _place(self, placed, device, _shift_by(base, mu))

    return type(cls.__name__, (cls,), {"set_timesteps": set_timesteps, "__module__": cls.__module__})


def _shift_by(base: Any, mu: float | None) -> float:
    """Return the static shift that shifts as `mu` does, or that of the base without one."""
    if mu is None:
        return float(base.shift)
    return float(mu) if base.config.time_shift_type == "linear" else math.exp(mu)


def _place(scheduler: Any, sigmas: torch.Tensor, device: Any, shift: float) -> None:
    """Give a scheduler, whose steps are counted, these noise levels with a zero at the end."""
    if hasattr(scheduler, "arrange"):
        scheduler.arrange(sigmas, None, device, shift)
        return
    if "use_flow_sigmas" in scheduler.config:
        sigmas = sigmas.clamp(_EDGE if type(scheduler).__name__ == _DEIS else 0.0, 1 - _EDGE)
    times = sigmas[:-1] * scheduler.config.num_train_timesteps
    if scheduler.order == 2:
        sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
        times = torch.cat([times[:1], times[1:].repeat_interleave(2)])
    scheduler.sigmas, scheduler.timesteps = sigmas, times.to(device, scheduler.timesteps.dtype)
