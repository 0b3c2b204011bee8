"""The parts of all charts: a figure in exact pixels, axes of bytes, bands for stages, the budget, legend and colours.

Charts are drawn on matplotlib's Agg canvas, without pyplot and without its global settings. So any thread may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Transform
from PIL import Image

from ..sizes import format_bytes

INK, MUTED, PAPER, GROUND = "#1f2430", "#6b7280", "#ffffff", "#f8fafc"
WORK, OTHERS, _BUDGET, _GRID = "#cbd5e1", "#94a3b8", "#dc2626", "#e5e7eb"
_BANDS = (GROUND, "#eef2f7")
# One hue for each role, one shade for each unit of it. Further units begin with the first shade again.
_HUES = {
    "text_encoder": ("#2563eb", "#60a5fa", "#1e40af", "#93c5fd"),
    "transformer": ("#ea580c", "#f59e0b"),
    "vae": ("#16a34a", "#4ade80"),
    "other": ("#7c3aed", "#a78bfa"),
}
FONT = "DejaVu Sans"  # ships with matplotlib
SMALL, LARGE = 11.5, 13.0  # font sizes in pixels
_DPI = 72  # dots per inch: a point is a pixel
_LEFT, _TOP, _RIGHT, _BOTTOM, _TITLE = 84, 46, 24, 70, 26  # margins in pixels
_GAP, _TICK = 12, 22  # the least pixels between two labels, side by side and one above the other
_ROW, _NARROW = 18, 600  # pixels: height of a row of a title or legend; width below which each may take one row more


def new_figure(width: int, height: int) -> Figure:
    """Return a white figure of `width` by `height` pixels."""
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=PAPER)
    figure.set_layout_engine("none")
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure, left: float, top: float, right: float, bottom: float, ground: str = "none") -> Axes:
    """Return axes between these pixels, counted from the left and the top. Only the lower side has a line."""
    width, height = figure.bbox.size
    axes = figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))
    axes.set(facecolor=ground, axisbelow=True)
    axes.grid(False)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=INK, linewidth=1)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=MUTED, labelfontfamily=FONT, pad=7)
    return axes


def write(
    on: Figure | Axes, x: float, y: float, words: str, colour: str = INK, size: float = SMALL, at: str = "left"
) -> Text:
    """Write words at a pixel of a figure, counted from the top, or at a point of axes. Return the text.

    `at` is "left", "center" or "right": the part of the words that lies at `x`.
    """
    place: dict[str, Any] = {"transform": _pixels(on)} if isinstance(on, Figure) else {}
    y = on.bbox.height - y if isinstance(on, Figure) else y
    return on.text(x, y, words, color=colour, size=size, family=FONT, ha=at, va="center", parse_math=False, **place)


def _pixels(figure: Figure) -> Transform:
    """Return the transform from a figure's pixels. In a picture that is drawn larger, one of them covers more."""
    return Affine2D().scale(1 / _DPI) + figure.dpi_scale_trans


def add_legend(figure: Figure, keys: Sequence[Artist], left: float, top: float) -> None:
    """Add a legend whose first row begins `top` pixels above the bottom, in as few rows as fit.

    On a narrow chart it begins further to the left.
    """
    look: dict[str, Any] = {"frameon": False, "borderpad": 0, "borderaxespad": 0, "labelcolor": INK}
    look |= {"handlelength": 1.5, "handletextpad": 0.5, "columnspacing": 1.4, "prop": {"family": FONT, "size": SMALL}}
    place: dict[str, Any] = {"loc": "upper left", "bbox_transform": _pixels(figure)}
    left = left if figure.bbox.width >= _NARROW else _GAP
    while keys:
        for count in range(len(keys), 0, -1):
            legend = figure.legend(handles=keys[:count], ncols=count, bbox_to_anchor=(left, top), **place, **look)
            if count == 1 or legend.get_window_extent().width <= figure.bbox.width - left - 4:
                break
            legend.remove()
        keys, top = keys[count:], top - _ROW


