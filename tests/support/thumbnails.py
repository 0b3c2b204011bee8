"""The templates' thumbnails, which README shows too: drawn from plans, and holding the figures that they show.

UPDATE_THUMBNAILS=1 draws them anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from ballast.memory.planning.runplan import draw_plans, seconds
from ballast.memory.sizes import format_bytes
from PIL import Image, ImageDraw, ImageFont
from places import ROOT

WIDTH, HEIGHT, BAND = 900, 900, 120
LEAST = 330  # of a chart
GROUND, INK, MUTED = "#1f2937", "#ffffff", "#cbd5e1"


def check(name: str, plans: Sequence[Any]) -> None:
    """Assert that a thumbnail shows what these plans say; `name` is its template's."""
    path = ROOT / "workflows" / f"{name}.jpg"
    figures = json.dumps(
        [[plan.placement, format_bytes(plan.peak_vram_bytes), seconds(plan.step_seconds)] for plan in plans]
    )
    if os.environ.get("UPDATE_THUMBNAILS"):
        _drawn(name, plans).save(path, quality=60, optimize=True, comment=figures.encode())
    with Image.open(path) as picture:
        assert picture.info.get("comment", b"").decode() == figures, f"{name}: draw it anew"


def _drawn(name: str, plans: Sequence[Any]) -> Image.Image:
    """The charts below a band with the template's name, by which thumbnails are told apart."""
    charts = draw_plans(plans, WIDTH, max(LEAST, (HEIGHT - BAND) // len(plans)))
    whole = Image.new("RGB", (WIDTH, BAND + charts.height), GROUND)
    whole.paste(charts, (0, BAND))
    model, kind = re.fullmatch(r"\d+ (\S+(?: [\d.]+)?) (.+)", name).groups()  # type: ignore[union-attr]
    pen = ImageDraw.Draw(whole)
    pen.text((28, 16), model, INK, ImageFont.load_default(50))
    pen.text((28, 74), f"{kind}, before the run", MUTED, ImageFont.load_default(32))
    whole.thumbnail((WIDTH, HEIGHT))
    return whole
