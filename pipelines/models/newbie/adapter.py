"""Jina CLIP v2 as it is published: adapters lie beside the weights of its text tower, and are merged on reading."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....memory.weights.stored import read_tensors, stored_tensors
from ....memory.weights.unit import ManagedModel
from ...files.checkpoint import Checkpoint, Places
from .jina import jina_names, text_config

_PIECE = re.compile(r"(.+\.)parametrizations\.(weight)\.(original|0\.lora_A|0\.lora_B)")
_ADAPTED = {"original", "0.lora_A", "0.lora_B"}
_ROWS = 16384  # merged at once: in float32 the table of words takes as much as the whole tower in bfloat16
_TASK = "retrieval.query"

Pieces = dict[str, str]  # what a weight is made of: "original" and the tensors of its adapters, by their full names


@dataclass(frozen=True)
class AdaptedTower(Checkpoint):
    """The text tower in files that hold its adapters, which `config` tells of."""

    def unit(self, label: str) -> ManagedModel:
        """Return the tower as a managed model that is read whole: a merged weight has no place in a file."""
        return ManagedModel(
            self.name, self.role, self._build, lambda: read_merged(self.files, self._build, self.config), label
        )


def read_merged(files: Sequence[Path], build: Callable[[], nn.Module], config: Mapping[str, Any]) -> nn.Module:
    """Return the module that `build` makes, with weights on the CPU that the adapter for texts is merged into.

    That is the one of `default_lora_task`, which the published code turns on for every text. It is merged in float32,
    then cast to the type that the module has. Raises ValueError, in one line, for what `Checkpoint.stored` refuses and
    for an adapter that does not fit.
    """
    stored = stored_tensors(files)
    pieces = _pieces(stored)
    places = {name: stored[made_of["original"]] for name, made_of in pieces.items()}
    names = jina_names(places)
    tower = Checkpoint("text_encoder_2", "text_encoder", tuple(files), build, lambda _: names, config=config)
    merged: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():  # the tensors would be of a caller's inference mode for good
        wanted = tower.stored  # which refuses what does not match the module
        module = build()
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        for name, at in places.items():
            parts = [part for part in jina_names({name: at}) if part in wanted]
            if parts:  # three of the joined projections, none of the vision tower
                value = _merged(name, pieces[name], stored, config, dtypes[parts[0]])
                merged.update(zip(parts, value.chunk(len(parts)), strict=True))
        module.load_state_dict(merged, strict=False, assign=True)  # buffers are not in files
    return module.requires_grad_(False)


def _pieces(stored: Places) -> dict[str, Pieces]:
    """Return what each weight is made of, by the name that it has without adapters."""
    found: dict[str, Pieces] = {}
    for name, at in stored.items():
        match = _PIECE.fullmatch(name)
        weight, piece = (match[1] + match[2], match[3]) if match else (name, "original")
        if piece in found.setdefault(weight, {}):
            raise ValueError(f"{at.path} holds {name}, and {weight} once more. Download it again.")
        found[weight][piece] = name
    for weight, made_of in found.items():
        if made_of.keys() not in ({"original"}, _ADAPTED):
            name = min(made_of.values())
            raise ValueError(f"{stored[name].path} holds {name} without the rest of {weight}. Get the whole model.")
    return found


def _merged(name: str, made_of: Pieces, stored: Places, config: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a weight [out, in] and its adapter in one; as it is, of any shape, where it has none."""
    original = _read(stored, made_of["original"])
    merged = torch.empty(original.shape, dtype=dtype)
    if made_of.keys() != _ADAPTED:
        return merged.copy_(original)
    left, right = _low_rank(name, made_of, stored, config)
    for into, weight, rows in zip(*(tensor.split(_ROWS) for tensor in (merged, original, left)), strict=True):
        into.copy_(torch.addmm(weight.float(), rows, right))
    return merged


def _low_rank(
    name: str, made_of: Pieces, stored: Places, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the adapter for texts as [out, rank], with its scale, and [rank, in]; files hold all [adapters, ...]."""
    is_table = name.endswith("_embeddings.weight")  # [words, channels], which counts as [in, out]
    first, second = (made_of[piece] for piece in (("0.lora_A", "0.lora_B") if is_table else ("0.lora_B", "0.lora_A")))
    whole, left, right = (stored[key].shape for key in (made_of["original"], first, second))
    where = stored[first].path
    if len(whole) != 2 or len(left) != 3 or 0 in left or left[1] != whole[0] or right != (left[0], left[2], whole[1]):
        raise ValueError(
            f"{where} has {first} as {list(left)} and {second} as {list(right)}, which do not fit a weight of "
            f"{list(whole)}. Download it again."
        )
    text = {**config, **text_config(config)}
    scale = (text.get("lora_alpha") or left[2]) / (text.get("lora_rank") or left[2])
    tasks, task, index = text.get("lora_adaptations"), text.get("default_lora_task") or _TASK, 0
    if left[0] > 1 and tasks:
        if task not in tasks[: left[0]]:
            raise ValueError(
                f"config.json has {task} not among the {left[0]} adapters of {where}. Download both again."
            )
        index = tasks.index(task)
    return _read(stored, first)[index].float() * scale, _read(stored, second)[index].float()


def _read(stored: Places, name: str) -> torch.Tensor:
    at = stored[name]
    if not at.dtype.is_floating_point:
        raise ValueError(f"{at.path} has {name} as {at.dtype}, which is quantized. Get the plain model.")
    return read_tensors([at.path], [name])[name]
