"""Draws a timeline: what each unit's weights and the work beside them took of the device, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from .sizes import format_bytes

if TYPE_CHECKING:
    from .timeline import StageRecord

_INK, _MUTED, _GRID, _PAPER = "#1f2430", "#6b7280", "#e5e7eb", "#ffffff"
_BANDS = ("#f8fafc", "#eef2f7")
_WORK = "#cbd5e1"
_BUDGET = "#dc2626"
# One hue for each role, a darker shade for each further unit of it.
_HUES = {
    "text_encoder": ("#2563eb", "#3b82f6", "#1e40af", "#60a5fa"),
    "transformer": ("#ea580c", "#f59e0b"),
    "vae": ("#16a34a", "#4ade80"),
    "other": ("#7c3aed", "#a78bfa"),
}
_SUPERSAMPLE = 2


def draw_timeline(stages: Sequence[StageRecord], width: int, height: int) -> Image.Image:
    """An RGB picture of `width` by `height` pixels. Time between stages is left out."""
    scale = _SUPERSAMPLE
    canvas = Image.new("RGB", (width * scale, height * scale), _PAPER)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(13 * scale)
    bold = ImageFont.load_default(15 * scale)
    left, top, right, bottom = 84 * scale, 46 * scale, (width - 24) * scale, (height - 70) * scale

    seconds = sum(stage.seconds for stage in stages)
    if not seconds:
        draw.text((left, top), "Nothing has run yet.", _INK, bold)
        return canvas.resize((width, height), Image.Resampling.LANCZOS)
    peak = max(stage.peak_bytes for stage in stages)
    budget = max(stage.budget_bytes for stage in stages)
    # A budget far above the peak would flatten the picture; then it is only named.
    ceiling = max(1, budget if budget <= 2.5 * peak else peak) * 1.08
    colours = _unit_colours(stages)

    def x_at(elapsed: float) -> float:
        return left + (right - left) * elapsed / seconds

    def y_at(size: float) -> float:
        return bottom - (bottom - top) * min(size / ceiling, 1.0)

    elapsed = 0.0
    for number, stage in enumerate(stages):
        x0, x1 = x_at(elapsed), x_at(elapsed + stage.seconds)
        draw.rectangle((x0, top, x1, bottom), _BANDS[number % 2])
        elapsed += stage.seconds
    for tick in range(5):
        size = ceiling / 1.08 * tick / 4
        draw.line((left, y_at(size), right, y_at(size)), _GRID, scale)
        draw.text((left - 8 * scale, y_at(size)), format_bytes(int(size)), _MUTED, font, anchor="rm")

    elapsed = 0.0
    label_end = 0.0
    for stage in stages:
        for before, event in zip(stage.events, stage.events[1:], strict=False):
            x0, x1 = (x_at(elapsed + e.seconds - stage.started) for e in (before, event))
            base = 0
            draw.rectangle((x0, y_at(max(event.peak_bytes, before.allocated_bytes)), max(x1, x0 + 1), bottom), _WORK)
            for unit in before.residents:
                draw.rectangle((x0, y_at(base + unit.bytes), max(x1, x0 + 1), y_at(base)), colours[unit.name])
                base += unit.bytes
        text = f"{stage.name}  {stage.seconds:.2f} s, peak {format_bytes(stage.peak_bytes)}"
        text = text if x_at(elapsed) + draw.textlength(text, bold) <= x_at(elapsed + stage.seconds) else stage.name
        # Labels of stages too short for their own width move right, never over each other.
        x = max(x_at(elapsed) + 4 * scale, label_end)
        draw.text((x, top - 24 * scale), text, _INK, bold)
        label_end = x + draw.textlength(text, bold) + 12 * scale
        elapsed += stage.seconds
        draw.line((x_at(elapsed), top, x_at(elapsed), bottom), _MUTED, 1)
    draw.line((left, bottom, right, bottom), _INK, scale)
    if budget <= ceiling:
        for x in range(int(left), int(right), 12 * scale):
            draw.line((x, y_at(budget), x + 6 * scale, y_at(budget)), _BUDGET, scale)
    for tick in range(6):
        x = x_at(seconds * tick / 5)
        draw.text((x, bottom + 6 * scale), f"{seconds * tick / 5:.1f} s", _MUTED, font, anchor="mt")

    x = float(left)
    legend = [*colours.items(), ("working memory", _WORK), (f"budget {format_bytes(budget)}", _BUDGET)]
    for name, colour in legend:
        y = bottom + 38 * scale
        draw.rectangle((x, y, x + 12 * scale, y + 12 * scale), colour)
        draw.text((x + 18 * scale, y + 6 * scale), name, _INK, font, anchor="lm")
        x += 18 * scale + draw.textlength(name, font) + 22 * scale
    return canvas.resize((width, height), Image.Resampling.LANCZOS)


def _unit_colours(stages: Sequence[StageRecord]) -> dict[str, str]:
    roles = {r.name: r.role for stage in stages for event in stage.events for r in event.residents}
    counts = dict.fromkeys(_HUES, 0)
    colours = {}
    for name, role in roles.items():
        colours[name] = _HUES[role][counts[role] % len(_HUES[role])]
        counts[role] += 1
    return colours
