"""Draws a timeline: what each unit's weights and the work beside them took of the device, stage by stage.

`Chart` has the axes, labels and legend, which the picture of a plan shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from .sizes import format_bytes

if TYPE_CHECKING:
    from .timeline import OnDevice, StageRecord
    from .vocabulary import Role

INK, MUTED, _GRID, _PAPER = "#1f2430", "#6b7280", "#e5e7eb", "#ffffff"
GROUND = "#f8fafc"
_BANDS = (GROUND, "#eef2f7")
WORK = "#cbd5e1"
_OTHERS = "#94a3b8"
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


class Chart:
    """Axes of bytes, and what is drawn around them. Positions are in pixels of a picture `scale` times the size."""

    scale = _SUPERSAMPLE

    def __init__(self, width: int, height: int, peak_bytes: int, budgets: Sequence[int], title: str = "") -> None:
        scale = self.scale
        self.size = width, height
        self.canvas = Image.new("RGB", (width * scale, height * scale), _PAPER)
        self.draw = ImageDraw.Draw(self.canvas)
        self.font, self.bold = ImageFont.load_default(13 * scale), ImageFont.load_default(15 * scale)
        self.left, self.top = _LEFT * scale, (_TOP + (26 if title else 0)) * scale
        self.right, self.bottom = (width - _RIGHT) * scale, (height - _BOTTOM) * scale
        self.budgets = budgets  # one for each stage
        # A budget far above the peak would flatten the picture; then it is only named.
        self.highest_shown = 2.5 * peak_bytes
        self.ceiling = max(peak_bytes, *(size for size in (*budgets, 0) if size <= self.highest_shown)) * 1.06
        self.draw.text((self.left, 10 * scale), title, INK, self.bold)

    def y_at(self, size: float) -> float:
        """Where so many bytes are."""
        return self.bottom - (self.bottom - self.top) * min(size / self.ceiling, 1.0)

    def ground(self, edges: Sequence[float]) -> None:
        """A band for each stage, and lines at round numbers of bytes."""
        for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            self.draw.rectangle((start, self.top, end, self.bottom), _BANDS[number % 2])
        for size in range(0, int(self.ceiling) + 1, _nice_step(self.ceiling)):
            self.draw.line((self.left, self.y_at(size), self.right, self.y_at(size)), _GRID, self.scale)
            words = format_bytes(size) if size else "0"
            self.draw.text((self.left - 8 * self.scale, self.y_at(size)), words, MUTED, self.font, anchor="rm")

    def stages(self, edges: Sequence[float], names: Sequence[str], facts: Sequence[str]) -> None:
        """The name of each stage above it, with the facts where there is room."""
        scale, label_end = self.scale, 0.0
        ahead = sum(self.draw.textlength(name, self.bold) + 12 * scale for name in names)
        for start, end, name, fact in zip(edges, edges[1:], names, facts, strict=False):
            # Labels of stages too short for their own width move right, never over each other, and left at the end.
            bare = self.draw.textlength(name, self.bold)
            ahead -= bare + 12 * scale
            most = (self.size[0] - 4) * scale - ahead
            x = min(max(start, label_end), most - bare)
            text = f"{name}  {fact}"
            label = text if x + self.draw.textlength(text, self.bold) <= min(end, most) else name
            length = self.draw.textlength(label, self.bold)
            self.draw.text((x, self.top - 24 * scale), label, _BUDGET if "," in name else INK, self.bold)
            label_end = x + length + 12 * scale
            self.draw.line((start, self.top, start, self.bottom), MUTED, 1)

    def frame(self, colours: Mapping[str, str], edges: Sequence[float]) -> None:
        """The lower edge, the budget of each stage, and the legend."""
        scale = self.scale
        self.draw.line((self.left, self.bottom, self.right, self.bottom), INK, scale)
        for start, end, size in zip(edges, edges[1:], self.budgets, strict=False):
            if size <= self.highest_shown:
                for dash in range(int(start), int(end), 12 * scale):
                    self.draw.line((dash, self.y_at(size), min(dash + 6 * scale, end), self.y_at(size)), _BUDGET, scale)
        x, y = float(self.left), self.bottom + 34 * scale
        named = " to ".join(dict.fromkeys(map(format_bytes, (min(self.budgets), max(self.budgets)))))
        budget = f"budget {named}" + ("" if max(self.budgets) <= self.highest_shown else ", off the scale")
        for name, colour in [*colours.items(), ("working memory", WORK), (budget, _BUDGET)]:
            length = 18 * scale + self.draw.textlength(name, self.font)
            if x + length > (self.size[0] - 4) * scale:
                x, y = float(self.left), y + 18 * scale
            self.draw.rectangle((x, y, x + 12 * scale, y + 12 * scale), colour)
            self.draw.text((x + 18 * scale, y + 6 * scale), name, INK, self.font, anchor="lm")
            x += length + 22 * scale

    def picture(self) -> Image.Image:
        """What was drawn, at its size."""
        return self.canvas.resize(self.size, Image.Resampling.LANCZOS)


@dataclass
class _Column:
    """One pixel column: the weights on the device, and the highest allocation, of the time that it stands for."""

    residents: tuple[OnDevice, ...] = ()
    peak_bytes: int = 0


def draw_timeline(stages: Sequence[StageRecord], runs: Sequence[str], width: int, height: int) -> Image.Image:
    """An RGB picture of `width` by `height` pixels, of our own bytes. Time between stages is left out.

    `runs` names the run of each stage; where there are several, a line parts them.
    """
    seconds = sum(stage.seconds for stage in stages)
    columns = _columns(stages, (width - _LEFT - _RIGHT) * Chart.scale) if seconds else []
    peak = max((column.peak_bytes for column in columns), default=0)
    several = len(set(runs)) > 1
    chart = Chart(width, height, peak, [stage.budget_bytes for stage in stages], title=" " if several else "")
    draw, left, right, bottom = chart.draw, chart.left, chart.right, chart.bottom
    if not seconds or not peak:
        nothing = "All stages ran on the CPU: there is no VRAM to show." if seconds else "Nothing has run yet."
        draw.text((left, chart.top), nothing, INK, chart.bold)
        return chart.picture()

    others = max(stage.other_bytes * stage.has_others for stage in stages)
    colours = unit_colours({r.name: r.role for stage in stages for event in stage.events for r in event.residents})

    def x_at(elapsed: float) -> float:
        return left + (right - left) * elapsed / seconds

    edges = [x_at(sum(stage.seconds for stage in stages[:number])) for number in range(len(stages) + 1)]
    chart.ground(edges)
    for at, column in enumerate(columns, left):
        base = 0
        draw.line((at, chart.y_at(column.peak_bytes), at, bottom), WORK)
        for unit in column.residents:
            draw.line((at, chart.y_at(base + unit.bytes), at, chart.y_at(base)), colours[unit.name])
            base += unit.bytes
    facts = [f"{stage.seconds:.2f} s, peak {format_bytes(stage.own_peak_bytes)}" for stage in stages]
    chart.stages(edges, [stage.title for stage in stages], facts)
    for x, run, before in zip(edges, runs, ["", *runs], strict=False):
        if several and run != before:
            draw.line((x, 12 * chart.scale, x, bottom), INK, 2 * chart.scale)
            draw.text((x + 6 * chart.scale, 10 * chart.scale), f"run: {run}", MUTED, chart.bold)
    for tick in range(6):
        anchor = ("lt", "mt", "rt")[(tick > 0) + (tick == 5)]
        x, words = x_at(seconds * tick / 5), f"{seconds * tick / 5:.1f} s"
        draw.text((x, bottom + 6 * chart.scale), words, MUTED, chart.font, anchor)
    if others:
        colours[f"not drawn: {format_bytes(others)} of other models"] = _OTHERS
    chart.frame(colours, edges)
    return chart.picture()


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
            held = before.allocated_bytes - before.other_bytes
            peak = held if event.kind == "place" else event.own_peak_bytes(before)
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
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 512):
        if ceiling / (unit * factor) <= 8:
            return unit * factor
    return unit * 1024


def unit_colours(roles: Mapping[str, Role]) -> dict[str, str]:
    """A colour for each unit by its role."""
    counts = dict.fromkeys(_HUES, 0)
    colours = {}
    for name, role in roles.items():
        colours[name] = _HUES[role][counts[role] % len(_HUES[role])]
        counts[role] += 1
    return colours
