"""Pictures of what was measured."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .report import words

_INK, _MUTED, _GRID, _PAPER, _PANEL = "#1f2430", "#6b7280", "#e5e7eb", "#ffffff", "#f8fafc"
_OURS, _OTHER, _BOUND, _BAD = "#ea580c", "#60a5fa", "#1e40af", "#dc2626"
_SCALE = 2  # drawn larger, then made smaller, so that edges are smooth


class _Sheet:
    """A picture in pixels of its final size."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self._canvas = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
        self._draw = ImageDraw.Draw(self._canvas)
        self._fonts = {size: ImageFont.load_default(size * _SCALE) for size in (12, 14, 18)}

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        self._draw.rectangle([edge * _SCALE for edge in (left, top, right, bottom)], colour)

    def line(self, left: float, top: float, right: float, bottom: float, colour: str, width: float = 1) -> None:
        self._draw.line([edge * _SCALE for edge in (left, top, right, bottom)], colour, round(width * _SCALE))

    def text(self, x: float, y: float, text: str, colour: str = _INK, size: int = 12, anchor: str = "lm") -> None:
        self._draw.text((x * _SCALE, y * _SCALE), text, colour, self._fonts[size], anchor=anchor)

    def fitted(self, text: str, width: float, size: int = 12) -> str:
        """The text, cut short if it is wider than so many pixels."""
        if self._draw.textlength(text, self._fonts[size]) <= width * _SCALE:
            return text
        while text and self._draw.textlength(text + " ...", self._fonts[size]) > width * _SCALE:
            text = text[:-1]
        return text + " ..."

    def done(self) -> Image.Image:
        return self._canvas.resize(self.size, Image.Resampling.LANCZOS)


def _title(sheet: _Sheet, found: dict[str, Any], title: str, note: str) -> None:
    sheet.text(24, 28, title, size=18)
    of = f"{found['size']}, {words('weight_bytes', found['weight_bytes'])} of weights, on {found['device']}"
    sheet.text(24, 52, f"{of}; torch {found['torch']}. {note}", _MUTED)


def stream(found: dict[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars over the resident share, one panel for each regime, and the bound as lines."""
    rows = found["rows"]
    panels: list[list[dict[str, Any]]] = []
    for row in rows:  # a share that is not above the one before begins another regime
        if not panels or row["share"] <= panels[-1][-1]["share"]:
            panels.append([])
        panels[-1].append(row)
    sheet = _Sheet(1080, 430)
    overhead = ", ".join(f"{value} us on {name}" for name, value in found["overhead_us_per_block"].items())
    _title(sheet, found, "Streaming: a steady step against the bound", f"Python per block: {overhead}")
    width, top, bottom = (1080 - 48 - 24 * (len(panels) - 1)) / len(panels), 112, 350
    for number, panel in enumerate(panels):
        left = 24 + number * (width + 24)
        ceiling = max(max(row["step"], row["bound"]) for row in panel) * 1.15
        ratio, tokens = panel[0]["ratio"], panel[0]["tokens"]
        sheet.text(left, 92, f"computing / copying {ratio:.2g}   ({tokens} tokens)", size=14)
        sheet.box(left, top, left + width, bottom, _PANEL)
        slot = width / len(panel)
        for index, row in enumerate(panel):
            x, y = left + slot * (index + 0.5), bottom - (bottom - top) * row["step"] / ceiling
            sheet.box(x - slot * 0.3, y, x + slot * 0.3, bottom, _OURS)
            bound = bottom - (bottom - top) * row["bound"] / ceiling
            sheet.line(x - slot * 0.42, bound, x + slot * 0.42, bound, _BOUND, 2)
            sheet.text(x, min(y, bound) - 10, f"{row['over_bound']:.2f}", _INK, anchor="mm")
            sheet.text(x, bottom - 10, words("step", row["step"]), _PAPER, anchor="mm")
            sheet.text(x, bottom + 14, f"{row['share']:.0%}", _INK, anchor="mm")
            sheet.text(x, bottom + 30, words("peak_bytes", row["peak_bytes"]), _MUTED, anchor="mm")
        sheet.line(left, bottom, left + width, bottom, _INK)
    sheet.box(24, 399, 36, 411, _OURS)
    sheet.text(44, 405, "seconds of a step (above: over the bound)")
    sheet.line(312, 405, 336, 405, _BOUND, 2)
    sheet.text(344, 405, "bound: max(computing, streamed bytes / bandwidth)")
    sheet.text(1056, 405, "below: share of the weights that is resident, peak VRAM", _MUTED, anchor="rm")
    return sheet.done()


def peers(found: dict[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars, fastest first, then what failed and why."""
    done = sorted((row for row in found["rows"] if "error" not in row), key=lambda row: row["step"])
    failed = [row for row in found["rows"] if "error" in row]
    line, top = 26, 118
    sheet = _Sheet(1080, top + line * (len(done) + len(failed) + bool(failed)) + 24)
    note = f"{found['regime']['tokens']} tokens: computing / copying {found['ratio']:.2g}"
    _title(sheet, found, "Ways to run a model that does not fit: a steady step", note)
    left, right = 180, 620
    sheet.line(left + 2, top - 32, left + 2, top - 20, _BOUND, 2)
    sheet.text(left + 12, top - 26, "its bound: max(computing, what it copies / bandwidth)", _MUTED)
    columns = {"over_bound": (690, "T/bound"), "peak_bytes": (780, "peak VRAM"), "copied_bytes": (870, "copied")}
    columns |= {"first_step": (960, "first step"), "difference": (1050, "differs")}
    for x, heading in columns.values():
        sheet.text(x, top - 26, heading, _MUTED, anchor="rm")
    slowest = max((row["step"] for row in done), default=1.0)
    y = float(top)
    for row in done:
        sheet.text(24, y, row["name"])
        end = left + (right - left - 60) * row["step"] / slowest
        sheet.box(left, y - 8, end, y + 8, _OURS if row["name"].startswith("ballast") else _OTHER)
        if "bound" in row:
            bound = left + (right - left - 60) * row["bound"] / slowest
            sheet.line(bound, y - 10, bound, y + 10, _BOUND, 2)
        sheet.text(max(end, left) + 8, y, f"{words('step', row['step'])} s")
        for name, (x, _) in columns.items():
            sheet.text(x, y, words(name, row.get(name)), anchor="rm")
        y += line
    if failed:
        sheet.line(24, y, 1056, y, _GRID)
        y += line
    for row in failed:
        sheet.text(24, y, row["name"], _MUTED)
        sheet.text(left, y, sheet.fitted(row["error"], 1056 - left), _BAD)
        y += line
    return sheet.done()
