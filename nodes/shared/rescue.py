"""Save latents that the decoding node could not decode, in ComfyUI's output folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io

from ...memory.host import management as host
from ...pipelines.decoding.rescue import rescued

if TYPE_CHECKING:
    import torch

_ADVICE = "Move it to ComfyUI's input folder and open it with Load Latent, to decode it in another way."


@contextmanager
def kept(node: type[io.ComfyNode], latents: torch.Tensor) -> Iterator[None]:
    """If the block, which decodes `latents`, fails, save them in the output folder, with prompt and workflow."""
    metadata = {}
    if not args.disable_metadata:
        facts = {"prompt": node.hidden.prompt, **(node.hidden.extra_pnginfo or {})}
        metadata = {name: json.dumps(value) for name, value in facts.items()}
    folder = Path(folder_paths.get_output_directory())
    with rescued(latents, folder, "ballast", metadata, _ADVICE, host.is_interrupt):
        yield
