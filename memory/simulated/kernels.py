"""Kernels of the simulated accelerator that torch calls below `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dispatch import copy_between, data_may_be_set, read_item
from .lazy import copies
from .tensor import SimTensor, wrap

_PINNED = "_ballast_pinned"

# Operators without a tensor argument. Most factories (zeros, full, randn, ...) are made of `empty` and a
# fill; these are the ones whose default would first make an empty tensor and then resize it.
_FACTORIES = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace",
    "logspace", "range", "range.step", "eye", "eye.m", "randperm", "randperm.generator", "tril_indices",
    "triu_indices", "hann_window", "hann_window.periodic",
)  # fmt: skip


def _factory(func: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> SimTensor:
        kwargs.pop("pin_memory", None)
        if torch.device(kwargs["device"]).index:
            raise RuntimeError(f"invalid device {kwargs['device']}: there is only sim:0")
        return wrap(func(*args, **{**kwargs, "device": "cpu"}))

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    copy_between(target, source, not non_blocking)
    return target


def _sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Run attention under autograd: one operator unless a gradient is required, else the decomposed one."""
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    pinned = tensor.clone(memory_format=torch.contiguous_format)
    setattr(pinned.untyped_storage(), _PINNED, True)
    return pinned


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    storage = tensor.untyped_storage()
    return hasattr(storage, _PINNED) or copies.is_registered(storage.data_ptr())


def register(library: torch.library.Library) -> None:
    """Register the kernels that torch calls below `__torch_dispatch__`."""
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _factory(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", lambda tensor: read_item(None, (tensor,), {}), "PrivateUse1")
    library.impl("scaled_dot_product_attention", _sdpa, "AutogradPrivateUse1")
    library.impl("_has_compatible_shallow_copy_type", data_may_be_set, "AutogradPrivateUse1")
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
