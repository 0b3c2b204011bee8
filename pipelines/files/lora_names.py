"""Whose names a LoRA's weights have, and where they belong in a pipeline's modules.

Names of the pipeline's own modules are taken as they are: diffusers', peft's, and kohya's with their underscores. A
family that converts the names of its files has those converted likewise. All others go through the conversion that
diffusers has for the class of the pipeline.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.units.weights import Stored
from .checkpoint import Places

Tensors = dict[str, torch.Tensor]
Converters = Mapping[str, Callable[[Places], Places]]
_NAMED = re.compile(
    r"(?P<path>.+?)\.(?:(?:lora_(?P<ab>[AB])|(?:lora|lora_linear_layer)[._](?P<way>down|up))(?:\.default)?\.(?P<kind>weight|bias)|(?P<alpha>alpha))"
)
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.")
_KOHYA = re.compile(r"lora_(?:unet|transformer|te(?P<encoder>[12]?))_(?P<path>[\w-]+)")
_NUMBERS = {"": ("", "1"), "_2": ("2",)}  # of text encoders, ours and kohya's
_CLIP = "text_model."  # which some versions of transformers have in the names of its layers, and others have not
_SPAN = 2**40  # bytes, more than any weight has


@dataclass
class Found:
    """What a file has for one module, until it is whole."""

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: float | None = None


def by_own_names(
    path: Path, tensors: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, Found]] | None:
    """What is named by the modules themselves; None if anything is named otherwise."""
    places, kohya = _places(modules)
    found: dict[str, dict[str, Found]] = {}
    for name, tensor in tensors.items():
        if (match := _NAMED.fullmatch(name)) is None:
            return None
        target = _plain(match["path"])
        under = _KOHYA.fullmatch(target)
        place = kohya.get((under["encoder"], under["path"])) if under else places.get(target)
        if place is None:
            return None
        _note(path, found.setdefault(place[0], {}).setdefault(place[1], Found()), match, tensor, name)
    return found


Place = tuple[str, str]  # component, path of the module


def _places(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Place], dict[tuple[str | None, str], Place]]:
    """Where what is named belongs: by whole names, and by those of kohya with the number of the text encoder.

    Names without a component are of the first.
    """
    places: dict[str, Place] = {}
    flat: dict[tuple[str | None, str], set[Place]] = {}
    for component, module in modules.items():
        _, encoder, number = component.partition("text_encoder")
        for name in _layers(module):
            place = component, name
            alias = name if name.startswith(_CLIP) else f"{_CLIP}{name}"
            for known in (name, alias) if encoder else (name,):
                places[f"{component}.{known}"] = place
                for said in _NUMBERS.get(number, ()) if encoder else ():
                    flat.setdefault((said, known.replace(".", "_")), set()).add(place)
            if not encoder and places.setdefault(name, place) == place:
                flat.setdefault((None, name.replace(".", "_")), set()).add(place)
    return places, {name: next(iter(found)) for name, found in flat.items() if len(found) == 1}


def _layers(module: nn.Module) -> list[str]:
    """The paths of the modules that a LoRA may be for."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return [name for name, inner in module.named_modules() if isinstance(inner, kinds)]


def _plain(name: str) -> str:
    """A name without what trainers put ahead of it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _note(path: Path, found: Found, match: re.Match[str], tensor: torch.Tensor, name: str) -> None:
    if match["alpha"]:
        if tensor.numel() != 1:
            raise ValueError(f"{path} has {name} as {list(tensor.shape)} where it must be one number.")
        found.alpha = float(tensor.item())
        return
    is_down = match["ab"] == "A" or match["way"] == "down"
    slot = ("down" if is_down else "up") if match["kind"] == "weight" else "bias"
    if getattr(found, slot) is not None or (slot == "bias" and is_down):
        raise ValueError(f"{path} has {name} beside another of its kind. Get the LoRA from elsewhere.")
    setattr(found, slot, tensor)


# As the family converts weights


def by_weights(
    path: Path, tensors: Tensors, modules: Mapping[str, nn.Module], converters: Converters
) -> dict[str, dict[str, Found]] | None:
    """What is named as the weights in the files of a family are; None if anything is not.

    Where one of those becomes several, such as queries, keys and values, each gets its rows of B, and all of A.
    """
    (component, convert), *others = converters.items()
    given: dict[str, Found] = {}
    for name, tensor in tensors.items():
        if others or (match := _NAMED.fullmatch(name)) is None:
            return None
        _note(path, given.setdefault(_plain(match["path"]), Found()), match, tensor, name)
    layers = [name for name, found in given.items() if found.up is not None and found.up.ndim == 2]
    ups: list[Any] = [given[name].up for name in layers]
    # Each where no other could be: what becomes of it is known by where that lies.
    places = {
        f"{name}.weight": Stored(path, i * _SPAN, up.dtype, tuple(up.shape))
        for i, (name, up) in enumerate(zip(layers, ups, strict=True))
    }
    try:
        converted = convert(places)
    except (LookupError, ValueError, RuntimeError):
        return None
    names, found, rows = _layers(modules[component]), {}, Counter[int]()
    strange = list(given.keys() - set(layers))
    for weight, at in converted.items():
        i, offset = divmod(at.offset, _SPAN)
        first, target = offset // (ups[i].shape[1] * at.dtype.itemsize), weight.removesuffix(".weight")
        if target not in names or at.shape[1:] != ups[i].shape[1:]:
            strange.append(layers[i])
            continue
        part, whole = slice(first, first + at.shape[0]), given[layers[i]]
        bias = None if whole.bias is None else whole.bias[part]
        found[target] = Found(whole.down, ups[i][part], bias, whole.alpha)
        rows[i] += at.shape[0]
    strange += [name for i, name in enumerate(layers) if rows[i] != ups[i].shape[0]]
    if strange and found:
        raise ValueError(
            f"{path} has weights that {type(modules[component]).__name__} has no place for, such as {strange[0]}. "
            "It is of another model, or changes more than can be run exactly."
        )
    if not found:
        return None
    return {component: found}


# Conversion by diffusers


def by_conversion(
    path: Path, tensors: Tensors, pipeline_class: Any, modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, Found]]:
    convert, known_as = (
        getattr(pipeline_class, "lora_state_dict", None),
        getattr(pipeline_class, "__name__", "this pipeline"),
    )
    if convert is None:
        raise ValueError(
            f"{path} has weights that {known_as} has no place for, such as {_stranger(tensors, modules)}. "
            "It is of another model, or its names are not those of diffusers."
        )
    converted, unused = _converted(path, tensors, convert, known_as)
    found = by_own_names(path, converted, modules) if converted else None
    if found is None:
        name = _stranger(converted or tensors, modules)
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


def _converted(path: Path, tensors: Tensors, convert: Any, known_as: str) -> tuple[Tensors, list[str]]:
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
            made = convert(given, return_alphas=True, return_lora_metadata=True)
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


def _stranger(tensors: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> str:
    """The first name that is not understood."""
    one = Path()
    names = (name for name, tensor in tensors.items() if by_own_names(one, {name: tensor}, modules) is None)
    return next(names, next(iter(tensors), "nothing"))
