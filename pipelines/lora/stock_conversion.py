"""Names that only diffusers has a conversion for: that of the class of a pipeline, watched so that nothing is left out.

Several of its conversions drop alphas, so that they are given none: ours are multiplied in before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .layer_tensors import LayerTensors, Tensors, grouped
from .names import OwnNames, Place, parsed


def by_conversion(
    path: Path, tensors: Tensors, pipeline_class: Any, modules: Mapping[str, nn.Module], own: OwnNames
) -> dict[Place, LayerTensors]:
    """Return these tensors as diffusers converts them; none if it drops one of them, or finds no place for it."""
    convert = getattr(pipeline_class, "lora_state_dict", None)
    scaled = _scaled(tensors)
    if convert is None or any(name.endswith("alpha") for name in scaled):
        return {}
    # What the blocks of a UNet are numbered by; others take it for an option of the hub.
    options = {"unet_config": modules["unet"].config} if "unet" in modules else {}
    converted = _converted(scaled, convert, options)
    named = own.named(converted)
    return grouped(path, converted, named) if named.keys() == converted.keys() else {}


def _scaled(tensors: Tensors) -> Tensors:
    """Multiply pairs of low rank by their alphas, and leave these out; alphas of anything else stay."""
    names = {key: name for name in tensors if (key := parsed(name))}
    scaled = dict(tensors)
    for (layer, role), name in names.items():
        down, up = (names.get((layer, way)) for way in ("down", "up"))
        if role == "alpha" and down and up and tensors[name].numel() == 1 and tensors[down].shape[0]:
            scaled[up] = tensors[up].float() * (float(scaled.pop(name).item()) / tensors[down].shape[0])
    return scaled


def _converted(tensors: Tensors, convert: Any, options: Mapping[str, Any]) -> Tensors:
    """Name and scale the weights as diffusers does. Return none if it fails, or if a weight went into nothing."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    with torch.inference_mode(False), torch.enable_grad():  # which knows what was made of what
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        try:
            state = convert({name: leaf.clone() for name, leaf in leaves.items()}, **options)
        except Exception:
            return {}
        state = dict(state[0] if isinstance(state, tuple) else state)
        if state and not any("lora_A" in name or "lora_down" in name for name in state):
            state = convert_unet_state_dict_to_peft(state)
        used = _origins(state.values())
    if any(id(leaf) not in used for leaf in leaves.values()):
        return {}
    return {name: tensor.detach() for name, tensor in state.items()}


def _origins(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the `id` of every tensor that these were computed from."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
    return found
