"""Tiny pipelines as people have them: the transformer in one file, and a base folder without its weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .original_names import original

Change = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def state_of(folder: Path, part: str = "transformer") -> dict[str, torch.Tensor]:
    """The weights of a part of a saved pipeline."""
    (path,) = (folder / part).glob("*.safetensors")
    return load_file(path)


def base_of(folder: Path, at: Path, *without: str) -> Path:
    """A copy of a pipeline, of which the transformer and other parts have only their configs; made once."""
    if not at.is_dir():
        shutil.copytree(folder, at)
        for part in ("transformer", *without):
            for path in (at / part).glob("*.safetensors"):
                path.unlink()
    return at


def transformer_file(
    name: str, folder: Path, at: Path, prefix: str = "", plain: bool = False, change: Change = dict
) -> Path:
    """The transformer of a saved pipeline in one file, with the original names, or diffusers' if it is to be `plain`.

    `change` does something to the tensors before.
    """
    state = state_of(folder)
    tensors = change(state if plain else original(name, state))
    save_file({prefix + key: tensor.contiguous() for key, tensor in tensors.items()}, at)
    return at
