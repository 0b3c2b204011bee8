"""Pictures of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ..memory.charts.axes import FONT, GROUND, INK, MUTED, PAPER, SMALL, new_axes, new_figure, to_image, write
from .report import words

_OURS, _OTHER, _BOUND, _BAD = "#ea580c", "#60a5fa", "#1e40af", "#dc2626"
_WIDTH, _LINE, _TOP = 1080, 26, 105  # pixels: of the picture, of a row of it, and above the rows
_SIDE, _BARS, _END = 24, 190, 570  # where its margin ends, and where bars begin and end


def stream(found: Mapping[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars over the resident share, one panel for each regime, and the bound as lines."""
    rows = found["rows"]
    # A share that is not above the one before begins another regime.
    ends = [at for at in range(1, len(rows)) if rows[at]["share"] <= rows[at - 1]["share"]]
    panels = [rows[start:end] for start, end in pairwise([0, *ends, len(rows)])]
    figure = new_figure(_WIDTH, 430)
    overhead = ", ".join(f"{value} us on {name}" for name, value in found["overhead_us_per_block"].items())
    _head(figure, "Streaming: a steady step against the bound", f"{_setting(found)} Python per block: {overhead}")
    width = (_WIDTH - _SIDE) / len(panels)
    for number, panel in enumerate(panels):
        left = _SIDE + number * width
        write(figure, left, 92, f"computing / copying {panel[0]['ratio']:.2g}   ({panel[0]['tokens']} tokens)", 13)
        axes = new_axes(figure, left, 112, left + width - _SIDE, 350, GROUND)
        at = range(len(panel))
        steps, bounds = [row["step"] for row in panel], [row["bound"] for row in panel]
        axes.bar(at, steps, width=0.6, color=_OURS)
        axes.hlines(bounds, [x - 0.42 for x in at], [x + 0.42 for x in at], _BOUND, linewidth=2)
        ceiling = max(*steps, *bounds) * 1.15
        axes.set(xlim=(-0.5, len(panel) - 0.5), ylim=(0, ceiling), yticks=[])
        axes.set_xticks(at, [f"{row['share']:.0%}" for row in panel])
        axes.tick_params(axis="x", labelcolor=INK)
        for x, row in enumerate(panel):
            highest = max(row["step"], row["bound"])
            _words(axes, x, highest + 0.045 * ceiling, f"{row['over_bound']:.2f}", at="center")
            _words(axes, x, 0.04 * ceiling, words("step", row["step"]), PAPER, at="center")
            below = words("peak_bytes", row["peak_bytes"])
            _words(axes, x, -0.135 * ceiling, below, MUTED, at="center")
    key = new_axes(figure, _SIDE, 399, 344, 411)
    key.set_axis_off()
    key.set(xlim=(_SIDE, 344), ylim=(-6, 6))
    key.bar(30, 12, width=12, bottom=-6, color=_OURS)
    key.hlines(0, 320, 344, _BOUND, linewidth=2)
    write(figure, 44, 405, "seconds of a step (above: over the bound)")
    write(figure, 352, 405, "bound: max(computing, streamed bytes / bandwidth)")
    write(figure, _WIDTH - _SIDE, 405, "below: share of weights resident, peak VRAM", SMALL, MUTED, at="right")
    return to_image(figure)


