"""Whose names a LoRA's weights have, and where they belong in a pipeline's modules: those of the modules themselves.

Taken as they are: diffusers' and peft's, with what trainers put ahead of them, and kohya's and LyCORIS' with their
underscores. Of text encoders also those of ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ...memory.weights.changes import LAYERS, own_parameters, takes_changes
from .lora_parts import Found, parsed
from .lora_unets import published_names

Place = tuple[str, str]  # component, path of the module
ByComponent = dict[str, dict[str, Found]]

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_FLAT = re.compile(r"(?:lycoris|lora_(?:unet|transformer|te(?P<encoder>[1234]?)))_(?P<path>[\w-]+)")
_COMFYUI = re.compile(r"text_encoders\.(?P<kind>\w+)\.transformer\.(?P<path>.+)")
_TEXT = re.compile(r"text_encoders?[._\d]|lora_te\d?_")
_NUMBERS = {"": ("", "1")}  # of text encoders in names with underscores; of others that of the component
_CLIPS = {"": "clip_l", "_2": "clip_g"}  # as ComfyUI calls them
_T5 = "3"  # for kohya, whichever encoder it is; for OneTrainer it has the number of its component
_CLIP = "text_model."  # which some versions of transformers have in the names of its layers, and others have not
_BODY = "model."  # of a language model without its head


def by_own_names(path: Path, tensors: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> ByComponent:
    """Return the changes named by the modules themselves, and not the others."""
    places = _Places(modules)
    found: ByComponent = {}
    for name, tensor in tensors.items():
        if (named := parsed(name)) is not None and (place := places.of(named[0])) is not None:
            component, target = place
            found.setdefault(component, {}).setdefault(target, Found()).note(path, name, named[1], tensor)
    return found


def names_in(found: ByComponent) -> set[str]:
    """Return the names in the file of all that was found."""
    return {name for parts in found.values() for part in parts.values() for name in part.names}


def without(tensors: Mapping[str, torch.Tensor], found: ByComponent) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that no layer takes."""
    used = names_in(found)
    return {name: tensor for name, tensor in tensors.items() if name not in used}


def layers_among(names: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names that are those of layers of these modules."""
    places = _Places(modules)
    layers = {
        key: {path for path, inner in each.named_modules() if isinstance(inner, LAYERS)}
        for key, each in modules.items()
    }
    return {name for name in names if (place := places.of(name)) and place[1] in layers[place[0]]}


def targets(module: nn.Module) -> set[str]:
    """Return the targets of a LoRA: modules by their paths, and parameters that are of no layer by theirs."""
    found: set[str] = set()
    for path, inner in module.named_modules():
        if takes_changes(inner):
            start = f"{path}." if path else ""
            found |= {path} - {""}
            found |= set() if isinstance(inner, LAYERS) else {f"{start}{name}" for name in own_parameters(inner)}
    return found


def plain(name: str) -> str:
    """Strip the prefixes that trainers put before a name."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def is_of_text(name: str) -> bool:
    """Return whether a name is that of a part of a text encoder."""
    return _TEXT.match(plain(name)) is not None


def flat(name: str) -> str | None:
    """Return the transformer's part of a name with underscores, or None."""
    match = _FLAT.fullmatch(name)
    return match["path"] if match and match["encoder"] is None else None


class _Places:
    """Where what is named belongs. Names without a component are of the first."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._whole: dict[str, Place] = {}
        self._flat: dict[tuple[str | None, str], set[Place]] = {}
        self._comfyui: dict[tuple[str, str], set[Place]] = {}
        for component, module in modules.items():
            _, encoder, number = component.partition("text_encoder")
            published = published_names(module)
            for name in targets(module):
                if encoder:
                    self._add_text(component, name, number, module)
                else:
                    self._add(component, name, [name, published.get(name, name)])

    def of(self, name: str) -> Place | None:
        """Return the layer that a name is for, or None if there is none or more than one."""
        target = plain(name)
        if (place := self._whole.get(target)) is not None:
            return place
        if under := _FLAT.fullmatch(target):
            return _only(self._flat.get((under["encoder"], under["path"])))
        if theirs := _COMFYUI.fullmatch(target):
            named = self._comfyui.get((theirs["kind"], theirs["path"]))
            clip = theirs["kind"] in _CLIPS.values()
            return _only(named if clip else self._comfyui.get(("", theirs["path"])))
        return None

    def _add(self, component: str, name: str, names: Sequence[str]) -> None:
        place = component, name
        for known in names:
            self._whole[f"{component}.{known}"] = place
            if self._whole.setdefault(known, place) == place:
                self._flat.setdefault((None, known.replace(".", "_")), set()).add(place)

    def _add_text(self, component: str, name: str, number: str, module: nn.Module) -> None:
        place = component, name
        is_clip = type(module).__name__.startswith("CLIP")
        said = {*_NUMBERS.get(number, (number.removeprefix("_"),)), *(() if is_clip else (_T5,))}
        for known in _aliases(name, is_clip):
            self._whole[f"{component}.{known}"] = place
            for each in said:
                self._flat.setdefault((each, known.replace(".", "_")), set()).add(place)
            self._comfyui.setdefault((_CLIPS.get(number, "") if is_clip else "", known), set()).add(place)


def _aliases(name: str, is_clip: bool) -> Iterator[str]:
    """Yield the names of a text encoder's layer, with and without the prefix of the model around it."""
    around = _CLIP if is_clip else _BODY
    yield name
    yield f"{around}{name}" if not name.startswith(around) else name.removeprefix(around)


def _only(places: set[Place] | None) -> Place | None:
    return next(iter(places)) if places and len(places) == 1 else None
