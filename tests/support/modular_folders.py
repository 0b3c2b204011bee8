"""Tiny folders of modular pipelines, and their own call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import ModularPipeline

CLASSES = {
    "flux": "FluxModularPipeline",
    "flux2_klein": "Flux2KleinModularPipeline",
    "qwenimage": "QwenImageModularPipeline",
    "sd3": "StableDiffusion3ModularPipeline",
    "wan": "WanModularPipeline",
    "zimage": "ZImageModularPipeline",
}


def as_modular(family: Path, folder: Path, class_name: str, blocks: str | None = None, **config: Any) -> Path:
    """Copy a tiny pipeline of a class into a folder that names a modular pipeline of the same components."""
    shutil.copytree(family, folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").unlink()
    named = {
        name: [*kind, {"type_hint": kind, "pretrained_model_name_or_path": "org/model", "subfolder": name}]
        for name, kind in index.items()
        if isinstance(kind, list) and None not in kind
    }
    blocks = blocks or getattr(diffusers, class_name).default_blocks_name
    text = json.dumps({"_class_name": class_name, "_blocks_class_name": blocks, **named, **config})
    (folder / "modular_model_index.json").write_text(text, encoding="utf-8")
    return folder


def stock(
    folder: Path, guidance: float | None = None, prepare: Callable[[Any], None] | None = None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a folder's own call on the CPU: the latents that its VAE decodes, and the pictures [B,(F),H,W,3] in 0..1."""
    pipe: Any = ModularPipeline.from_pretrained(folder, local_files_only=True)
    pipe.load_components(local_files_only=True)
    for name in ("guider", "guider_2") if guidance is not None else ():
        if hasattr(pipe, name):
            pipe.update_components(**{name: getattr(pipe, name).new(guidance_scale=guidance, enabled=True)})
            inputs.pop("guidance_scale", None)
    if prepare is not None:
        prepare(pipe)
    seen: list[torch.Tensor] = []
    decode = pipe.vae.decode

    def recorded(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z.detach().clone())
        return decode(z, *args, **kwargs)

    pipe.vae.decode = recorded
    made = pipe(generator=torch.Generator("cpu").manual_seed(0), **{"output_type": "pt"} | inputs)
    pictures = made.get("videos") if made.get("videos") is not None else made.get("images")
    (latents,) = seen
    if isinstance(pictures, list):
        pictures = torch.stack([torch.from_numpy(np.array(one)) / 255 for one in pictures]).movedim(-1, -3)
    return latents, pictures.float().movedim(-3, -1)
