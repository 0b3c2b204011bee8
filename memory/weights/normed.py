"""Layers whose weight is made of two others at each call, by torch's older weight norm, as those of H3's audio VAE."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


def norm_in_forward(module: nn.Module) -> None:
    """Make such layers in a module compute their weight within `forward`, and keep it no longer than that.

    Torch does so in a hook before that, when weights that are yet to come are not there.
    """
    from torch.nn.utils.weight_norm import WeightNorm

    for layer in module.modules():
        for number, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, WeightNorm):
                del layer._forward_pre_hooks[number]
                vars(layer)["_weight_norm"] = hook
                layer.__class__ = _normed(type(layer))  # type: ignore[arg-type]


@functools.cache
def _normed(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hook: Any = vars(layer)["_weight_norm"]
        before: torch.Tensor = vars(layer)[hook.name]
        vars(layer)[hook.name] = hook.compute_weight(layer)
        try:
            return cls.forward(layer, *args, **kwargs)
        finally:
            vars(layer)[hook.name] = before

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})
