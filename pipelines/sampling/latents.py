"""Check latents before a VAE decodes them, and while they are sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...memory.engine.streams import Queues
from ...memory.weights import hostbuffer
from .step_range import left_by

if TYPE_CHECKING:
    from ..models.model import Model
    from .batches import Generators

_MOST = 2**31  # elements; 8 GiB in float32, where the latents of a picture of 16384 x 16384 have 256 MiB

_MOST_DECIBELS = 99.0  # of latents that are alike
_SOUND = "_ballast_sound"  # attribute of latents: those of the sound of each picture or video
_NOISE = "_ballast_noise"  # attribute of latents: the states of the generators that their decoder draws noise of
GENERATOR = "generator"  # the argument of a decoder that draws noise

_NOT_FINITE = (
    "{what} NaN or infinite values, which would be a black picture. Run the models in bfloat16 or float32 instead of "
    "float16 (dtype bfloat16), and check that their files are whole."
)


class WrongLatentsError(ValueError):
    """The latents are those of another model than the VAE's. Nothing is lost by not decoding them."""

    __module__ = "ballast"  # see `DoesNotFitError`


def check_fit(latents: torch.Tensor, vae: str, channels: int | None, dimensions: int, advice: str) -> None:
    """Raise WrongLatentsError for latents that have other channels or dimensions than a VAE takes."""
    has = latents.shape[1] if latents.ndim > 1 else 0
    if latents.ndim != dimensions or channels not in (None, has):
        raise WrongLatentsError(
            f"the latents have {has} channels in {latents.ndim} dimensions; {vae} takes {channels} in {dimensions}. "
            f"{advice}"
        )


def check_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise ValueError, with the remedy, if a tensor holds NaN or infinite values."""
    if not torch.isfinite(tensor).all():
        raise ValueError(_NOT_FINITE.format(what=what))


def note_sound(latents: torch.Tensor, sound: Sequence[torch.Tensor]) -> None:
    """Note on latents those of the sound that was drawn with them, for each picture or video of them."""
    if sound:
        setattr(latents, _SOUND, tuple(sound))


def sound_of(latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the latents of the sound of each picture or video; none where a copy was made that has no note of it."""
    found: tuple[torch.Tensor, ...] = getattr(latents, _SOUND, ())
    return found if len(found) == len(latents) else ()


def note_noise(latents: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    """Note on latents the states of the run's generators, one of each picture or one of all, as `noise_of` has them."""
    if states:
        setattr(latents, _NOISE, tuple(states))


def noise_of(latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the states that generators had when the call was to decode; none where a copy was made without them."""
    found: tuple[torch.Tensor, ...] = getattr(latents, _NOISE, ())
    return found if len(found) in (1, len(latents)) else ()


def states_of(drawing: Generators | None) -> list[torch.Tensor]:
    """Return the states of generators, each uint8 [bytes]."""
    return [one.get_state() for one in (drawing if isinstance(drawing, list) else [drawing]) if one is not None]


def generator_in(state: torch.Tensor) -> torch.Generator:
    """Return a new generator in this state."""
    return torch.Generator("cpu").set_state(state)


def decibels(latents: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of latents, whose peak is the range of those expected; 99 at most."""
    error = float((latents.double() - expected.double()).square().mean())
    peak = float(expected.max() - expected.min())
    return min(_MOST_DECIBELS, 10 * math.log10(peak**2 / error)) if error and peak else _MOST_DECIBELS


def check_seed(seed: Any) -> None:
    """Raise ValueError for a seed that is no whole number of 64 bits."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ValueError(
            f"seed is {str(seed)[:80]}; it takes one whole number of 64 bits. For noise of your own, give noise."
        )


def check_noise(noise: Any, shape: Sequence[int] | None = None) -> None:
    """Raise TypeError or ValueError for noise that is no dense tensor in floating point, or has another shape."""
    if not isinstance(noise, torch.Tensor):
        raise TypeError(f"the noise is {type(noise).__name__}; give a tensor, or a seed.")
    if noise.is_nested or noise.layout != torch.strided or noise.is_meta or not noise.is_floating_point():
        raise ValueError("the noise is not a dense tensor of floating-point numbers. Give one, or a seed.")
    if shape is not None and tuple(noise.shape) != tuple(shape):
        raise ValueError(f"the noise is {list(noise.shape)}; this run takes {list(shape)}. Give that, or a seed.")


class StepCheck:
    """Looks for NaN and infinite values that steps made, each while the device computes the next one."""

    def __init__(self) -> None:
        self._asked: tuple[torch.Tensor, Any, str] | None = None

    def check(self, latents: torch.Tensor, step: int, steps: int) -> None:
        """Raise ValueError, naming it, if the step before made such values, or this one where it is the last.

        The host waits for the device to have done the step before.
        """
        self.finish()
        if latents.device.type == "meta":  # a dry run
            return
        queues = Queues(latents.device)
        event = queues.event()
        found = latents.sum(dtype=torch.float32)  # no tensor of their size is made for it
        if event:
            on_host = torch.empty_like(found, device="cpu")
            on_host = on_host.pin_memory() if hostbuffer.wants_pinned(found.device) else on_host
            found = on_host.copy_(found, non_blocking=True)
            queues.mark(event)
        self._asked = found, event, f"step {step} of {steps} made"
        if event is None or step >= steps:
            self.finish()

    def finish(self) -> None:
        """Raise ValueError if the last step made such values. Waits for the device to have done it."""
        if self._asked is None:
            return
        (found, event, what), self._asked = self._asked, None
        if event:
            event.synchronize()
        if not math.isfinite(float(found)):
            raise ValueError(_NOT_FINITE.format(what=what))


def samples_of(latent: Any) -> Any:
    """Return a LATENT's samples. Raises TypeError or ValueError, in one line, for anything else."""
    if not isinstance(latent, Mapping):
        raise TypeError(f"latent is {type(latent).__name__}, not a LATENT. Connect a sampler or FP32 VAE Encode.")
    if latent.get("samples") is None:
        raise ValueError("latent has no samples: it is damaged, or no LATENT. Connect a sampler or FP32 VAE Encode.")
    return latent["samples"]


def check_latents(latents: Any) -> None:
    """Raise TypeError or ValueError, in one line, for what is no dense tensor of numbers in memory."""
    if not isinstance(latents, torch.Tensor):
        raise TypeError(f"the latents are {type(latents).__name__}, not a tensor. Sample with this pipeline first.")
    kind = None
    if latents.is_nested or latents.layout != torch.strided:
        kind = "nested or sparse"
    elif latents.is_meta:
        kind = "on meta, without values"
    elif not latents.is_floating_point():
        kind = str(latents.dtype)
    elif not 0 < latents.numel() <= _MOST:
        kind = f"of {latents.numel()} elements"
    if kind:
        raise ValueError(f"the latents are {kind}; a VAE takes dense ones in floating point. Sample them again.")


def check_decodable(model: Model, latents: Any) -> None:
    """Raise TypeError or ValueError, in one line, for what a model cannot decode."""
    model.check_ready()
    check_latents(latents)
    if (left := left_by(latents)) is not None:
        raise ValueError(
            f"the latents were left at step {left.end} of {left.steps}, and are no picture yet. Sample the rest of the "
            f"steps first, with start_step {left.end}."
        )
    takes = model.decoder_config.get("latent_channels") or model.decoder_config.get("z_dim")
    advice = "Sample and decode with the same pipeline."
    check_fit(latents, f"the VAE of {model.title}", takes, model.latent_dimensions, advice)
    check_finite(latents, "the latents hold")
