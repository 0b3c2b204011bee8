"""Which of the host's models are drawn in a timeline, by the colours of their roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ballast.memory.charts.axes import unit_colours

MODELS = {
    "SD1ClipModel (ComfyUI)": "text_encoder",
    "BaseModel (ComfyUI)": "transformer",
    "AutoencoderKL (ComfyUI)": "vae",
}


def drawn(picture: Any, roles: Mapping[str, str] = MODELS) -> dict[str, int]:
    """How many pixels of a picture each model's band has, the legend aside."""
    pixels = np.asarray(picture)[:500]  # the axes end at 477 of 675
    found = {}
    for name, colour in unit_colours(roles).items():
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        found[name] = int((abs(pixels.astype(int) - rgb).max(axis=-1) < 3).sum())
    return found
