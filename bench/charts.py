"""Pictures of what was measured."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from ..memory.charts.axes import GROUND, INK, LARGE, MUTED, PAPER, add_legend, new_axes, new_figure, to_image, write
from .report import words

_OURS, _OTHER, _BOUND, _BAD = "#ea580c", "#60a5fa", "#1e40af", "#dc2626"
_SERIES = ("#ea580c", "#2563eb", "#1e40af", "#16a34a", "#7c3aed", "#dc2626", "#6b7280")  # of models
_WIDTH, _LINE, _TOP = 1080, 26, 105  # pixels: of the picture, of a row of it, and above the rows
_SIDE, _BARS, _END = 24, 190, 570  # where its margin ends, and where bars begin and end
_MOST = 126  # characters of an error that have room


def stream(found: Mapping[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars over the resident share, one panel for each regime, and the bound as lines."""
    rows, figure = found["rows"], new_figure(_WIDTH, 430)
    overhead = ", ".join(f"{value} us on {name}" for name, value in found["overhead_us_per_group"].items())
    _head(figure, "Streaming: a steady step against the bound", f"{_setting(found)} Python per group: {overhead}")
    # A share that is not above the one before begins another regime.
    ends = [at for at in range(1, len(rows)) if rows[at]["share"] <= rows[at - 1]["share"]] + [len(rows)]
    width = (_WIDTH - _SIDE) / len(ends)
    for number, (first, end) in enumerate(pairwise([0, *ends])):
        panel, left = rows[first:end], _SIDE + number * width
        ratio, tokens = panel[0]["ratio"], panel[0]["tokens"]
        write(figure, left, 92, f"computing / copying {ratio:.2g}   ({tokens} tokens)", size=LARGE)
        axes = new_axes(figure, left, 112, left + width - _SIDE, 350, GROUND)
        at, steps, bounds = range(len(panel)), [row["step"] for row in panel], [row["bound"] for row in panel]
        ceiling = max(*steps, *bounds) * 1.15
        axes.set(xlim=(-0.5, len(panel) - 0.5), ylim=(0, ceiling), yticks=[])
        axes.bar(at, steps, width=0.6, color=_OURS, linewidth=0)
        axes.hlines(bounds, [x - 0.42 for x in at], [x + 0.42 for x in at], _BOUND, linewidth=2)
        axes.set_xticks(at, [f"{row['share']:.0%}" for row in panel], color=INK)
        for x, row in enumerate(panel):
            top = max(row["step"], row["bound"]) + 0.045 * ceiling
            write(axes, x, top, f"{row['over_bound']:.2f}", at="center")
            write(axes, x, 0.04 * ceiling, words("step", row["step"]), PAPER, at="center")
            write(axes, x, -0.135 * ceiling, words("peak_bytes", row["peak_bytes"]), MUTED, at="center")
    keys: list[Artist] = [Patch(color=_OURS, label="seconds of a step (above: over the bound)")]
    keys += [Line2D([], [], color=_BOUND, linewidth=2, label="bound: max(computing, streamed bytes / bandwidth)")]
    add_legend(figure, keys, _SIDE, 32)
    write(figure, _WIDTH - _SIDE, 405, "below: share of weights that there is room for, peak VRAM", MUTED, at="right")
    return to_image(figure)


def published(found: Mapping[str, Any]) -> Image.Image:
    """Predicted steps over their bounds: panels by computing to copying and by RAM, a line for each model."""
    rows = found["rows"]
    ratios = sorted({row["compute_over_transfer"] for row in rows})
    shares = sorted({row["ram_share"] for row in rows}, reverse=True)
    figure = new_figure(_WIDTH, 150 + 190 * len(shares))
    bus, disk = (found[name] / 1e9 for name in ("bus_bytes_per_second", "disk_bytes_per_second"))
    rates = f"{bus:.0f} GB/s to the card and {disk:.0f} GB/s from disk"
    note = f"As the solver predicts it, for {rates}. C/T: computing/copying."
    _head(figure, "Streaming of published models: a step over its bound", note)
    colours = dict(zip([model["model"] for model in found["models"]], _SERIES, strict=False))
    ceiling = max(1.3, *(row["over_bound"] for row in rows)) + 0.02
    width = (_WIDTH - _SIDE) / len(ratios)
    for (down, share), (number, ratio) in itertools.product(enumerate(shares), enumerate(ratios)):
        left, top = _SIDE + number * width, 92 + 190 * down
        write(figure, left, top, f"C/T {ratio:g}, RAM for {share:.0%}", size=LARGE)
        axes = new_axes(figure, left, top + 20, left + width - _SIDE, top + 150, GROUND)
        axes.set(xlim=(0, 1), ylim=(0.95, ceiling), yticks=[])
        for level in (1.0, 1.1, 1.2):
            axes.axhline(level, color=_BOUND if level == 1 else MUTED, linewidth=1.5 if level == 1 else 0.4)
            write(axes, 0.99, level + 0.012, f"{level:g}", MUTED, at="right")
        for model, colour in colours.items():
            own = [r for r in rows if (r["model"], r["compute_over_transfer"], r["ram_share"]) == (model, ratio, share)]
            axes.plot([row["residency"] for row in own], [row["over_bound"] for row in own], color=colour)
        axes.set_xticks([0.25, 0.5, 0.75], ["25%", "50%", "75%"], color=INK)
    add_legend(figure, [Line2D([], [], color=colour, label=model) for model, colour in colours.items()], _SIDE, 52)
    below = "below: share of the weights that there is room for beside the ring"
    write(figure, _WIDTH - _SIDE, 135 + 190 * len(shares), below, MUTED, at="right")
    return to_image(figure)


