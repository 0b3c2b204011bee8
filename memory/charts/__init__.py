"""Charts of VRAM over time, what happened and what is planned, from plain data. Drawing one imports matplotlib.

Nothing here knows who made the data: `timeline` and `plan` define what they draw.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFont

_LINE = 110  # characters of the note's lines; its font is smaller in a narrow picture


def drawn(draw: Callable[[], Image.Image], width: int, height: int) -> Image.Image:
    """What `draw` returns; without matplotlib, a blank picture that says what to install."""
    try:
        return draw()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
    blank = Image.new("RGB", (width, height), "#ffffff")
    size = max(8, min(13, width // 65))
    note = "\n".join(textwrap.wrap(missing(), _LINE))
    ImageDraw.Draw(blank).text((width // 30, height // 10), note, "#1f2430", ImageFont.load_default(size), spacing=8)
    return blank


def missing() -> str:
    """What to say where matplotlib is not installed."""
    return f'Pictures need matplotlib, which is not installed. Run "{sys.executable}" -m pip install "matplotlib>=3.8".'
