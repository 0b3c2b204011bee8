"""Copies of the host's modules without what ties them to the host: handles on weights, patches, patchers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

# Of modules: the host's handles on the weights of its dynamic models, which no copy may share or can make.
_HANDLES = (
    "_v", "_v_block", "_v_signature", "_v_weight", "_v_bias",
    "_prefetch", "_pins", "_pin_state", "weight_lowvram_function", "bias_lowvram_function",
    "dynamic_vbars", "dynamic_pins", "dynamic_patchers",
)  # fmt: skip


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers, by every name that they have."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def copied(
    module: nn.Module,
    tensor: Callable[[str, torch.Tensor], torch.Tensor],
    shared: Iterable[Any] = (),
    left_out: Mapping[int, Any] | None = None,
) -> nn.Module:
    """Return a copy of a module, with `tensor` of the name and the first in the place of each tensor.

    `shared` are kept; `left_out` has, by `id`, what takes the place of other things.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared} | dict(left_out or {})
    for name, first in tensors_of(module):
        value = tensor(name, first)
        memo[id(first)] = nn.Parameter(value, requires_grad=False) if isinstance(first, nn.Parameter) else value
    for part in module.modules():
        for handle in _HANDLES:
            held = vars(part).get(handle)
            if held is not None and not isinstance(held, int | str):  # which may be the very objects that others are
                memo[id(held)] = handle
    double = copy.deepcopy(module, memo)
    for part in double.modules():
        for handle in _HANDLES:
            vars(part).pop(handle, None)
    return double.requires_grad_(False)


def shapes_of(model: nn.Module) -> nn.Module:
    """Return a copy of a MODEL's module with shapes only.

    Quantized weights become plain ones of the type it computes in.
    """
    computes_in = model.get_dtype_inference()  # type: ignore[operator]
    left_out: dict[int, Any] = {
        id(patcher): None for patcher in [vars(model).get("current_patcher")] if patcher is not None
    }
    for part in model.modules():
        for name in ("weight_function", "bias_function"):  # LoRAs of weights that lie in RAM
            if functions := vars(part).get(name):
                left_out[id(functions)] = []
    kept = [part for part in model.children() if part is not getattr(model, "diffusion_model", None)]
    values = {id(tensor) for part in kept for _, tensor in tensors_of(part)}  # of the noise schedule
    return copied(
        model,
        lambda _, first: first.detach().cpu() if id(first) in values else _shape(first, computes_in),
        shared=[getattr(model, "model_config", None)],
        left_out=left_out,
    )


def _shape(tensor: torch.Tensor, computes_in: torch.dtype) -> torch.Tensor:
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype if plain else computes_in, device="meta")
