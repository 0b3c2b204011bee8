"""Llama's hidden states: what is kept of them, and how HiDream-I1's transformer reads them from RAM."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...encoding.conditioning import to_host


class HiddenStates:
    """Wraps `LlamaModel` for the stock pipeline: computes and keeps only the hidden states that are read.

    What it answers has, of the states after each layer, those of the numbered layers, on the CPU.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers

    def __call__(self, forward: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        output = forward(*args, **{**kwargs, "output_attentions": False, "use_cache": False})
        after = output.hidden_states[1:]
        return BaseModelOutput(hidden_states=(None, *(to_host(after[layer]) for layer in self.layers)))  # type: ignore[arg-type]


def at_their_places(states: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Put the states of the numbered layers [len(layers), B, tokens, channels] where the transformer reads them.

    The places between hold zeros, which it does not read.
    """
    if list(layers) == list(range(len(layers))):
        return states
    every = states.new_zeros(max(layers) + 1, *states.shape[1:])
    every[list(layers)] = states
    return every


class OnDevice:
    """States in RAM [layers, B, tokens, channels], each copied to a device when it is first read.

    Nothing here holds them there: they go when the transformer has projected them, at the start of each step.
    """

    def __init__(self, states: torch.Tensor, device: torch.device) -> None:
        self.states, self.device = states, device
        self._there: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __getitem__(self, layer: int) -> torch.Tensor:
        found = self._there.get(layer)
        if found is None:
            found = self.states[layer].to(self.device)
            self._there[layer] = found
        return found


@functools.cache
def reading_from_ram(cls: type[nn.Module]) -> type[nn.Module]:
    """`HiDreamImageTransformer2DModel`, taking Llama's states in RAM wherever the rest of its inputs is."""

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop("encoder_hidden_states_llama3")
        read = OnDevice(states, hidden_states.device)
        return cls.forward(self, hidden_states, *args, encoder_hidden_states_llama3=read, **kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, "forward": forward})
