"""Names that diffusers has a conversion for: that of the class of a pipeline, watched so that nothing is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .lora_names import ByComponent, by_own_names, stranger
from .lora_parts import Tensors


def by_conversion(path: Path, tensors: Tensors, pipeline_class: Any, modules: Mapping[str, nn.Module]) -> ByComponent:
    convert, known_as = (
        getattr(pipeline_class, "lora_state_dict", None),
        getattr(pipeline_class, "__name__", "this pipeline"),
    )
    if convert is None:
        raise ValueError(
            f"{path} has weights that {known_as} has no place for, such as {stranger(tensors, modules)}. "
            "It is of another model, or its names are not those of diffusers."
        )
    # What the blocks of a UNet are numbered by; others take it for an option of the hub.
    options = {"unet_config": modules["unet"].config} if "unet" in modules else {}
    converted, unused = _converted(path, tensors, convert, known_as, options)
    found = by_own_names(path, converted, modules) if converted else None
    if found is None:
        name = stranger(converted or tensors, modules)
        raise ValueError(
            f"{path} has weights that {known_as} has no place for, such as {name}. "
            "It is of another model, or changes more than can be run exactly."
        )
    if unused:
        raise ValueError(
            f"{path} has {len(unused)} weights that diffusers leaves out for {known_as}, such as "
            f"{unused[0]}. It is of another model, or changes more than can be run exactly."
        )
    return found


def _converted(
    path: Path, tensors: Tensors, convert: Any, known_as: str, options: Mapping[str, Any]
) -> tuple[Tensors, list[str]]:
    """The weights as diffusers names and scales them, and the names of those that went into none."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    with torch.inference_mode(False), torch.enable_grad():  # which knows what was made of what
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not name.endswith("alpha")
        }
        given = {name: leaves[name].clone() if name in leaves else tensor for name, tensor in tensors.items()}
        try:
            made = convert(given, return_alphas=True, return_lora_metadata=True, **options)
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{path} cannot be converted by diffusers for {known_as} ({why}).") from error
        state = dict(made[0])
        alphas = next((value for value in made[1:] if isinstance(value, dict)), None) or {}
        if state and not any("lora_A" in name or "lora_down" in name for name in state):
            state = convert_unet_state_dict_to_peft(state)
        used = _origins(state.values())
        unused = [name for name, leaf in leaves.items() if id(leaf) not in used]
    state |= {name: torch.as_tensor(value) for name, value in alphas.items()}
    return {name: tensor.detach() for name, tensor in state.items()}, unused


def _origins(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The `id` of all tensors that these were made of."""
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
