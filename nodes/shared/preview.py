"""Draw latents in false colours, for models whose latents the host cannot colour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

PREVIEW_PIXELS = 512  # of the longer side, at most


def as_grid(latents: torch.Tensor, width: int, height: int) -> torch.Tensor | None:
    """Return the newest frame of the first of the latents as features by place, [C,h,w]; None if they are no picture.

    Latents are [B,C,h,w], [B,C,f,h,w], or rows of tokens [B,tokens,features]. Those are taken for a picture of this
    width and height in pixels, a square one without.
    """
    first = latents[0]
    if latents.ndim == 5:
        return first[:, -1]
    if latents.ndim == 4:
        return first
    if latents.ndim != 3:
        return None
    rows = round(math.sqrt(len(first) * (height / width if width and height else 1)))
    return first.T.unflatten(1, (rows, -1)) if rows and len(first) % rows == 0 else None


class FalseColours:
    """The three main components of latents in red, green and blue. From step to step colours stay what they are."""

    def __init__(self) -> None:
        self._axes: torch.Tensor | None = None

    def __call__(self, grid: torch.Tensor) -> Image:
        """Return a picture of [C,h,w]."""
        from PIL.Image import Resampling, fromarray

        rows = grid.detach().float().cpu().nan_to_num().flatten(1).T
        rows = rows - rows.mean(0)
        colours = rows @ self._turned(torch.linalg.eigh(rows.T @ rows)[1][:, -3:].flip(1))
        most = torch.quantile(colours.abs(), 0.98).clamp(min=1e-6)  # one for all: noise in a weak component stays weak
        pixels = (0.5 + colours / (2 * most)).clamp(0, 1) * 255
        pixels = torch.nn.functional.pad(pixels, (0, 3 - pixels.shape[1])).byte()  # of fewer than three channels
        picture = fromarray(pixels.reshape(*grid.shape[1:], 3).numpy())
        scale = max(1, PREVIEW_PIXELS // max(picture.size))
        return picture.resize((picture.width * scale, picture.height * scale), Resampling.BICUBIC)

    def _turned(self, axes: torch.Tensor) -> torch.Tensor:
        """Return the same axes, pointing as they did in the step before.

        An axis of a decomposition may point either way.
        """
        guide = torch.ones_like(axes) if self._axes is None else self._axes
        self._axes = axes * torch.where((axes * guide).sum(0) < 0, -1.0, 1.0)
        return self._axes
