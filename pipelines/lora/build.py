"""LoRA files: read, checked, and made the branches of a pipeline's modules.

A file is used whole or not at all: what is in it and has no place is named.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.files import one_line
from ...memory.weights.changes import Change
from ...memory.weights.stored import check_unchanged, file_identity, read_header, refuse_pickle, stamps_of
from .lora_conversion import by_conversion
from .lora_layouts import Converters, by_weights, by_words
from .lora_names import ByComponent, by_own_names, flat, is_of_text, layers_among, names_in, plain, without
from .lora_parts import Found, Tensors, parsed, unwrapped

Branches = dict[str, dict[str, tuple[Change, ...]]]  # by component, by path of the module

_SETTINGS = "lora_adapter_metadata"  # of diffusers, in the header
_REFUSED = {
    "dora_scale": "is a DoRA", "lora_magnitude_vector": "is a DoRA", "oft_": "is an OFT", "boft_": "is a BOFT",
    ".a1.weight": "is a GLoRA", ".on_input": "is an IA3",
    ".set_weight": "sets weights", "reshape_weight": "changes shapes of weights",
}  # fmt: skip
_MOST_TENSORS = 100_000
_MOST_PARTS = 6  # that a message names
_EMBEDDING = "bundle_emb."
_ENDINGS = (".safetensors", ".sft")
_PART = re.compile(r"\.(?:lora|hada|lokr|diff|dora)(?=[._])")


def check_lora(path: Path) -> None:
    """Raise FileNotFoundError or ValueError, in one line, for what is no whole safetensors file with LoRA weights."""
    refuse_pickle(path)
    if path.suffix.lower() not in _ENDINGS or path.is_dir():
        raise ValueError(f"{path} is no {' or '.join(_ENDINGS)} file. Give the file of a LoRA.")
    names = read_header(path)
    for mark, what in _REFUSED.items():
        if found := next((name for name in names if mark in name), None):
            raise ValueError(f"{path} {what} ({found}), which cannot be run exactly. Get a plain LoRA.")
    if not 0 < len(names) < _MOST_TENSORS or not any(parsed(name) or "lora" in name for name in names):
        raise ValueError(f"{path} holds no LoRA{', but ' + next(iter(names)) if names else ''}. Give the file of one.")


def changes_text(path: Path) -> bool:
    """Return whether a file that `check_lora` takes has anything for text encoders."""
    return any(is_of_text(unwrapped(name)) for name in read_header(path))


def identity(path: Path) -> str:
    """Return a digest that tells the file from any other."""
    return file_identity(path)


def read_lora(
    path: Path,
    pipeline_class: Any,
    modules: Mapping[str, nn.Module],
    converters: Converters | None = None,
    leave_out: LeaveOut | None = None,
) -> Branches:
    """Read a file's branches for the named modules of a pipeline, on the CPU, in the dtypes of these modules.

    `converters` tell by a module's name where the weights of its files are, under the module's own names. Weights that
    no module has a place for are left out if they are of a part that `leave_out` names, and noted there.

    Raises FileNotFoundError, or ValueError in one line that names the file: for what `check_lora` refuses, for other
    weights that no module has a place for, of another shape than it takes, or incomplete.
    """
    check_lora(path)
    tensors, settings = _read(path)
    found = _placed(path, tensors, pipeline_class, modules, converters or {}, leave_out or LeaveOut())
    made: Branches = {}
    for component, parts in found.items():
        branches = made.setdefault(component, {})
        for target, given in parts.items():
            changes = _changes(path, modules[component], component, target, given, settings.get(component))
            owner = _owner(modules[component], target)[0]
            branches[owner] = (*branches.get(owner, ()), *changes)
    return made


@dataclass
class LeaveOut:
    """Parts of models that a file may have weights for though the model has no such part: `k_img`, `img_emb`.

    `names` are those of the weights that were left out.
    """

    parts: Sequence[str] = ()
    names: list[str] = field(default_factory=list)

    def takes(self, name: str) -> bool:
        """Note a name that has no place, if it is of one of the parts."""
        found = any(_is_of(part, name) for part in self.parts)
        self.names += [name] * found
        return found

    def told(self) -> str:
        """Return the parts that were left out, in a few words."""
        parts = [part for part in self.parts if any(_is_of(part, name) for name in self.names)]
        return f"{len(self.names)} weights of {', '.join(parts)} are left out, which this model does not have"


def _is_of(part: str, name: str) -> bool:
    words = f".{unwrapped(name)}.".replace(".", "_")
    return f"_{part.replace('.', '_')}_" in words


def _placed(
    path: Path,
    tensors: Tensors,
    pipeline_class: Any,
    modules: Mapping[str, nn.Module],
    converters: Converters,
    leave_out: LeaveOut,
) -> ByComponent:
    """Return the changes that weights make: by the names of modules, else by those in the files of the weights.

    By those that only diffusers knows where none is one of these.
    """
    found = by_own_names(path, tensors, modules)
    others = without(tensors, found)
    theirs = by_weights(path, others, modules, converters) if others else None
    strays = list(without(others, theirs or {}))
    apart = _of_other_parts(strays, {*names_in(found), *names_in(theirs or {})}, modules)
    strays = [name for name in strays if not (name in apart and leave_out.takes(name))]
    if strays and theirs is None:
        left = {name: tensor for name, tensor in others.items() if name not in leave_out.names}
        theirs = by_conversion(path, left, pipeline_class, modules)
        strays = strays if theirs is None else []
    if strays or not (found or theirs):
        why = _why(strays or list(tensors), found, theirs or {}, pipeline_class, apart)
        raise ValueError(f"{path} {why}")
    for component, parts in (theirs or {}).items():
        known = found.setdefault(component, {})
        if twice := next((target for target in parts if target in known), None):
            names = f"{known[twice].names[0]} and {parts[twice].names[0]}"
            raise ValueError(f"{path} has {names}, both for {component}.{twice}. Get the LoRA from elsewhere.")
        known |= parts
    return found


def _of_other_parts(strays: Sequence[str], placed: Collection[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names without a place that may be left out: of layers that the model does not have.

    Of a layer that it has, what nobody knows may say how much the others count; so may an alpha alone.
    """
    layers = {_layer(name) for name in placed} | layers_among(map(_layer, strays), modules)
    weighted = {_layer(name) for name in strays if not name.endswith(".alpha")}
    apart = set()
    for name in strays:
        layer = _layer(name)
        alone = name.endswith(".alpha") and layer not in weighted
        if layer and not alone and layer not in layers:
            apart.add(name)
    return apart


