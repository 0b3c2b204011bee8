"""LoRA files: read, checked, and brought to the branches of a pipeline's modules, whoever wrote them.

Names that are those of the pipeline's own modules are taken as they are: diffusers', peft's, and kohya's with their
underscores. All others go through the conversion that diffusers has for the class of the pipeline. Whatever is in a
file and has no place in the end is named, and the file refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.files import one_line
from ...memory.units.branches import LowRank
from ...memory.units.weights import check_unchanged, file_identity, read_header, refuse_pickle, stamps_of

Tensors = dict[str, torch.Tensor]
Branches = dict[str, dict[str, LowRank]]  # by component, by path of the module

_SETTINGS = "lora_adapter_metadata"  # of diffusers, in the header
_NAMED = re.compile(
    r"(?P<path>.+?)\.(?:(?:lora_(?P<ab>[AB])|lora[._](?P<way>down|up))(?:\.default)?\.(?P<kind>weight|bias)|(?P<alpha>alpha))"
)
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.")
_KOHYA = re.compile(r"lora_(?:unet|transformer)_(?P<path>[\w-]+)")
_REFUSED = {
    "dora_scale": "is a DoRA", "lora_magnitude_vector": "is a DoRA", "hada_": "is a LoHa", "lokr_": "is a LoKr",
    "oft_": "is an OFT", "lora_mid": "has Tucker factors", "w_norm": "changes norms", "b_norm": "changes norms",
}  # fmt: skip
_MOST_TENSORS = 100_000


@dataclass
class _Found:
    """What a file has for one module, until it is whole."""

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: float | None = None


def check_lora(path: Path) -> None:
    """Raise FileNotFoundError or ValueError, in one line, for what is no whole safetensors file with LoRA weights."""
    refuse_pickle(path)
    if path.suffix.lower() != ".safetensors" or path.is_dir():
        raise ValueError(f"{path} is no .safetensors file. Give the file of a LoRA.")
    names = read_header(path)
    for mark, what in _REFUSED.items():
        if found := next((name for name in names if mark in name), None):
            raise ValueError(f"{path} {what} ({found}), which cannot be run exactly. Get a plain LoRA.")
    if not 0 < len(names) < _MOST_TENSORS or not any("lora" in name or "alpha" in name for name in names):
        raise ValueError(f"{path} holds no LoRA{', but ' + next(iter(names)) if names else ''}. Give the file of one.")


def identity(path: Path) -> str:
    """What tells the file from any other."""
    return file_identity(path)


def read_lora(path: Path, pipeline_class: Any, modules: Mapping[str, nn.Module]) -> Branches:
    """The branches that a file has for the named modules of a pipeline, on the CPU, in the types of these.

    Raises FileNotFoundError, or ValueError in one line that names the file: for what `check_lora` refuses, for weights
    that no module has a place for, of another shape than it takes, or incomplete.
    """
    check_lora(path)
    tensors, settings = _read(path)
    found = _by_own_names(path, tensors, modules)
    if found is None:
        found = _by_conversion(path, tensors, pipeline_class, modules)
    return {
        component: {
            target: _branch(path, modules[component], component, target, given, settings.get(component))
            for target, given in parts.items()
        }
        for component, parts in found.items()
    }


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


# Names


def _by_own_names(
    path: Path, tensors: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, _Found]] | None:
    """What is named by the modules themselves; None if anything is named otherwise."""
    places = {
        f"{prefix}{name}": (component, name)
        for component, module in reversed(list(modules.items()))  # names without a component are of the first
        for name, inner in module.named_modules()
        if isinstance(inner, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for prefix in ("", f"{component}.")
    }
    flat = Counter(name.replace(".", "_") for name in places if places[name][1] == name)
    kohya = {name.replace(".", "_"): places[name] for name in places if flat[name.replace(".", "_")] == 1}
    found: dict[str, dict[str, _Found]] = {}
    for name, tensor in tensors.items():
        if (match := _NAMED.fullmatch(name)) is None:
            return None
        target = match["path"]
        for prefix in _PREFIXES:
            target = target.removeprefix(prefix)
        under = _KOHYA.fullmatch(target)
        place = kohya.get(under["path"]) if under else places.get(target)
        if place is None:
            return None
        _note(path, found.setdefault(place[0], {}).setdefault(place[1], _Found()), match, tensor, name)
    return found


def _note(path: Path, found: _Found, match: re.Match[str], tensor: torch.Tensor, name: str) -> None:
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


# Conversion by diffusers


def _by_conversion(
    path: Path, tensors: Tensors, pipeline_class: Any, modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, _Found]]:
    convert, known_as = (
        getattr(pipeline_class, "lora_state_dict", None),
        getattr(pipeline_class, "__name__", "this one"),
    )
    if convert is None:
        raise ValueError(
            f"{path} has weights that {known_as} has no place for, such as {_stranger(tensors, modules)}. "
            "It is of another model, or its names are not those of diffusers."
        )
    converted, unused = _converted(path, tensors, convert, known_as)
    found = _by_own_names(path, converted, modules) if converted else None
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
    todo: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(todo), set()
    while todo:
        node = todo.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                todo.append(earlier)
    return found


def _stranger(tensors: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> str:
    """The first name that is not understood."""
    one = Path()
    names = (name for name, tensor in tensors.items() if _by_own_names(one, {name: tensor}, modules) is None)
    return next(names, next(iter(tensors), "nothing"))


# One branch


def _branch(
    path: Path, module: nn.Module, component: str, target: str, found: _Found, settings: dict[str, Any] | None
) -> LowRank:
    where = f"{component}.{target}"
    if found.down is None or found.up is None:
        raise ValueError(f"{path} has no {'lora_A' if found.down is None else 'lora_B'} for {where}: it is incomplete.")
    alpha, stabilized = found.alpha, False
    if settings:
        if alpha is not None:
            raise ValueError(f"{path} names alpha of {where} twice, in its header too. Get the LoRA from elsewhere.")
        alpha, stabilized = _settled(path, target, found.down, settings)
    if alpha is not None and not math.isfinite(alpha):
        raise ValueError(f"{path} has the alpha {alpha} for {where}. Download it again.")
    part = LowRank(found.down, found.up, found.bias, alpha, stabilized)
    inner = module.get_submodule(target)
    if not part.rank:
        raise ValueError(f"{path} has no rank at {where}: its lora_A is {list(found.down.shape)}.")
    if why := part.why_not(inner):
        raise ValueError(f"{path} does not fit this model: what it has for {where} {why}.")
    return part.like(inner)


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
