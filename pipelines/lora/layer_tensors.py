"""The tensors of a LoRA file for one layer, by their role whatever the file calls them, and the changes they make.

The parts of names are those of peft, diffusers, kohya's trainers and LyCORIS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.weights.changes import LAYERS, Change, Delta, LowRank, ParameterDelta
from ...memory.weights.products import Hadamard, Kronecker, Runs

Tensors = dict[str, torch.Tensor]

_NAMED = re.compile(
    r"(?P<path>.+?)\.(?:"
    r"(?:lora_(?P<ab>[AB])(?:\.[\w-]+)?|(?:lora|lora_linear_layer)[._](?P<way>down|up|mid)(?:\.default)?)"
    r"\.(?P<kind>weight|bias)|"  # of peft, which may put the adapter's name between
    r"(?P<part>hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|diff(?:_[bm])?|[wb]_norm)(?:\.default)?|"
    r"(?P<alpha>alpha))"
)
_FLAT = re.compile(r"lora_|lycoris_")
_WAYS = {"A": "down", "B": "up"}
_NORMS = {"w_norm": "diff", "b_norm": "diff_b"}  # of LyCORIS
# Put into names by what wraps a model or parts of it (torch.compile, FSDP), or the whole (DDP, DeepSpeed, peft).
_WRAPPERS = re.compile(r"(?<![A-Za-z\d])_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)[._]")
_AROUND = re.compile(
    r"^((?:(?:model\.)?diffusion_model\.|transformer(?:_2)?\.|unet\.|text_encoder(?:_\d)?\.)?)"
    r"(?:(?:module|_forward_module|base_model\.model)\.)+"
)
_FACTORS = {"down": "a LoRA", "hada": "a LoHa", "lokr": "a LoKr"}


def parsed(name: str) -> tuple[str, str] | None:
    """Split a name into its layer and its part, such as "down", "lokr_w1", "diff" or "alpha"; else return None."""
    if (match := _NAMED.fullmatch(unwrapped(name))) is None:
        return None
    if match["alpha"]:
        return match["path"], "alpha"
    if match["part"] == "diff_m":  # of Wan's bare parameters
        return match["path"] + ("_" if _FLAT.match(match["path"]) else ".") + "modulation", "diff"
    if match["part"]:
        return match["path"], _NORMS.get(match["part"], match["part"])
    way = match["way"] or _WAYS[match["ab"]]
    return match["path"], way if match["kind"] == "weight" else "bias" if way == "up" else f"{way}_bias"


def unwrapped(name: str) -> str:
    """Strip the names of wrappers around the model or its parts, such as `_orig_mod`."""
    return _AROUND.sub(r"\1", _WRAPPERS.sub("", name))


@dataclass
class Found:
    """The tensors of a file for one layer, until it is whole. `rows` are those of a Kronecker product in the layer.

    `names` are those in the file.
    """

    tensors: Tensors = field(default_factory=dict)
    alpha: float | None = None
    rows: Runs = ()
    names: tuple[str, ...] = ()

    def note(self, path: Path, name: str, what: str, tensor: torch.Tensor) -> None:
        """Take one more. ValueError, in one line, for what is there already, or is no part of any change."""
        self.names += (name,)
        if what == "alpha":
            if self.alpha is not None:
                raise ValueError(f"{path} has {name} beside another of its kind. Get the LoRA from elsewhere.")
            if tensor.numel() != 1:
                raise ValueError(f"{path} has {name} as {list(tensor.shape)} where it must be one number.")
            self.alpha = float(tensor.item())
            return
        if not tensor.ndim:
            raise ValueError(f"{path} has one number as {name}, which must have dimensions. Download it again.")
        if what in self.tensors:
            raise ValueError(f"{path} has {name} beside another of its kind. Get the LoRA from elsewhere.")
        if what in ("down_bias", "mid_bias"):
            raise ValueError(f"{path} has {name}, a bias within a pair, which is not run. Get a plain LoRA.")
        self.tensors[what] = tensor

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

    def taken(self, path: Path, runs: Runs, rows: int) -> Found:
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
        kinds = [what for mark, what in _FACTORS.items() if any(name.startswith(mark) for name in self.tensors)]
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
