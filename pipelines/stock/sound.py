"""Sound that a model draws beside its pictures: the modules that make it of its latents, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...memory.planning.forecast import Forecast
from ...memory.weights.interpose import interpose
from ...memory.weights.unit import ManagedModel
from ..encoding.conditioning import to_host
from ..files.components import Component
from ..planning.forecasts import Forecaster
from .postprocess import SOUND_TAILS

DECODING_SOUND = "decode sound"  # the name of a stage
_FORWARD = "forward"
_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")  # as configs call it


@dataclass(frozen=True)
class Sound:
    """Sound: `waveform` [B,C,T] in float32 on the CPU, of `sample_rate` samples a second."""

    waveform: torch.Tensor
    sample_rate: int


class Parts(Protocol):
    """The components of a folder, and their units, by name."""

    @property
    def components(self) -> Mapping[str, Component]: ...

    @property
    def units(self) -> Mapping[str, ManagedModel]: ...


@dataclass(frozen=True)
class SoundDecoder:
    """The units that make sound: of each a method is called with what the one before gave, the first with latents.

    `tail` names in SOUND_TAILS what is done with the result of the last.
    """

    calls: tuple[tuple[ManagedModel, str], ...]
    sample_rate: int
    tail: str = ""

    @classmethod
    def of(cls, calls: Sequence[str], tail: str, parts: Parts) -> SoundDecoder | None:
        """Return the decoder of calls such as "audio_vae.decode", or None for none.

        Raises ValueError where no config says how many samples a second the sound has.
        """
        if not calls:
            return None
        parted = [call.rpartition(".") for call in calls]
        for name, _, _ in reversed(parted):
            for rate in _RATES:
                if isinstance(found := parts.components[name].config.get(rate), int):
                    return cls(tuple((parts.units[unit], method) for unit, _, method in parted), found, tail)
        raise ValueError("no config says how many samples a second its sound has")

    @property
    def units(self) -> list[ManagedModel]:
        """The units, in the order of their calls."""
        return [unit for unit, _ in self.calls]

    @property
    def names(self) -> tuple[str, ...]:
        """The calls, such as "audio_vae.decode"."""
        return tuple(f"{unit.name}.{method}" for unit, method in self.calls)

    def run(self, device: torch.device, modules: Mapping[str, nn.Module], latents: torch.Tensor) -> torch.Tensor:
        """Return the waveform [1,C,T] of latents of one sound, in the type of the last unit, while `calling`."""
        made: Any = latents.to(device)
        for unit, _ in self.calls:
            made = modules[unit.name](made)
            made = made if isinstance(made, torch.Tensor) else made[0]
        return as_waveform(SOUND_TAILS[self.tail](made))

    @contextmanager
    def calling(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Redirect the calls of modules to their methods until the block ends, so that weights come for these."""
        with ExitStack() as exits:
            for unit, method in self.calls:
                if method != _FORWARD:
                    module = modules[unit.name]
                    exits.callback(interpose(module, functools.partial(_call_method, getattr(module, method))))
            yield

    def forecast(self, forecaster: Forecaster, latents: torch.Tensor) -> Forecast | None:
        """Return the forecast of `run` on latents of this shape, from the cache or a dry run; None if that fails."""
        key = forecaster.key(stage=DECODING_SOUND, shape=list(latents.shape), calls=list(self.names), tail=self.tail)
        dry = functools.partial(self._dry_run, forecaster, latents)
        return forecaster.forecast(key, DECODING_SOUND, self.units, dry)

    def _dry_run(self, forecaster: Forecaster, latents: torch.Tensor) -> tuple[Forecast, Any]:
        modules = {unit.name: unit.skeleton() for unit in self.units}

        def run(device: torch.device) -> torch.Tensor:
            return to_host(self.run(device, modules, latents).float())

        with self.calling(modules):
            return forecaster.dry_run(modules, run)


def one_after_the_other(sound: Sound, seconds: float) -> torch.Tensor:
    """Return the waveform [1,C,T] of several videos in one, each of which takes so many seconds; one stays as it is."""
    if len(sound.waveform) == 1:
        return sound.waveform
    length = round(seconds * sound.sample_rate)
    cut = sound.waveform[..., :length]
    return torch.cat(nn.functional.pad(cut, (0, length - cut.shape[-1])).split(1), dim=-1)


def as_waveform(sound: torch.Tensor) -> torch.Tensor:
    """Return sound [B,C,T] of that, or of one channel [B,T]."""
    return sound if sound.ndim > 2 else sound.unsqueeze(1)


def _call_method(method: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    return method(*args, **kwargs, return_dict=False)