def peers(found: Mapping[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars, fastest first, then what failed and why."""
    done = sorted((row for row in found["rows"] if "error" not in row), key=lambda row: row["step"])
    note = f"{_setting(found)} {found['regime']['tokens']} tokens: computing / copying {found['ratio']:.2g}"
    columns = {"over_bound": (690, "T/bound"), "peak_bytes": (780, "peak VRAM"), "copied_bytes": (870, "copied")}
    columns |= {"first_step": (960, "first step"), "difference": (1050, "differs")}
    return _bars(
        "Ways to run a model that does not fit: a steady step",
        note,
        [*done, *(row for row in found["rows"] if "error" in row)],
        ("step", "bound", "its bound: max(computing, what it copies / bandwidth)"),
        "ballast",
        columns,
    )


def newbie(found: Mapping[str, Any], title: str) -> Image.Image:
    """Peak VRAM by row as bars, the article's as lines beside them; what could not run, and why."""
    note = "Peak VRAM. Blue: the article's rows, the first two with all models resident. Orange: a budget."
    columns = {"step": (770, f"s/step, {found['kind']}"), "article": (890, "article")}
    columns["note"] = (_WIDTH - _SIDE, "recompiled" if found["kind"] == "measured" else "")
    rows = [{**row, "note": row.get("note") or row.get("recompiles") or ""} for row in found["rows"]]
    marks = ("peak_bytes", "article_peak_bytes", "the article's peak, on a card of 16 GB")
    return _bars(title, note, rows, marks, "ours", columns)


def _bars(
    title: str,
    note: str,
    rows: Sequence[Mapping[str, Any]],
    drawn: tuple[str, str, str],
    ours: str,
    columns: Mapping[str, tuple[float, str]],
) -> Image.Image:
    """A bar for each row and figures beside it, or its error; a line for each of a second value.

    `drawn` names the value of the bars, that of the lines, and what the lines are. `columns` says of each further value
    at which pixel it ends, and its heading.
    """
    value, mark, meaning = drawn
    figure = new_figure(_WIDTH, _TOP + _LINE * len(rows) + 12)
    _head(figure, title, note)
    axes = new_axes(figure, 0, _TOP, _WIDTH, _TOP + _LINE * len(rows))
    axes.set_axis_off()
    axes.set(xlim=(0, _WIDTH), ylim=(len(rows) - 0.5, -0.5))
    _words(axes, _BARS + 10, -1, meaning, MUTED)
    axes.vlines(_BARS + 2, -1.25, -0.75, _BOUND, linewidth=2, clip_on=False)
    for x, heading in columns.values():
        _words(axes, x, -1, heading, MUTED, at="right")
    scale = (_END - _BARS) / (max(row.get(name) or 0 for row in rows for name in (value, mark)) or 1)
    for y, row in enumerate(rows):
        _words(axes, _SIDE, y, row["name"])
        if "error" in row:
            _fitted(axes, _BARS, y, row["error"])
            continue
        length, line = scale * row[value], scale * (row.get(mark) or 0)
        axes.barh(y, length, left=_BARS, height=0.62, color=_OURS if row["name"].startswith(ours) else _OTHER)
        if line:
            axes.vlines(_BARS + line, y - 0.42, y + 0.42, _BOUND, linewidth=2)
        label = words(value, row[value]) + " s" * (value == "step")
        _words(axes, _BARS + (line if length < line < length + 70 else length) + 8, y, label)
        for name, (x, _) in columns.items():
            _words(axes, x, y, words(name, row.get(name)), at="right")
    return to_image(figure)


def _setting(found: Mapping[str, Any]) -> str:
    of = f"{found['size']}, {words('weight_bytes', found['weight_bytes'])} of weights, on {found['device']}"
    return f"{of}; torch {found['torch']}."


def _head(figure: Figure, title: str, note: str) -> None:
    write(figure, _SIDE, 28, title, 17)
    write(figure, _SIDE, 52, note, SMALL, MUTED)


def _words(axes: Axes, x: float, y: float, text: str, colour: str = INK, at: str = "left") -> Any:
    return axes.text(x, y, text, color=colour, size=SMALL, family=FONT, ha=at, va="center", parse_math=False)


def _fitted(axes: Axes, x: float, y: float, text: str) -> None:
    """The text in red, cut short at the picture's margin."""
    written = _words(axes, x, y, text, _BAD)
    while len(text) > 1 and written.get_window_extent().x1 > _WIDTH - _SIDE:
        text = text[: -max(1, len(text) // 20)]
        written.set_text(f"{text} ...")
