"""What charts share: a figure of exact pixels, axes of bytes, stages as bands, the budget, the legend, and the colours.

Figures are drawn by matplotlib's Agg canvas. pyplot and the global settings are left alone, so any thread may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import IdentityTransform
from PIL import Image

from ..sizes import format_bytes

INK, MUTED, GRID, PAPER, GROUND = "#1f2430", "#6b7280", "#e5e7eb", "#ffffff", "#f8fafc"
WORK, OTHERS, BUDGET = "#cbd5e1", "#94a3b8", "#dc2626"
_BANDS = (GROUND, "#eef2f7")
# One hue for each role, another shade for each further unit of it.
_HUES = {
    "text_encoder": ("#2563eb", "#60a5fa", "#1e40af", "#93c5fd"),
    "transformer": ("#ea580c", "#f59e0b"),
    "vae": ("#16a34a", "#4ade80"),
    "other": ("#7c3aed", "#a78bfa"),
}
FONT = "DejaVu Sans"  # which matplotlib brings along
SMALL, LARGE = 11.5, 13.0  # sizes of words in pixels
_DPI = 72  # a point is a pixel
_LEFT, _TOP, _RIGHT, _BOTTOM, _TITLE = 84, 46, 24, 70, 26  # margins in pixels
_GAP, _TICK = 12, 22  # the least pixels between two labels, side by side and one above the other


def new_figure(width: int, height: int) -> Figure:
    """A white figure of so many pixels."""
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=PAPER, layout="none")
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure, left: float, top: float, right: float, bottom: float, ground: str = "none") -> Axes:
    """Bare axes between these pixels from the left and the top: no frame but a line below, no marks at the labels."""
    width, height = figure.bbox.size
    axes = figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))
    axes.set_facecolor(ground)
    axes.grid(False)
    axes.set_axisbelow(True)
    axes.margins(0)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=INK, linewidth=1)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=MUTED, labelfontfamily=FONT)
    axes.tick_params(axis="y", pad=8)
    axes.tick_params(axis="x", pad=7)
    return axes


def write(
    figure: Figure, x: float, y: float, words: str, size: float = SMALL, colour: str = INK, at: str = "left"
) -> Text:
    """Words that begin, end or have their middle (`at`: left, right, center) so many pixels from the left and top."""
    return figure.text(
        x, figure.bbox.height - y, words, transform=IdentityTransform(), size=size, color=colour, family=FONT, ha=at,
        va="center", parse_math=False,
    )  # fmt: skip


def width_of(artist: Artist) -> float:
    """Its pixels from left to right."""
    return artist.get_window_extent().width


def to_image(figure: Figure) -> Image.Image:
    """The figure as an RGB picture."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


def unit_colours(roles: Mapping[str, str]) -> dict[str, str]:
    """A colour for each unit by its role."""
    counts = dict.fromkeys(_HUES, 0)
    colours = {}
    for name, role in roles.items():
        colours[name] = _HUES[role][counts[role] % len(_HUES[role])]
        counts[role] += 1
    return colours


