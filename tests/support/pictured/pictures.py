"""Pictures and masks for tests, as Ballast takes them and as the stock pipelines do."""

from __future__ import annotations

import torch
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> torch.Tensor:
    """[1,H,W,3] of soft shapes in 0..1, each value one of 256."""
    noise = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    shapes = torch.nn.functional.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)
    return (shapes.permute(0, 2, 3, 1) * 255).round() / 255


def mask(width: int, height: int) -> torch.Tensor:
    """[1,H,W], ones in a part that is off the middle."""
    made = torch.zeros(1, height, width)
    made[:, height // 4 : height // 2, width // 3 :] = 1
    return made


def pil(pictures: torch.Tensor) -> Image.Image:
    """The first one, as the stock pipelines take it."""
    return Image.fromarray((pictures[0] * 255).round().byte().numpy())
