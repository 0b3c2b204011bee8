"""Recognise a model by its folder. Imports no model code: ComfyUI asks for all its folders while it starts."""

from __future__ import annotations

import re
from pathlib import Path

from ...memory.files import read_json

MODULAR_INDEX = "modular_model_index.json"  # of a modular pipeline of diffusers
PYRAMID_VARIANTS = ("768p", "384p", "image")
PYRAMID_TRANSFORMER, PYRAMID_VAE = "diffusion_transformer_", "causal_video_vae"


def is_newbie_folder(path: Path) -> bool:
    """Return whether a folder holds NewBie, by its own config or its transformer's."""
    for config in (path / "model_index.json", path / "transformer" / "config.json"):
        if config.is_file() and _says_newbie(config):
            return True
    return False


def is_pyramid_folder(path: Path) -> bool:
    """Return whether a folder holds Pyramid-Flow, by its folders' names."""
    transformers = (path / f"{PYRAMID_TRANSFORMER}{variant}" for variant in PYRAMID_VARIANTS)
    return (path / PYRAMID_VAE).is_dir() and any(folder.is_dir() for folder in transformers)


def is_modular_folder(path: Path) -> bool:
    """Return whether a folder holds a modular pipeline alone. One that names a class as well is run by the class."""
    return (path / MODULAR_INDEX).is_file() and not (path / "model_index.json").is_file()


def title_of(path: Path) -> str:
    """Return the name that people use: of the folder or file, or of the repository whose download cache it is in."""
    cached = re.search(r"models--(?:[^/\\]+--)?([^/\\]+)[/\\]snapshots[/\\][0-9a-f]+$", str(path))
    if cached:
        return cached[1]
    path = path if path.name not in ("", "..") else path.resolve()
    return path.stem if path.is_file() else path.name


def _says_newbie(config: Path) -> bool:
    try:
        found = read_json(config)
        return found.get("_class_name") == "NewbiePipeline" or found.get("model_type") == "nextdit_clip"
    except (OSError, ValueError):
        return False
