"""Draws a timeline: what each unit's weights and the work beside them took of the device, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from .sizes import format_bytes

if TYPE_CHECKING:
    from .timeline import OnDevice, StageRecord

_INK, _MUTED, _GRID, _PAPER = "#1f2430", "#6b7280", "#e5e7eb", "#ffffff"
_BANDS = ("#f8fafc", "#eef2f7")
_WORK = "#cbd5e1"
_BUDGET = "#dc2626"
# One hue for each role, another shade for each further unit of it.
_HUES = {
    "text_encoder": ("#2563eb", "#60a5fa", "#1e40af", "#93c5fd"),
    "transformer": ("#ea580c", "#f59e0b"),
    "vae": ("#16a34a", "#4ade80"),
    "other": ("#7c3aed", "#a78bfa"),
}
_SUPERSAMPLE = 2
_LEFT, _TOP, _RIGHT, _BOTTOM = 84, 46, 24, 70  # margins in pixels


@dataclass
class _Column:
    """One pixel column: the weights on the device, and the highest allocation, of the time that it stands for."""

    residents: tuple[OnDevice, ...] = ()
    peak_bytes: int = 0


def draw_timeline(stages: Sequence[StageRecord], width: int, height: int) -> Image.Image:
    """An RGB picture of `width` by `height` pixels. Time between stages is left out."""
    scale = _SUPERSAMPLE
    canvas = Image.new("RGB", (width * scale, height * scale), _PAPER)
    draw = ImageDraw.Draw(canvas)
    font, bold = ImageFont.load_default(13 * scale), ImageFont.load_default(15 * scale)
    left, top = _LEFT * scale, _TOP * scale
    right, bottom = (width - _RIGHT) * scale, (height - _BOTTOM) * scale
    seconds = sum(stage.seconds for stage in stages)
    peak = max((stage.peak_bytes for stage in stages), default=0)
    if not seconds or not peak:
        nothing = "All stages ran on the CPU: there is no VRAM to show." if seconds else "Nothing has run yet."
        draw.text((left, top), nothing, _INK, bold)
        return canvas.resize((width, height), Image.Resampling.LANCZOS)

    budget = max(stage.budget_bytes for stage in stages)
    # A budget far above the peak would flatten the picture; then it is only named.
    budget_shown = budget <= 2.5 * peak
    ceiling = (budget if budget_shown else peak) * 1.06
    colours = _unit_colours(stages)

    def x_at(elapsed: float) -> float:
        return left + (right - left) * elapsed / seconds

    def y_at(size: float) -> float:
        return bottom - (bottom - top) * min(size / ceiling, 1.0)

    starts = [sum(stage.seconds for stage in stages[:number]) for number in range(len(stages) + 1)]
    for number in range(len(stages)):
        draw.rectangle((x_at(starts[number]), top, x_at(starts[number + 1]), bottom), _BANDS[number % 2])
    step = _nice_step(ceiling)
    for size in range(0, int(ceiling) + 1, step):
        draw.line((left, y_at(size), right, y_at(size)), _GRID, scale)
        draw.text((left - 8 * scale, y_at(size)), format_bytes(size) if size else "0", _MUTED, font, anchor="rm")

    for at, column in enumerate(_columns(stages, right - left), left):
        base = 0
        draw.line((at, y_at(column.peak_bytes), at, bottom), _WORK)
        for unit in column.residents:
            draw.line((at, y_at(base + unit.bytes), at, y_at(base)), colours[unit.name])
            base += unit.bytes

    label_end = 0.0
    for stage, start in zip(stages, starts, strict=False):
        text = f"{stage.name}  {stage.seconds:.2f} s, peak {format_bytes(stage.peak_bytes)}"
        fits = x_at(start) + draw.textlength(text, bold) <= x_at(start + stage.seconds)
        # Labels of stages too short for their own width move right, never over each other.
        label = text if fits else stage.name
        length = draw.textlength(label, bold)
        x = min(max(x_at(start), label_end), (width - 4) * scale - length)
        draw.text((x, top - 24 * scale), label, _INK, bold)
        label_end = x + length + 12 * scale
        draw.line((x_at(start), top, x_at(start), bottom), _MUTED, 1)
    draw.line((left, bottom, right, bottom), _INK, scale)
    if budget_shown:
        for dash in range(left, right, 12 * scale):
            draw.line((dash, y_at(budget), dash + 6 * scale, y_at(budget)), _BUDGET, scale)
    for tick in range(6):
        anchor = ("lt", "mt", "rt")[(tick > 0) + (tick == 5)]
        draw.text((x_at(seconds * tick / 5), bottom + 6 * scale), f"{seconds * tick / 5:.1f} s", _MUTED, font, anchor)

    x = float(left)
    named = f"budget {format_bytes(budget)}" + ("" if budget_shown else ", off the scale")
    for name, colour in [*colours.items(), ("working memory", _WORK), (named, _BUDGET)]:
        y = bottom + 38 * scale
        draw.rectangle((x, y, x + 12 * scale, y + 12 * scale), colour)
        draw.text((x + 18 * scale, y + 6 * scale), name, _INK, font, anchor="lm")
        x += 18 * scale + draw.textlength(name, font) + 22 * scale
    return canvas.resize((width, height), Image.Resampling.LANCZOS)


def _columns(stages: Sequence[StageRecord], count: int) -> list[_Column]:
    """What to draw in each of `count` pixel columns. Of what falls into one, the highest peak shows."""
    columns = [_Column() for _ in range(count)]
    seconds = sum(stage.seconds for stage in stages)
    elapsed = 0.0
    for stage in stages:
        for before, event in zip(stage.events, stage.events[1:], strict=False):
            first, last = (
                min(count - 1, max(0, int((elapsed + e.seconds - stage.started) / seconds * count)))
                for e in (before, event)
            )
            # While weights arrive, they are the peak, not work beside them.
            peak = before.allocated_bytes if event.kind == "place" else event.peak_bytes
            for column in columns[first : last + 1]:
                column.residents = before.residents
                column.peak_bytes = max(column.peak_bytes, peak)
        elapsed += stage.seconds
    return columns


def _nice_step(ceiling: float) -> int:
    """A round number of bytes that divides the axis into four to eight parts."""
    unit = 1
    while unit * 1024 <= ceiling / 4:
        unit *= 1024
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        if ceiling / (unit * factor) <= 8:
            return unit * factor
    return unit * 1024


def _unit_colours(stages: Sequence[StageRecord]) -> dict[str, str]:
    roles = {r.name: r.role for stage in stages for event in stage.events for r in event.residents}
    counts = dict.fromkeys(_HUES, 0)
    colours = {}
    for name, role in roles.items():
        colours[name] = _HUES[role][counts[role] % len(_HUES[role])]
        counts[role] += 1
    return colours