def peers(found: Mapping[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars, fastest first, then what failed and why."""
    rows = sorted(found["rows"], key=lambda row: ("error" in row, row.get("step", 0)))
    note = f"{_setting(found)} {found['regime']['tokens']} tokens: computing / copying {found['ratio']:.2g}"
    columns = {"over_bound": (690, "T/bound"), "peak_bytes": (780, "peak VRAM"), "copied_bytes": (870, "copied")}
    columns |= {"first_step": (960, "first step"), "difference": (1050, "differs")}
    drawn = "step", "bound", "its bound: max(computing, what it copies / bandwidth)"
    return _bars("Ways to run a model that does not fit: a steady step", note, rows, drawn, "ballast", columns)


def newbie(found: Mapping[str, Any], title: str) -> Image.Image:
    """Peak VRAM by row as bars, the article's as lines beside them; what could not run, and why."""
    note = "Peak VRAM. Blue: the article's rows, the first two with all models resident. Orange: a budget."
    columns = {"step": (770, f"s/step, {found['kind']}"), "article": (890, "article")}
    columns["note"] = (_WIDTH - _SIDE, "recompiled" if found["kind"] == "measured" else "")
    rows = [{"note": "", **row} for row in found["rows"]]
    for row in rows:
        if not row["note"] and row.get("recompiles") is not None:
            row["note"] = row["recompiles"]
    drawn = "peak_bytes", "article_peak_bytes", "the article's peak, on a card of 16 GB"
    return _bars(title, note, rows, drawn, "ours", columns)


def _bars(
    title: str, note: str, rows: Sequence[Mapping[str, Any]], drawn: tuple[str, str, str], ours: str,
    columns: Mapping[str, tuple[float, str]],
) -> Image.Image:  # fmt: skip
    """Draw a bar for each row with figures beside it, or its error.

    `drawn` names the value of the bars, that of a line beside each, and what the lines are. `columns` says of each
    further value at which pixel it ends, and its heading.
    """
    (value, mark, meaning), bottom = drawn, _TOP + _LINE * len(rows)
    figure = new_figure(_WIDTH, bottom + 12)
    _head(figure, title, note)
    axes = new_axes(figure, 0, _TOP, _WIDTH, bottom)
    axes.set_axis_off()
    axes.set(xlim=(0, _WIDTH), ylim=(len(rows) - 0.5, -0.5))
    axes.vlines(_BARS + 2, -1.25, -0.75, _BOUND, linewidth=2, clip_on=False)
    write(axes, _BARS + 10, -1, meaning, MUTED)
    for x, heading in columns.values():
        write(axes, x, -1, heading, MUTED, at="right")
    scale = (_END - _BARS) / (max(row.get(name) or 0 for row in rows for name in (value, mark)) or 1)
    for y, row in enumerate(rows):
        write(axes, _SIDE, y, row["name"])
        if "error" in row:
            write(axes, _BARS, y, textwrap.shorten(row["error"], _MOST, placeholder=" ..."), _BAD)
            continue
        length, line = scale * row[value], scale * (row.get(mark) or 0)
        axes.barh(y, length, 0.62, _BARS, color=_OURS if row["name"].startswith(ours) else _OTHER, linewidth=0)
        axes.vlines([_BARS + line] * bool(line), y - 0.42, y + 0.42, _BOUND, linewidth=2)
        beside = _BARS + (line if length < line < length + 70 else length) + 8
        write(axes, beside, y, words(value, row[value]) + " s" * (value == "step"))
        for name, (x, _) in columns.items():
            write(axes, x, y, words(name, row.get(name)), at="right")
    return to_image(figure)


def _setting(found: Mapping[str, Any]) -> str:
    of = f"{found['size']}, {words('weight_bytes', found['weight_bytes'])} of weights, on {found['device']}"
    return f"{of}; torch {found['torch']}."


def _head(figure: Figure, title: str, note: str) -> None:
    write(figure, _SIDE, 28, title, size=17)
    write(figure, _SIDE, 52, note, MUTED)


def nothing(why: str) -> Image.Image:
    """Draw a line of words where there is nothing else to draw."""
    figure = new_figure(_WIDTH, 60)
    write(figure, _SIDE, 28, why, MUTED)
    return to_image(figure)