def _layer(name: str) -> str:
    """Return the layer that a name begins with, whether or not the rest of it is known."""
    known = parsed(name)
    return known[0] if known else _PART.split(unwrapped(name))[0] if _PART.search(name) else name.rpartition(".")[0]


def _why(
    strays: Sequence[str], found: ByComponent, theirs: ByComponent, pipeline_class: Any, apart: Collection[str]
) -> str:
    """Return why a file is refused that has names without a place, in a sentence or two."""
    known_as = getattr(pipeline_class, "__name__", "this model").removesuffix("Pipeline")
    named = [*names_in(found), *names_in(theirs)]
    has = {word for name in named for word in _words(name)}
    parts = dict.fromkeys(_part(_words(name), has) for name in strays)
    first = next((name for name in strays if not name.endswith("alpha")), strays[0])
    told = f"has weights that {known_as} has no place for, such as {first}."
    if strays[0].startswith(_EMBEDDING):
        told = f"bundles an embedding for prompts ({strays[0]}), which is no part of a LoRA and is not run."
    if named and all(parts) and set(strays) <= set(apart):
        return f"{told} To run it without: leave out {', '.join(list(parts)[:_MOST_PARTS])}."
    return f"{told} It is of another model, or changes more than can be run exactly."


def _part(words: Sequence[str], known: set[str]) -> str:
    """Return the first words of a name, without numbers, that are not in `known`, or "" if all are."""
    new = itertools.dropwhile(lambda word: word in known or word.isdigit(), words)
    return ".".join(itertools.takewhile(lambda word: not word.isdigit(), new))


