"""Telling by its folder which model of ours without a pipeline in diffusers this is. Imports no model code: ComfyUI
asks for all its folders while it starts."""

from __future__ import annotations

from pathlib import Path

from ...memory.files import read_json

PYRAMID_VARIANTS = ("768p", "384p", "image")
PYRAMID_TRANSFORMER, PYRAMID_VAE = "diffusion_transformer_", "causal_video_vae"


def is_newbie_folder(path: Path) -> bool:
    """Whether a folder holds NewBie, by its own config or its transformer's."""
    for config in (path / "model_index.json", path / "transformer" / "config.json"):
        if config.is_file() and _says_newbie(config):
            return True
    return False


def is_pyramid_folder(path: Path) -> bool:
    """Whether a folder holds Pyramid-Flow, by its folders' names."""
    transformers = (path / f"{PYRAMID_TRANSFORMER}{variant}" for variant in PYRAMID_VARIANTS)
    return (path / PYRAMID_VAE).is_dir() and any(folder.is_dir() for folder in transformers)


def _says_newbie(config: Path) -> bool:
    try:
        found = read_json(config)
        return found.get("_class_name") == "NewbiePipeline" or found.get("model_type") == "nextdit_clip"
    except (OSError, ValueError):
        return False