def to_image(figure: Figure, scale: float = 1.0) -> Image.Image:
    """Return the figure as an RGB picture with `scale` times as many pixels each way. Letters and lines grow too."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    figure.set_dpi(_DPI * scale)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


def unit_colours(roles: Mapping[str, str]) -> dict[str, str]:
    """Return the colour of each unit. `roles` maps units to their roles."""
    counts, colours = dict.fromkeys(_HUES, 0), {}
    for name, role in roles.items():
        colours[name] = _HUES[role][counts[role] % len(_HUES[role])]
        counts[role] += 1
    return colours


class ByteChart:
    """Axes of bytes over time. Stage i is a band from `edges[i]` to `edges[i + 1]`, with `budgets[i]` as a dashed line.

    A budget above 2.5 times `peak_bytes` would flatten the picture. It is only named in the legend.
    """

    def __init__(
        self, width: int, height: int, peak_bytes: int, budgets: Sequence[int], edges: Sequence[float], title: str = ""
    ) -> None:
        self.figure, self.edges = new_figure(width, height), edges
        self.left, self.right = _LEFT, width - _RIGHT
        self._legend = _BOTTOM - 31 + _ROW * (width < _NARROW)
        lines = self._title(title, width)
        self.top, self.bottom = _TOP + _TITLE * bool(title) + _ROW * (lines - 1), height - self._legend - 31
        self.axes = new_axes(self.figure, self.left, self.top, self.right, self.bottom)
        shown = [size for size in budgets if size <= 2.5 * peak_bytes]
        named = " to ".join(dict.fromkeys(map(format_bytes, (min(budgets), max(budgets)))))
        self._budget = f"budget {named}{', off the scale' * (len(shown) < len(budgets))}"
        ceiling = max([peak_bytes, *shown]) * 1.06
        self.axes.set(xlim=(edges[0], edges[-1]), ylim=(0, ceiling))
        sizes = range(0, int(ceiling) + 1, _round_step(ceiling, min(8, max(1, (self.bottom - self.top) // _TICK))))
        self.axes.set_yticks(sizes, [format_bytes(size) if size else "0" for size in sizes])
        self.axes.grid(axis="y", color=_GRID, linewidth=1, linestyle="-", alpha=1)
        for number, ((start, end), budget) in enumerate(zip(pairwise(edges), budgets, strict=True)):
            self.axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0, zorder=0)
            self.axes.axvline(start, color=MUTED, linewidth=0.6, linestyle="-", marker="", zorder=3)
            if budget in shown:
                self.level(start, end, budget, _BUDGET, (0, (6, 6)))

    def _title(self, title: str, width: int) -> int:
        """Write the title, in two lines if the chart is narrow and the title has a semicolon.

        Return the number of lines.
        """
        left, lines = (self.left, [title]) if width >= _NARROW else (_GAP, title.split("; ", 1))
        for number, line in enumerate(lines):
            more = ";" * (number + 1 < len(lines))
            heading, size = write(self.figure, left, 18 + _ROW * number, f"{line}{more}", size=LARGE), LARGE
            while heading.get_window_extent().x1 > width - 4 and size > 7:
                size -= 1
                heading.set_fontsize(size)
        return len(lines)

    def level(self, start: float, end: float, size: int, colour: str, style: Any = "-") -> None:
        """Draw a horizontal line at `size` bytes, from `start` to `end` on the time axis."""
        line: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1, "marker": ""}
        self.axes.plot((start, end), (size, size), **line, zorder=4, clip_on=False)

    def pixel(self, x: float) -> float:
        """Return the pixel, from the left, of a point of the time axis."""
        return self.left + (self.right - self.left) * x / self.edges[-1]

    def stages(self, names: Sequence[str], facts: Sequence[str], failed: Sequence[bool] = ()) -> None:
        """Write the name of each stage above it, red if it failed, with its facts if they fit."""
        words = [f"{name}  {fact}" for name, fact in zip(names, facts, strict=True)]
        for at, (start, end) in enumerate(pairwise(map(self.pixel, self.edges))):
            text = write(self.figure, 0, 0, words[at], size=LARGE)
            words[at] = words[at] if text.get_window_extent().width <= end - start else names[at]
            text.remove()
        colours = [_BUDGET if bad else INK for bad in failed or [False] * len(names)]
        self.row(self.edges, words, self.top - 16, colours, LARGE)

    def row(
        self, edges: Sequence[float], words: Sequence[str], y: float, colours: Sequence[str], size: float,
        at: str = "left",
    ) -> None:  # fmt: skip
        """Write words for the spans between edges, none over another. If not all fit, those of the longest spans stay.

        Red words stay before others.
        """
        texts = [write(self.figure, 0, y, word, colour, size) for word, colour in zip(words, colours, strict=True)]
        starts = list(map(self.pixel, edges))
        lengths, widths = [b - a for a, b in pairwise(starts)], [text.get_window_extent().width for text in texts]
        least, most = 0.0, self.figure.bbox.width - 4
        kept, room = [], most - self.left + _GAP
        for one in sorted(range(len(texts)), key=lambda one: (colours[one] == _BUDGET, lengths[one]), reverse=True):
            room -= widths[one] + _GAP
            kept.append(one) if room >= 0 else texts[one].remove()
        for one in sorted(kept):
            starts[one] = max(least, starts[one] + (lengths[one] - widths[one]) / 2 * (at == "center"))
            least = starts[one] + widths[one] + _GAP
        for one in sorted(kept, reverse=True):
            texts[one].set_x(min(starts[one], most - widths[one]))
            most = texts[one].get_position()[0] - _GAP

    def finish(self, areas: Mapping[str, str], lines: Mapping[str, str], scale: float = 1.0) -> Image.Image:
        """Add the legend of `areas`, `lines` and the budget. Return the picture, drawn larger by `scale`."""
        keys: list[Artist] = [Patch(color=colour, label=name) for name, colour in areas.items()]
        styles: list[tuple[str, str, Any]] = [(name, colour, "-") for name, colour in lines.items()]
        for name, colour, style in [*styles, (self._budget, _BUDGET, "--")]:
            keys.append(Line2D([], [], color=colour, label=name, linestyle=style, linewidth=1.3, marker=""))
        add_legend(self.figure, keys, self.left, self._legend)
        return to_image(self.figure, scale)


def _round_step(ceiling: float, parts: int) -> int:
    """Return a round number of bytes that divides the axis into at most `parts`, such as 2 GB or 500 MB."""
    unit = 1
    while unit * 1024 <= ceiling / 4:
        unit *= 1024
    return next((unit * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 512) if ceiling / (unit * n) <= parts), unit * 1024)