def _words(name: str) -> list[str]:
    """Split the name of a layer at the dots of its path."""
    layer = plain((parsed(name) or (unwrapped(name),))[0])
    under = flat(layer)
    return (by_words(under) if under else layer).split(".")


def _read(path: Path) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Read a file's tensors, and by component the settings that diffusers noted in it."""
    from safetensors import safe_open

    stamp = stamps_of([path])[0][1]
    # Nodes run in inference mode, whose tensors do not know what was made of them.
    with torch.inference_mode(False), one_line(path, "read as a LoRA"), safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_unchanged(path, stamp)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not (tensor.numel() == 1 and name.endswith("alpha")):  # a whole number
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{path} holds {name} as {kind}, and nothing tells what it stands for. Get a plain LoRA.")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float().sum())):
            raise ValueError(f"{path} holds numbers that are not finite, in {name}. Download it again.")
    settings: dict[str, dict[str, Any]] = {}
    try:
        noted = json.loads(notes.get(_SETTINGS, "{}"))
        for name, value in noted.items():
            component, _, key = name.partition(".")
            settings.setdefault(component, {})[key] = value
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has damaged notes ({_SETTINGS}) in its header. Download it again.") from error
    if stray := next((name for name in ("r", "lora_alpha", "use_dora", "use_rslora") if name in settings), None):
        raise ValueError(f"{path} notes {stray} in its header and not of which model. Get the LoRA from elsewhere.")
    return tensors, settings


# One module


def _changes(
    path: Path, module: nn.Module, component: str, target: str, found: Found, settings: dict[str, Any] | None
) -> tuple[Change, ...]:
    where, scale = f"{component}.{target}", None
    if settings and "down" in found.tensors:
        if found.alpha is not None:
            raise ValueError(f"{path} names alpha of {where} twice, in its header too. Get the LoRA from elsewhere.")
        scale = _settled(path, target, found.tensors["down"], settings)
    owner, parameter = _owner(module, target)
    return found.changes(path, module.get_submodule(owner), parameter, where, scale)


def _owner(module: nn.Module, target: str) -> tuple[str, str]:
    """Return the path of the module that is changed, and the name of its changed parameter."""
    try:
        module.get_submodule(target)
    except AttributeError:
        return target.rpartition(".")[::2]
    return target, "weight"


def _settled(path: Path, target: str, down: torch.Tensor, settings: dict[str, Any]) -> tuple[float, bool]:
    """Alpha, and whether it is rank-stabilised, as the notes in a header say."""
    if settings.get("use_dora"):
        raise ValueError(f"{path} is a DoRA, by its header, which cannot be run exactly. Get a plain LoRA.")
    rank = _for_module(path, target, settings, "rank_pattern", "r", down.shape[0])
    if rank != down.shape[0]:
        raise ValueError(f"{path} has rank {down.shape[0]} at {target}, and {rank} by its header. Download it again.")
    alpha = _for_module(path, target, settings, "alpha_pattern", "lora_alpha", 8)
    return alpha, bool(settings.get("use_rslora"))


def _for_module(path: Path, target: str, settings: dict[str, Any], pattern: str, key: str, default: int) -> float:
    """Return the number that peft notes for a module: for all modules, or for names that match a pattern."""
    value = settings.get(key, default)
    patterns = settings.get(pattern) or {}
    if not isinstance(patterns, dict) or any(re.search(r"[^\w.^]", name) for name in patterns):
        raise ValueError(f"{path} has a {pattern} in its header that is no list of modules. Get the LoRA elsewhere.")
    for name, own in patterns.items():
        plain = name.removeprefix("^")
        if target == plain or (plain == name and target.endswith(f".{plain}")):
            value = own
            break
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{path} has {key} {str(value)[:40]!r} in its header, which is no number. Download it again.")
    return value
