"""Copies of the host's modules without what ties them to the host: handles on weights, patches, patchers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Attributes of modules: the host's handles on the weights of its dynamic models, which no copy may share or can make.
_HANDLES = (
    "_v", "_v_block", "_v_signature", "_v_weight", "_v_bias",
    "_prefetch", "_pins", "_pin_state", "weight_lowvram_function", "bias_lowvram_function",
    "dynamic_vbars", "dynamic_pins", "dynamic_patchers",
)  # fmt: skip


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers, by every name that they have."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def float32_copy(patcher: Any) -> nn.Module:
    """Return the module of a patcher with its unpatched weights, in float32 on the CPU.

    Nothing is shared with the first.
    """
    originals = {name: kept.weight for name, kept in patcher.backup.items()}
    originals |= getattr(patcher, "backup_buffers", {})
    originals |= {name: kept[0] for name, kept in getattr(patcher, "hook_backup", {}).items()}

    def float32(name: str, first: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if first.is_floating_point() else first.dtype
        return originals.get(name, first).detach().to("cpu", dtype, copy=True)

    double = _copied(patcher.model, float32, {})
    from comfy import model_management

    getattr(model_management, "archive_model_dtypes", lambda module: None)(double)
    return double


def shapes_of(model: nn.Module) -> nn.Module:
    """Return a copy of a MODEL's module with shapes only.

    Quantized weights become plain ones of the type it computes in.
    """
    computes_in = model.get_dtype_inference()  # type: ignore[operator]
    replaced: dict[int, Any] = {}
    for name, instead in (("model_config", getattr(model, "model_config", None)), ("current_patcher", None)):
        if (held := vars(model).get(name)) is not None:
            replaced[id(held)] = instead
    for part in model.modules():
        for name in ("weight_function", "bias_function"):  # LoRAs of weights that lie in RAM
            if functions := vars(part).get(name):
                replaced[id(functions)] = []
    kept = [part for part in model.children() if part is not getattr(model, "diffusion_model", None)]
    values = {id(tensor) for part in kept for _, tensor in tensors_of(part)}  # of the noise schedule

    def shape(_: str, first: torch.Tensor) -> torch.Tensor:
        if id(first) in values:
            return first.detach().cpu()
        dtype = first.dtype if type(first) in (torch.Tensor, nn.Parameter) else computes_in
        return torch.empty(tuple(first.shape), dtype=dtype, device="meta")

    return _copied(model, shape, replaced)


def _copied(
    module: nn.Module, tensor: Callable[[str, torch.Tensor], torch.Tensor], replaced: Mapping[int, Any]
) -> nn.Module:
    """Return a copy of a module, with `tensor` of the name and the first in the place of each tensor.

    `replaced` has, by `id`, what takes the place of other things.
    """
    memo = dict(replaced)
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
