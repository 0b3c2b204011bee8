"""Names in LoRA files: the role of each tensor, its layer, and the module of a pipeline with that name.

Known are the names of diffusers and peft, with what trainers put ahead of them, those of kohya and LyCORIS with their
underscores, and ComfyUI's for text encoders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ...memory.weights.changes import LAYERS, own_parameters, takes_changes
from ..files.wrappers import unwrapped

Place = tuple[str, str]  # component, path of the module or of its bare parameter

_NAMED = re.compile(
    r"(?P<path>.+?)\.(?:"
    r"(?:lora_(?P<ab>[AB])(?:\.[\w-]+)?|(?:lora|lora_linear_layer)[._](?P<way>down|up|mid)(?:\.default)?)"
    r"\.(?P<kind>weight|bias)|"  # of peft, which may put the adapter's name between
    r"lora_(?P<bare>[AB])|"  # of Mochi's own trainer
    r"(?P<part>hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|diff(?:_[bm])?|[wb]_norm)(?:\.default)?|"
    r"(?P<alpha>alpha))"
)
_UNDERSCORED = re.compile(r"lora_|lycoris_")
_WAYS = {"A": "down", "B": "up"}
_NORMS = {"w_norm": "diff", "b_norm": "diff_b"}  # of LyCORIS
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "pipe.dit.")
_FLAT = re.compile(r"(?:lycoris|lora_(?:unet|transformer|te(?P<encoder>[1234]?)))__?(?P<path>[^\W_][\w-]*)")
_COMFYUI = re.compile(r"text_encoders\.(?P<kind>\w+)\.transformer\.(?P<path>.+)")
_TEXT = re.compile(r"text_encoders?[._\d]|lora_te\d?_")
_NUMBERS = {"": ("", "1")}  # of text encoders in names with underscores; of others that of the component
_CLIPS = {"": "clip_l", "_2": "clip_g"}  # as ComfyUI calls them
_OTHER = "t5"  # in place of ComfyUI's name for any encoder that is no CLIP
_T5 = "3"  # for kohya, whichever encoder it is; for OneTrainer it has the number of its component
_CLIP = "text_model."  # which some versions of transformers have in the names of its layers, and others have not
_BODY = "model."  # of a language model without its head


def parsed(name: str) -> tuple[str, str] | None:
    """Split a name into its layer and its part, such as "down", "lokr_w1", "diff" or "alpha"; else return None."""
    if (match := _NAMED.fullmatch(unwrapped(name))) is None:
        return None
    if match["alpha"]:
        return match["path"], "alpha"
    if match["part"] == "diff_m":  # of Wan's bare parameters
        return match["path"] + ("_" if _UNDERSCORED.match(match["path"]) else ".") + "modulation", "diff"
    if match["part"]:
        return match["path"], _NORMS.get(match["part"], match["part"])
    way = match["way"] or _WAYS[match["ab"] or match["bare"]]
    return match["path"], way if match["kind"] != "bias" else "bias" if way == "up" else f"{way}_bias"


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


def targets(module: nn.Module) -> set[str]:
    """Return the targets of a LoRA: modules by their paths, and parameters that are of no layer by theirs."""
    found: set[str] = set()
    for path, inner in module.named_modules():
        if takes_changes(inner):
            start = f"{path}." if path else ""
            found |= {path} - {""}
            found |= set() if isinstance(inner, LAYERS) else {f"{start}{name}" for name in own_parameters(inner)}
    return found


class OwnNames:
    """Every name of every target in a pipeline's modules. Names without a component are of the first that has them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: dict[str, Place | None] = {}  # None: more than one target has the name
        for component, module in modules.items():
            _, encoder, number = component.partition("text_encoder")
            for path in targets(module):
                if encoder:
                    self._add_text((component, path), number, type(module).__name__.startswith("CLIP"))
                else:
                    self._add((component, path))

    def place(self, layer: str) -> Place | None:
        """Return the target that a layer's name is for, or None if there is none or more than one."""
        name = plain(layer)
        if (place := self._places.get(name)) is not None:
            return place
        if under := _FLAT.fullmatch(name):
            return self._places.get(_underscored(under["encoder"], under["path"]))
        if theirs := _COMFYUI.fullmatch(name):
            kind = theirs["kind"] if theirs["kind"] in _CLIPS.values() else _OTHER
            return self._places.get(_of_comfyui(kind, theirs["path"]))
        return None

    def named(self, names: Iterable[str]) -> dict[str, tuple[Place, str]]:
        """Return the target and the role of each tensor, by its name, but for those without."""
        found = {}
        for name in names:
            if (split := parsed(name)) and (place := self.place(split[0])):
                found[name] = place, split[1]
        return found

    def is_layer(self, name: str) -> bool:
        """Return whether a name is that of a layer, not of a norm or of a bare parameter."""
        if (place := self.place(name)) is None:
            return False
        try:
            return isinstance(self._modules[place[0]].get_submodule(place[1]), LAYERS)
        except AttributeError:  # of a parameter
            return False

    def _add(self, place: Place) -> None:
        component, path = place
        self._places[f"{component}.{path}"] = place
        if "unet" not in self._modules:  # of older trainers, which call any denoiser so
            self._places.setdefault(f"unet.{path}", place)
        if self._places.setdefault(path, place) == place:
            self._share(_underscored(None, path), place)

    def _add_text(self, place: Place, number: str, is_clip: bool) -> None:
        numbers = {*_NUMBERS.get(number, (number.removeprefix("_"),)), *(() if is_clip else (_T5,))}
        for path in _aliases(place[1], _CLIP if is_clip else _BODY):
            self._places[f"{place[0]}.{path}"] = place
            for each in numbers:
                self._share(_underscored(each, path), place)
            self._share(_of_comfyui(_CLIPS.get(number, _OTHER) if is_clip else _OTHER, path), place)

    def _share(self, name: str, place: Place) -> None:
        self._places[name] = place if self._places.setdefault(name, place) == place else None


def _underscored(encoder: str | None, path: str) -> str:
    return f"lora_{'unet' if encoder is None else f'te{encoder}'}_{path.replace('.', '_')}"


def _of_comfyui(kind: str, path: str) -> str:
    return f"text_encoders.{kind}.transformer.{path}"


def _aliases(path: str, around: str) -> Iterator[str]:
    """Yield the names of a text encoder's layer, with and without the prefix of the model around it."""
    yield path
    yield path.removeprefix(around) if path.startswith(around) else f"{around}{path}"
