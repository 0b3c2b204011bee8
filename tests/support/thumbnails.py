"""The templates' thumbnails, which docs/models.md shows too: drawn from plans, and holding the figures that they show.

UPDATE_THUMBNAILS=1 draws them anew.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from ballast.memory.planning.runplan import draw_plans, seconds
from ballast.memory.sizes import format_bytes
from PIL import Image, ImageDraw, ImageFont
from places import ROOT

WIDTH, HEIGHT, BAND = 900, 900, 120
SIDE = 720  # of the picture, in pixels
LEAST = 330  # of a chart
_UNEQUAL = 40  # of 255; another digit makes 59, another size of letters 232
GROUND, INK, MUTED = "#1f2937", "#ffffff", "#cbd5e1"


def check(name: str, plans: Sequence[Any]) -> None:
    """Assert that a thumbnail shows what these plans say, drawn as now; `name` is its template's."""
    path = ROOT / "workflows" / f"{name}.jpg"
    figures = json.dumps(
        [[plan.placement, format_bytes(plan.peak_vram_bytes), seconds(plan.step_seconds)] for plan in plans]
    )
    now = io.BytesIO()
    _drawn(name, plans).save(now, "JPEG", quality=60, optimize=True, comment=figures.encode())
    if os.environ.get("UPDATE_THUMBNAILS"):
        path.write_bytes(now.getvalue())
    with Image.open(path) as kept, Image.open(now) as drawn:
        assert kept.info.get("comment", b"").decode() == figures, f"{name}: draw it anew"
        assert is_alike(kept, drawn), f"{name}: it is drawn otherwise now, draw it anew"


def is_alike(kept: Image.Image, drawn: Image.Image) -> bool:
    """Return whether two pictures are the same to the eye: in each square of 4 pixels, whatever drew the letters."""
    if kept.size != drawn.size:
        return False
    one, other = (np.asarray(each.convert("RGB").reduce(4)).astype(int) for each in (kept, drawn))
    return bool(abs(one - other).max() <= _UNEQUAL)


def _drawn(name: str, plans: Sequence[Any]) -> Image.Image:
    """The charts below a band with the template's name, to the right of the badge that ComfyUI's page lays over it."""
    charts = draw_plans(plans, WIDTH, max(LEAST, (HEIGHT - BAND) // len(plans)))
    whole = Image.new("RGB", (WIDTH, BAND + charts.height), GROUND)
    whole.paste(charts, (0, BAND))
    model, kind = re.fullmatch(r"\d+ (\S+(?: [\d.]+)?) (.+)", name).groups()  # type: ignore[union-attr]
    pen = ImageDraw.Draw(whole)
    pen.text((WIDTH - 28, 16), model, INK, ImageFont.load_default(50), anchor="ra")
    pen.text((WIDTH - 28, 74), f"{kind}, before the run", MUTED, ImageFont.load_default(32), anchor="ra")
    whole.thumbnail((SIDE, SIDE))
    return whole
