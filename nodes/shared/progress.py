"""Show progress on the page while a node runs: text in the node, a bar, a preview of the latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import comfy.latent_formats
import comfy.utils
import latent_preview
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy_api.latest import io

from ...memory.host import management as host
from .preview import PREVIEW_PIXELS, FalseColours, as_grid

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...pipelines import Pipeline

# The host's latent formats, which know what latents look like: by VAE class and its scaling factor, or its
# channels where it has none.
_FORMATS = {
    ("AutoencoderKL", 0.18215): "SD15",
    ("AutoencoderKL", 0.13025): "SDXL",
    ("AutoencoderKL", 1.5305): "SD3",
    ("AutoencoderKL", 0.3611): "Flux",
    ("AutoencoderKLFlux2", 32): "Flux2",
    ("AutoencoderKLHunyuanVideo", 0.476986): "HunyuanVideo",
    ("AutoencoderKLHunyuanVideo15", 1.03682): "HunyuanVideo15",
    ("AutoencoderKLMochi", 1.0): "Mochi",
    ("AutoencoderKLQwenImage", 16): "Wan21",
    ("AutoencoderKLWan", 16): "Wan21",
    ("AutoencoderKLWan", 48): "Wan22",
    ("AutoencoderKLLTXVideo", 1.0): "LTXV",
}


_failed: set[str] = set()  # the nodes whose text says why they failed


def show_text(node: type[io.ComfyNode], text: str) -> None:
    """Draw text in the running node, replacing the text there."""
    show_text_in(_id(node), text)


def show_text_in(own: str | None, text: str) -> None:
    """Draw text in the node of that id, replacing the text there; nowhere for None.

    Several lines become sentences: Nodes 2.0 draws them as one paragraph.
    """
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)  # not there when a node runs without a page
    lines = text.splitlines()
    if len(lines) > 1:
        text = "\n".join(line if line.endswith(".") else f"{line}." for line in lines)
    if server is not None and own is not None:
        # To the page that queued the run: another one has other nodes of the same ids.
        server.send_progress_text(text, own, server.client_id)
        _failed.discard(own)


def show_failure(node: type[io.ComfyNode], text: str) -> None:
    """Draw text in the running node that holds until it runs again."""
    show_text(node, text)
    if (own := _id(node)) is not None:
        _failed.add(own)


def clear_failure(node: type[io.ComfyNode]) -> None:
    """Replace a failure that the running node still shows, now that it is done."""
    if _id(node) in _failed:
        show_text(node, "done")


def _id(node: type[io.ComfyNode]) -> str | None:
    return node.hidden.unique_id if node.hidden else None  # a program may call a node itself


def latent_format(vae_config: Mapping[str, Any]) -> Any:
    """Return the host's format for the latents of a VAE; None where it has none."""
    facts = [vae_config.get(key) for key in ("scaling_factor", "z_dim", "latent_channels")]
    name = _FORMATS.get((vae_config.get("_class_name", ""), next((fact for fact in facts if fact), 0)))
    form = getattr(comfy.latent_formats, name, None) if name else None
    return form() if form else None


def as_picture(latents: torch.Tensor, form: Any, width: int, height: int) -> torch.Tensor | None:
    """Return the first of the latents as a format has them, [1,C,h,w] or [1,C,f,h,w]; None if they are not of it.

    Some pipelines work on rows of tokens, [B,tokens,features], a token being 1 x 1 or 2 x 2 latent pixels.
    Without a width and height in pixels the picture is taken to be square.
    """
    latents = latents[:1]
    if latents.ndim == 3:
        side = 2 if latents.shape[2] == 4 * form.latent_channels else 1
        pixels = side * form.spacial_downscale_ratio
        square = math.isqrt(latents.shape[1])
        rows, columns = (height // pixels, width // pixels) if width and height else (square, square)
        if latents.shape[1] < rows * columns:
            return None
        tokens = latents[:, : rows * columns]  # of a video, the first frame
        blocks = tokens.reshape(1, rows, columns, -1, side, side).permute(0, 3, 1, 4, 2, 5)
        latents = blocks.reshape(1, -1, rows * side, columns * side)
    if latents.ndim not in (4, 5) or latents.shape[1] != form.latent_channels:
        return None
    return latents.unsqueeze(2) if form.latent_dimensions == 3 and latents.ndim == 4 else latents


class StepProgress:
    """Called after each step: stops an interrupted run, moves the bar, and shows a preview if previews are on."""

    def __init__(self, node: type[io.ComfyNode], pipe: Pipeline, steps: int, width: int, height: int) -> None:
        self._bar = comfy.utils.ProgressBar(steps, node_id=node.hidden.unique_id)
        self._size = width, height
        self._form = latent_format(pipe.decoder_config)
        self._device = host.device()
        self._colours, self._is_video = FalseColours(), pipe.is_video
        self._previewer = latent_preview.get_previewer(self._device, self._form) if self._form else None
        self._shows = args.preview_method != LatentPreviewMethod.NoPreviews

    def __call__(self, step: int, steps: int, latents: torch.Tensor) -> None:
        host.throw_if_interrupted()
        self._bar.update_absolute(step, steps, self._preview(latents) if self._shows else None)

    def _preview(self, latents: torch.Tensor) -> tuple[str, Image, int] | None:
        """Return the latents in the host's colours where it has them, else in false ones.

        None if they are no picture.
        """
        picture = as_picture(latents, self._form, *self._size) if self._previewer else None
        if picture is not None and self._previewer is not None:
            picture = picture.to(self._device, torch.float32)
            return self._previewer.decode_latent_to_preview_image("JPEG", picture)
        in_rows = latents.ndim == 3 and self._is_video  # of how many frames is not known
        grid = None if in_rows else as_grid(latents, *self._size)
        return None if grid is None else ("JPEG", self._colours(grid), PREVIEW_PIXELS)
