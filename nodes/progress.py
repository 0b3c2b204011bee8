"""What the page shows while a node runs: text in the node, the progress bar, a preview of the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import comfy.latent_formats
import comfy.utils
import latent_preview
import torch
from comfy_api.latest import io

from ..memory import host

if TYPE_CHECKING:
    from ..pipelines import StagedPipeline

# The host's formats, by VAE class and scaling factor: they know how latents look.
_FORMATS = {
    ("AutoencoderKL", 0.18215): "SD15",
    ("AutoencoderKL", 0.13025): "SDXL",
    ("AutoencoderKL", 1.5305): "SD3",
    ("AutoencoderKL", 0.3611): "Flux",
    ("AutoencoderKLHunyuanVideo", 0.476986): "HunyuanVideo",
    ("AutoencoderKLMochi", 1.0): "Mochi",
    ("AutoencoderKLQwenImage", None): "Wan21",
    ("AutoencoderKLWan", None): "Wan21",
    ("AutoencoderKLLTXVideo", 1.0): "LTXV",
}


def show_text(node: type[io.ComfyNode], text: str) -> None:
    """Draw text in the running node."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)  # not there when a node runs without a page
    if server is not None and node.hidden.unique_id is not None:
        server.send_progress_text(text, node.hidden.unique_id)


class StepProgress:
    """Called after each step: stops the run if the user said so, moves the bar, shows a preview if the host has one."""

    def __init__(self, node: type[io.ComfyNode], pipe: StagedPipeline, steps: int) -> None:
        self._bar = comfy.utils.ProgressBar(steps, node_id=node.hidden.unique_id)
        config = pipe.decoder_config
        name = _FORMATS.get((config.get("_class_name", ""), config.get("scaling_factor")))
        form: Any = getattr(comfy.latent_formats, name, None) if name else None
        self._previewer = latent_preview.get_previewer(pipe.manager.device, form()) if form else None

    def __call__(self, step: int, steps: int, latents: torch.Tensor) -> None:
        host.throw_if_interrupted()
        preview = None
        if self._previewer is not None and latents.ndim in (4, 5):
            preview = self._previewer.decode_latent_to_preview_image("JPEG", latents)
        self._bar.update_absolute(step, steps, preview)
