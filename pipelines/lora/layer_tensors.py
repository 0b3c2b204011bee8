"""The tensors of a LoRA file for one layer, by their roles whatever the file calls them, and the changes they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...memory.weights.changes import LAYERS, Change, Delta, LowRank, ParameterDelta
from ...memory.weights.products import Hadamard, Kronecker, Runs

Tensors = dict[str, torch.Tensor]
Key = TypeVar("Key")

_FACTORS = {"down": "a LoRA", "hada": "a LoHa", "lokr": "a LoKr"}


def grouped(path: Path, tensors: Tensors, named: Mapping[str, tuple[Key, str]]) -> dict[Key, LayerTensors]:
    """Return the tensors that have names, each with its key and its role, by key."""
    groups: dict[Key, LayerTensors] = {}
    for name, (key, role) in named.items():
        groups.setdefault(key, LayerTensors()).add(path, name, role, tensors[name])
    return groups


def names_in(groups: Mapping[Any, LayerTensors]) -> set[str]:
    """Return the names in the file of all these tensors."""
    return {name for group in groups.values() for name in group.names}


@dataclass
class LayerTensors:
    """The tensors of a file for one layer, by role. `names` are those in the file.

    `rows` are the rows of the layer that a Kronecker product is for, if not all.
    """

    tensors: Tensors = field(default_factory=dict)
    alpha: float | None = None
    rows: Runs = ()
    names: tuple[str, ...] = ()

    def add(self, path: Path, name: str, role: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Raise ValueError, in one line, for a second one of a role, and for one of no use."""
        self.names += (name,)
        if role == "alpha":
            if self.alpha is not None:
                raise ValueError(f"{path} has {name} beside another of its kind. Get the LoRA from elsewhere.")
            if tensor.numel() != 1:
                raise ValueError(f"{path} has {name} as {list(tensor.shape)} where it must be one number.")
            self.alpha = float(tensor.item())
            return
        if not tensor.ndim:
            raise ValueError(f"{path} has one number as {name}, which must have dimensions. Download it again.")
        if role in self.tensors:
            raise ValueError(f"{path} has {name} beside another of its kind. Get the LoRA from elsewhere.")
        if role in ("down_bias", "mid_bias"):
            raise ValueError(f"{path} has {name}, a bias within a pair, which is not run. Get a plain LoRA.")
        self.tensors[role] = tensor

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the changed weight, or None for a change of a bias alone or an incomplete one."""
        found = self.tensors
        try:
            if "diff" in found:
                return tuple(found["diff"].shape)
            if "up" in found:
                kernel = found.get("mid", found["down"]).shape[2:]
                return found["up"].shape[0], found["down"].shape[1], *kernel
            if "hada_w1_a" in found:
                out = found["hada_w1_a"].shape[1 if "hada_t1" in found else 0]
                return out, *found["hada_w1_b"].shape[1:], *found.get("hada_t1", torch.empty(0, 0)).shape[2:]
            if any(name.startswith("lokr_") for name in found):
                (part,) = _changes({name: found[name] for name in found if name.startswith("lokr_")}, None, ())
                assert isinstance(part, Kronecker)
                return part.shape()
        except (LookupError, ValueError, AssertionError):
            return None
        return None

    def taken(self, path: Path, runs: Runs, rows: int) -> LayerTensors:
        """Return the same for some rows of the weight. Raises ValueError, in one line, if the rows do not fit."""
        if runs == ((0, rows),):
            return self
        found = dict(self.tensors)
        for name in ("up", "bias", "diff", "diff_b", "hada_w1_a", "hada_w2_a"):
            if name in found:
                tucker = name.startswith("hada") and f"hada_t{name[6]}" in found
                if found[name].ndim <= tucker or found[name].shape[tucker] != rows:
                    raise ValueError(
                        f"{path} does not fit this model: {name} at {self.names[0]} is {list(found[name].shape)} where "
                        f"{rows} rows are changed."
                    )
                parts = [found[name].narrow(int(tucker), begin, end - begin) for begin, end in runs]
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts, int(tucker))
        return replace(self, tensors=found, rows=runs if any(name.startswith("lokr_") for name in found) else ())

    def changes(
        self, path: Path, module: nn.Module, parameter: str, where: str, scale: tuple[float, bool] | None
    ) -> tuple[Change, ...]:
        """Return the changes of a module, in its dtype. `scale` is an alpha from elsewhere.

        Of a module that is no layer they are of its `parameter`, or of its bias.

        Raises ValueError in one line for what is incomplete or does not fit.
        """
        kinds = [kind for mark, kind in _FACTORS.items() if any(name.startswith(mark) for name in self.tensors)]
        if len(kinds) > 1:
            raise ValueError(f"{path} has {' and '.join(kinds)} for {where}, which share one alpha. Get it elsewhere.")
        if lacking := _lacking(self.tensors, self.alpha):
            raise ValueError(f"{path} has no {lacking} for {where}: it is incomplete.")
        alpha, stabilized = scale or (self.alpha, False)
        if alpha is not None and not math.isfinite(alpha):
            raise ValueError(f"{path} has the alpha {alpha} for {where}. Download it again.")
        for name in ("down", "hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
            if name in self.tensors and not self.tensors[name].shape[0]:
                wide = "lora_A" if name == "down" else name
                raise ValueError(f"{path} has no rank at {where}: its {wide} is {list(self.tensors[name].shape)}.")
        fitting = dict(self.tensors)
        made: list[Change] = []
        if not isinstance(module, LAYERS):
            made = [
                ParameterDelta(own, _shaped(fitting.pop(name), module._parameters.get(own)))
                for name, own in (("diff", parameter), ("diff_b", "bias"))
                if name in fitting
            ]
        elif isinstance(weight := module.weight, torch.Tensor):
            fitting = _fitting(fitting, tuple(weight.shape))
        made += _changes(fitting, alpha, self.rows, stabilized)
        for change in made:
            try:
                why = change.why_not(module)
            except (LookupError, TypeError, RuntimeError):  # of shapes with too few dimensions
                why = f"is {[list(tensor.shape) for tensor in change.tensors().values()]}, which are no matrices"
            if why:
                raise ValueError(f"{path} does not fit this model: what it has for {where} {why}.")
        return tuple(change.like(module) for change in made)


def _lacking(found: Mapping[str, torch.Tensor], alpha: float | None) -> str:
    """Name what is missing, as peft and LyCORIS call it; "" if nothing is."""
    wanted: list[tuple[str, ...]] = []
    if any(name in found for name in ("down", "up", "mid", "bias")):
        wanted += [("down",), ("up",)]
    if any(name.startswith("hada_") for name in found):
        wanted += [(f"hada_{name}",) for name in ("w1_a", "w1_b", "w2_a", "w2_b")]
        wanted += [(f"hada_{name}",) for name in ("t1", "t2")] if "hada_t1" in found or "hada_t2" in found else []
    if any(name.startswith("lokr_") for name in found):
        wanted += [(f"lokr_{name}", f"lokr_{name}_{part}") for name in ("w1", "w2") for part in "ab"]
    if not wanted and (alpha is not None or not ("diff" in found or "diff_b" in found)):
        wanted = [("down",)]  # of an alpha that scales nothing
    missing = next((names for names in wanted if not any(name in found for name in names)), ("",))[-1]
    return {"down": "lora_A", "up": "lora_B"}.get(missing, missing)


def _changes(
    found: Mapping[str, torch.Tensor], alpha: float | None, rows: Runs, stabilized: bool = False
) -> list[Change]:
    def of(start: str) -> dict[str, Any]:
        return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}

    made: list[Change] = []
    if "down" in found:
        made.append(LowRank(found["down"], found["up"], found.get("bias"), alpha, stabilized, found.get("mid")))
    if halves := of("hada_"):
        made.append(Hadamard(**halves, alpha=alpha))
    if factors := of("lokr_"):
        made.append(Kronecker(**factors, alpha=alpha, rows=rows))
    if "diff" in found or "diff_b" in found:
        made.append(Delta(found.get("diff"), found.get("diff_b")))
    return made


def _shaped(delta: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    """As the parameter is, where only dimensions of 1 differ."""
    if parameter is None or [n for n in delta.shape if n != 1] != [n for n in parameter.shape if n != 1]:
        return delta
    return delta.reshape(parameter.shape)


def _fitting(found: Tensors, weight: tuple[int, ...]) -> Tensors:
    """Reshape the tensors to fit a weight [out, in, ...]: some files store kernels of size 1, or flat ones."""
    _, into, *kernel = weight if len(weight) > 1 else (*weight, 0)
    ones = (1,) * len(kernel)

    def shaped(name: str, tensor: torch.Tensor) -> torch.Tensor:
        first = tensor.shape[0]
        wanted: dict[str, tuple[int, ...]] = {
            "down": (first, into, *(ones if "mid" in found else kernel)),
            "up": (first, -1, *ones),
            "mid": (first, first, *kernel),
            "hada_t1": (first, first, *kernel),
            "hada_t2": (first, first, *kernel),
            "lokr_t2": (first, first, *kernel),
            "diff": weight,
        }
        if "hada_t1" not in found:
            wanted |= {"hada_w1_b": (first, into, *kernel), "hada_w2_b": (first, into, *kernel)}
        if "lokr_t2" not in found:
            wanted |= dict.fromkeys(("lokr_w2", "lokr_w2_b"), (first, -1, *kernel))
        shape = wanted.get(name, tuple(tensor.shape))
        sizes = math.prod(abs(size) for size in shape)
        can = tensor.numel() % sizes == 0 if -1 in shape else tensor.numel() == sizes
        return tensor.reshape(shape) if sizes and can and len(shape) != tensor.ndim else tensor

    return {name: shaped(name, tensor) if tensor.ndim else tensor for name, tensor in found.items()}
