"""What each model family needs to be encoded, sampled and decoded. Knows nothing of ComfyUI."""

from __future__ import annotations

from pathlib import Path

import torch

from .components import read_model_index
from .embedding_cache import shared_cache
from .generic import GenericPipeline
from .hidream import HiDreamPipeline
from .staged import StagedPipeline

# Pipelines with quirks of their own; every other one takes the generic path.
FAMILIES: dict[str, type[GenericPipeline]] = {"HiDreamImagePipeline": HiDreamPipeline}


def open_pipeline(
    path: str | Path,
    device: str | torch.device = "auto",
    vram: int | str | None = None,
    ram: int | str | None = None,
    dtype: str | torch.dtype = "auto",
    *,
    keep: bool = False,
    cache_dir: str | Path | None = None,
) -> StagedPipeline:
    """Open a diffusers pipeline folder. Reads configs and file headers, no weights.

    `device` is any torch device, "auto" for the first GPU, or "sim" for the simulated one. `vram` and `ram` are budgets
    in bytes or as "6GB"; None means what is free, less a reserve. `dtype` "auto" keeps the type of the files. With
    `keep` the transformer stays on the device between runs while there is room. `cache_dir` holds the text embeddings.
    Raises FileNotFoundError or ValueError, in one line, for a folder that cannot be run.
    """
    folder = Path(path).expanduser()
    name = read_model_index(folder)["_class_name"]
    return FAMILIES.get(name, GenericPipeline)(
        folder,
        dtype,
        device=device,
        vram=vram,
        ram=ram,
        keep=keep,
        cache=shared_cache(Path(cache_dir) if cache_dir else None),
    )


__all__ = ["StagedPipeline", "open_pipeline"]
