"""LoRA files: read, checked, and made the branches of a pipeline's modules.

A file is used whole or not at all: what is in it and has no place is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.files import one_line
from ...memory.units.changes import Change
from ...memory.units.weights import check_unchanged, file_identity, read_header, refuse_pickle, stamps_of
from .lora_conversion import by_conversion
from .lora_layouts import Converters, by_weights
from .lora_names import ByComponent, by_own_names, is_of_text
from .lora_parts import Found, Tensors, parsed

Branches = dict[str, dict[str, tuple[Change, ...]]]  # by component, by path of the module

_SETTINGS = "lora_adapter_metadata"  # of diffusers, in the header
_REFUSED = {
    "dora_scale": "is a DoRA", "lora_magnitude_vector": "is a DoRA", "oft_": "is an OFT", "boft_": "is a BOFT",
    ".a1.weight": "is a GLoRA", ".on_input": "is an IA3", "diff_m": "changes modulations",
    ".set_weight": "sets weights", "reshape_weight": "changes shapes of weights",
}  # fmt: skip
_MOST_TENSORS = 100_000


def check_lora(path: Path) -> None:
    """Raise FileNotFoundError or ValueError, in one line, for what is no whole safetensors file with LoRA weights."""
    refuse_pickle(path)
    if path.suffix.lower() != ".safetensors" or path.is_dir():
        raise ValueError(f"{path} is no .safetensors file. Give the file of a LoRA.")
    names = read_header(path)
    for mark, what in _REFUSED.items():
        if found := next((name for name in names if mark in name), None):
            raise ValueError(f"{path} {what} ({found}), which cannot be run exactly. Get a plain LoRA.")
    if not 0 < len(names) < _MOST_TENSORS or not any(parsed(name) or "lora" in name for name in names):
        raise ValueError(f"{path} holds no LoRA{', but ' + next(iter(names)) if names else ''}. Give the file of one.")


def changes_text(path: Path) -> bool:
    """Whether a file that `check_lora` takes has anything for text encoders."""
    return any(is_of_text(name) for name in read_header(path))


def identity(path: Path) -> str:
    """What tells the file from any other."""
    return file_identity(path)


def read_lora(
    path: Path, pipeline_class: Any, modules: Mapping[str, nn.Module], converters: Converters | None = None
) -> Branches:
    """The branches that a file has for the named modules of a pipeline, on the CPU, in the types of these.

    `converters` tell by a module's name where the weights of its files are, under the module's own names.

    Raises FileNotFoundError, or ValueError in one line that names the file: for what `check_lora` refuses, for weights
    that no module has a place for, of another shape than it takes, or incomplete.
    """
    check_lora(path)
    tensors, settings = _read(path)
    text = {name: tensor for name, tensor in tensors.items() if is_of_text(name)}
    found = by_own_names(path, text, modules)
    if found is None:
        found = _placed(path, tensors, pipeline_class, modules, converters or {})
    elif others := {name: tensor for name, tensor in tensors.items() if name not in text}:
        found |= _placed(path, others, pipeline_class, modules, converters or {})
    return {
        component: {
            target: _changes(path, modules[component], component, target, given, settings.get(component))
            for target, given in parts.items()
        }
        for component, parts in found.items()
    }


def _placed(
    path: Path, tensors: Tensors, pipeline_class: Any, modules: Mapping[str, nn.Module], converters: Converters
) -> ByComponent:
    """What the weights are for, by whichever names they have."""
    if (found := by_own_names(path, tensors, modules)) is not None:
        return found
    own = {name: convert for name, convert in converters.items() if name in modules}
    first = own or not _is_plain(tensors) or not hasattr(pipeline_class, "lora_state_dict")
    if first and (found := by_weights(path, tensors, modules, own)) is not None:
        return found
    try:
        return by_conversion(path, tensors, pipeline_class, modules)
    except ValueError:
        if first or (found := by_weights(path, tensors, modules, own)) is None:
            raise
        return found


def _read(path: Path) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """The tensors of a file, and what diffusers noted of its settings, by component."""
    from safetensors import safe_open

    stamp = stamps_of([path])[0][1]
    # Nodes run in inference mode, whose tensors do not know what was made of them.
    with torch.inference_mode(False), one_line(path, "read as a LoRA"), safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_unchanged(path, stamp)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and tensor.numel() != 1:  # an alpha may be a whole number
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
    return tensors, settings


def _is_plain(tensors: Tensors) -> bool:
    """Whether all of it is low rank, which is what diffusers converts whole."""
    return not any(mark in name for name in tensors for mark in (".hada_", ".lokr_", ".diff", "_norm", "lora_mid"))


# One module


def _changes(
    path: Path, module: nn.Module, component: str, target: str, found: Found, settings: dict[str, Any] | None
) -> tuple[Change, ...]:
    where, scale = f"{component}.{target}", None
    if settings and "down" in found.tensors:
        if found.alpha is not None:
            raise ValueError(f"{path} names alpha of {where} twice, in its header too. Get the LoRA from elsewhere.")
        scale = _settled(path, target, found.tensors["down"], settings)
    return found.changes(path, module.get_submodule(target), where, scale)


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
    """A number that peft notes for all modules, or for those whose names end in one of a few."""
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
