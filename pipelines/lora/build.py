"""From the tensors of a LoRA file to the changes of a pipeline's modules.

A file is used whole or not at all: a tensor that has no place is named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ...memory.weights.changes import Change
from ..files.wrappers import unwrapped
from .file import LoraFile
from .layer_tensors import LayerTensors, grouped, names_in
from .names import OwnNames, Place, flat, parsed, plain
from .stock_conversion import by_conversion
from .weight_names import Converters, by_weights

Branches = dict[str, dict[str, tuple[Change, ...]]]  # by component, by path of the module

_MOST_PARTS = 6  # that a message names
_EMBEDDING = "bundle_emb."
_ROLE = re.compile(r"\.(?:lora|hada|lokr|diff|dora)(?=[._])")


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


def build(
    file: LoraFile,
    pipeline_class: Any,
    modules: Mapping[str, nn.Module],
    converters: Converters | None = None,
    leave_out: LeaveOut | None = None,
) -> Branches:
    """Return a file's branches for the named modules of a pipeline, on the CPU, in the dtypes of these modules.

    `converters` tell by a module's name where the weights of its files are, under the module's own names. Weights that
    no module has a place for are left out if they are of a part that `leave_out` names, and noted there.

    Raises ValueError in one line that names the file: for other weights that no module has a place for, of another
    shape than it takes, or incomplete.
    """
    made: Branches = {}
    for (component, target), part in _placed(file, pipeline_class, modules, converters or {}, leave_out).items():
        where, module, scale = f"{component}.{target}", modules[component], None
        if (settings := file.settings.get(component)) and "down" in part.tensors:
            if part.alpha is not None:
                raise ValueError(
                    f"{file.path} names alpha of {where} twice, in its header too. Get the LoRA from elsewhere."
                )
            scale = _scale(file.path, target, part.tensors["down"].shape[0], settings)
        owner, parameter = _owner(module, target)
        changes = part.changes(file.path, module.get_submodule(owner), parameter, where, scale)
        branches = made.setdefault(component, {})
        branches[owner] = (*branches.get(owner, ()), *changes)
    return made


def _owner(module: nn.Module, target: str) -> tuple[str, str]:
    """Return the path of the module that is changed, and the name of its changed parameter."""
    try:
        module.get_submodule(target)
    except AttributeError:
        return target.rpartition(".")[::2]
    return target, "weight"


# What each tensor is for


def _placed(
    file: LoraFile,
    pipeline_class: Any,
    modules: Mapping[str, nn.Module],
    converters: Converters,
    leave_out: LeaveOut | None,
) -> dict[Place, LayerTensors]:
    """Return the tensors for each target: by the modules' names, or those in the files of their weights.

    By names that only diffusers knows where none is one of the latter.
    """
    path, tensors, own = file.path, file.tensors, OwnNames(modules)
    found = grouped(path, tensors, own.named(tensors))
    own_used = names_in(found)
    others = {name: tensor for name, tensor in tensors.items() if name not in own_used}
    theirs = by_weights(path, others, modules, converters) if others else {}
    used = own_used | names_in(theirs)
    strays = [name for name in others if name not in used]
    apart = _of_other_parts(strays, used, own)
    strays = [name for name in strays if not (leave_out and name in apart and leave_out.takes(name))]
    if strays and not theirs:
        theirs = by_conversion(path, {name: others[name] for name in strays}, pipeline_class, modules, own)
        strays = [] if theirs else strays
    if strays or not (found or theirs):
        raise ValueError(f"{path} {_why(strays or list(tensors), used, pipeline_class, apart)}")
    if twice := next((place for place in theirs if place in found), None):
        names = f"{found[twice].names[0]} and {theirs[twice].names[0]}"
        raise ValueError(f"{path} has {names}, both for {'.'.join(twice)}. Get the LoRA from elsewhere.")
    return found | theirs


def _of_other_parts(strays: Sequence[str], used: Collection[str], own: OwnNames) -> set[str]:
    """Return the names without a place that may be left out: of layers that the model does not have.

    Of a layer that it has, an unknown name may say how much the others count; so may an alpha alone.
    """
    known = {_layer(name) for name in used}
    weighted = {_layer(name) for name in strays if not name.endswith(".alpha")}
    return {
        name
        for name in strays
        if (layer := _layer(name))
        and layer not in known
        and not own.is_layer(layer)
        and not (name.endswith(".alpha") and layer not in weighted)
    }


def _layer(name: str) -> str:
    """Return the layer that a name begins with, whether or not its role is known."""
    if known := parsed(name):
        return known[0]
    return _ROLE.split(unwrapped(name))[0] if _ROLE.search(name) else name.rpartition(".")[0]


def _why(strays: Sequence[str], used: Collection[str], pipeline_class: Any, apart: Collection[str]) -> str:
    """Return why a file is refused that has names without a place, in a sentence or two."""
    known_as = getattr(pipeline_class, "__name__", "this model").removesuffix("Pipeline")
    first = next((name for name in strays if not name.endswith("alpha")), strays[0])
    told = f"has weights that {known_as} has no place for, such as {first}."
    if strays[0].startswith(_EMBEDDING):
        told = f"bundles an embedding for prompts ({strays[0]}), which is no part of a LoRA and is not run."
    known = {words[:count] for words, _ in map(_words, used) for count in range(len(words))}
    parts = dict.fromkeys(_part(*_words(name), known) for name in strays)
    if used and all(parts) and set(strays) <= set(apart):
        return f"{told} To run it without: leave out {', '.join(list(parts)[:_MOST_PARTS])}."
    return f"{told} It is of another model, or changes more than can be run exactly."


def _part(words: tuple[str, ...], joint: str, known: Collection[tuple[str, ...]]) -> str:
    """Return the words of a layer's name, up to a number, after those that the name of a known layer begins with."""
    begun = max((count for count in range(len(words)) if words[:count] in known), default=0)
    new = itertools.takewhile(lambda word: not word.isdigit(), words[begun:])
    return joint.join(new)


def _words(name: str) -> tuple[tuple[str, ...], str]:
    """Return the words of a layer's name, and the dot or the underscore that joins them."""
    layer = plain(_layer(name))
    under = flat(layer)
    return (tuple(under.split("_")), "_") if under else (tuple(layer.split(".")), ".")


# What peft was set to


def _scale(path: Path, target: str, given: int, settings: Mapping[str, Any]) -> tuple[float, bool]:
    """Return alpha, and whether it is rank-stabilized, as the notes in a header say. `given` is the rank."""
    if settings.get("use_dora"):
        raise ValueError(f"{path} is a DoRA, by its header, which cannot be run exactly. Get a plain LoRA.")
    rank = _for_module(path, target, settings, "rank_pattern", "r", given)
    if rank != given:
        raise ValueError(f"{path} has rank {given} at {target}, and {rank} by its header. Download it again.")
    alpha = _for_module(path, target, settings, "alpha_pattern", "lora_alpha", 8)
    return alpha, bool(settings.get("use_rslora"))


def _for_module(path: Path, target: str, settings: Mapping[str, Any], pattern: str, key: str, default: int) -> float:
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