class ByteChart:
    """Axes of bytes over `end` units of time, with a band for each stage between `edges`.

    `budgets` has one for each stage. One far above `peak_bytes` would flatten the picture; then it is only named.
    """

    def __init__(
        self, width: int, height: int, peak_bytes: int, budgets: Sequence[int], edges: Sequence[float], title: str = ""
    ) -> None:
        self.figure = new_figure(width, height)
        self.top, self.bottom = _TOP + (_TITLE if title else 0), height - _BOTTOM
        self.left, self.right = _LEFT, width - _RIGHT
        self.axes = new_axes(self.figure, self.left, self.top, self.right, self.bottom)
        self.edges, self.budgets = edges, budgets
        shown = [size for size in budgets if size <= 2.5 * peak_bytes]
        self._off_scale = len(shown) < len(budgets)
        ceiling = max([peak_bytes, *shown]) * 1.06
        self.axes.set(xlim=(edges[0], edges[-1]), ylim=(0, ceiling))
        sizes = range(0, int(ceiling) + 1, _round_step(ceiling, min(8, max(1, (self.bottom - self.top) // _TICK))))
        self.axes.set_yticks(sizes, [format_bytes(size) if size else "0" for size in sizes])
        self.axes.grid(axis="y", color=GRID, linewidth=1, linestyle="-", alpha=1)
        for number, ((start, end), budget) in enumerate(zip(pairwise(edges), budgets, strict=True)):
            self.axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0, zorder=0)
            self.axes.axvline(start, color=MUTED, linewidth=0.6 if number else 0, zorder=3)
            if budget in shown:
                self.line(start, end, budget, BUDGET, (0, (6, 6)))
        self._title = write(self.figure, self.left, 18, title, LARGE) if title.strip() else None

    def line(self, start: float, end: float, size: int, colour: str, style: object = "-") -> None:
        """A level line at so many bytes."""
        self.axes.plot(
            (start, end), (size, size), color=colour, linestyle=style, linewidth=1, marker="", zorder=4, clip_on=False
        )

    def pixel(self, x: float) -> float:
        """How far from the left a point of the time axis is."""
        share = (x - self.edges[0]) / (self.edges[-1] - self.edges[0])
        return self.left + (self.right - self.left) * share

    def stages(self, names: Sequence[str], facts: Sequence[str], failed: Sequence[bool] = ()) -> None:
        """The name of each stage above it, with the facts where there is room; in red if it failed."""
        words = []
        for (start, end), name, fact in zip(pairwise(self.edges), names, facts, strict=True):
            words.append(f"{name}  {fact}")
            text = write(self.figure, 0, 0, words[-1], LARGE)
            if width_of(text) > self.pixel(end) - self.pixel(start):
                words[-1] = name
            text.remove()
        colours = [BUDGET if bad else INK for bad in failed or [False] * len(names)]
        self.row(self.edges, words, self.top - 16, LARGE, colours)

    def row(
        self, edges: Sequence[float], words: Sequence[str], y: float, size: float, colours: Sequence[str],
        centred: bool = False, indent: float = 0,
    ) -> None:  # fmt: skip
        """Words for the spans between edges, none over another. Of too many those of the longest spans stay."""
        texts = [write(self.figure, 0, y, *pair) for pair in zip(words, [size] * len(words), colours, strict=True)]
        starts = [self.pixel(edge) for edge in edges]
        lengths = [end - start for start, end in pairwise(starts)]
        widths = [width_of(text) for text in texts]
        least, most = self.left - 24.0, self.figure.bbox.width - 4
        kept, room = [], most - self.left + _GAP
        for at in sorted(range(len(texts)), key=lambda at: (colours[at] == BUDGET, lengths[at]), reverse=True):
            room -= widths[at] + _GAP
            kept.append(at) if room >= 0 else texts[at].remove()
        places = {}
        for at in sorted(kept):
            wanted = starts[at] + ((lengths[at] - widths[at]) / 2 if centred else indent)
            places[at] = max(wanted, least)
            least = places[at] + widths[at] + _GAP
        for at in sorted(kept, reverse=True):
            places[at] = min(places[at], most - widths[at])
            most = places[at] - _GAP
            texts[at].set_x(places[at])

    def finish(self, colours: Mapping[str, str], lines: Mapping[str, str], note: str = "") -> Image.Image:
        """Add the legend of areas, lines and the budget, and a note above on the right. Returns the picture."""
        named = " to ".join(dict.fromkeys(map(format_bytes, (min(self.budgets), max(self.budgets)))))
        budget = f"budget {named}{', off the scale' if self._off_scale else ''}"
        keys: list[Artist] = [Patch(color=colour, label=name) for name, colour in colours.items()]
        keys += [Line2D([], [], color=colour, label=name, linewidth=1.5, marker="") for name, colour in lines.items()]
        keys.append(Line2D([], [], color=BUDGET, label=budget, linestyle=(0, (2.5, 1.5)), linewidth=1.5, marker=""))
        if note:
            text = write(self.figure, self.right, 18, note, SMALL, MUTED, at="right")
            if self._title and width_of(self._title) + width_of(text) > self.right - self.left - _GAP:
                text.remove()
                keys.append(Line2D([], [], linestyle="none", marker="", label=note))
        rows: list[list[Artist]] = [[]]
        room = most = self.figure.bbox.width - self.left - 4
        for key in keys:
            text = write(self.figure, 0, 0, str(key.get_label()))
            length = width_of(text) + 2 * SMALL  # the sample and the space before the words
            text.remove()
            if length > room and rows[-1]:
                rows.append([])
                room = most
            rows[-1].append(key)
            room -= length + 1.5 * SMALL
        for number, row in enumerate(rows):
            self.figure.legend(
                handles=row, ncols=len(row), loc="upper left", bbox_transform=IdentityTransform(),
                bbox_to_anchor=(self.left, _BOTTOM - 31 - 18 * number), frameon=False, borderpad=0, borderaxespad=0,
                handlelength=1.4, handleheight=0.9, handletextpad=0.5, columnspacing=1.5, labelcolor=INK,
                prop={"family": FONT, "size": SMALL},
            )  # fmt: skip
        return to_image(self.figure)


def _round_step(ceiling: float, parts: int) -> int:
    """A round number of bytes that divides the axis into at most so many parts, by whole units of 1024."""
    unit = 1
    while unit * 1024 <= ceiling / 4:
        unit *= 1024
    return next((unit * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 512) if ceiling / (unit * n) <= parts), unit * 1024)
