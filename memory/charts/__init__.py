"""Charts of VRAM over time, from plain data: past stages, and plans. Drawing one imports matplotlib."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


def drawn(draw: Callable[[], Image.Image], width: int, height: int) -> Image.Image:
    """Return the picture that `draw` returns, or a blank one of `width` by `height` pixels without matplotlib.

    The blank picture and the log say how to install it. Other missing modules raise ModuleNotFoundError.
    """
    from PIL import Image, ImageDraw, ImageFont

    try:
        return draw()
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] != "matplotlib":
            raise
    note = f'Pictures need matplotlib, which is not installed. Run "{sys.executable}" -m pip install "matplotlib>=3.8".'
    logging.getLogger("ballast").warning("Ballast: %s", note)
    note = textwrap.fill(note, max(1, (width - 48) // 8))
    blank = Image.new("RGB", (width, height), "#ffffff")
    ImageDraw.Draw(blank).text((24, 24), note, "#1f2430", ImageFont.load_default(14), spacing=8)
    return blank
