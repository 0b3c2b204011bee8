"""Pictures of what was measured."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from ..memory.charts.axes import GROUND, INK, LARGE, MUTED, add_legend, new_axes, new_figure, to_image, write
from .wording import words

_OURS, _OTHER, _BOUND, _BAD = "#ea580c", "#60a5fa", "#1e40af", "#dc2626"
_SERIES = ("#ea580c", "#2563eb", "#1e40af", "#16a34a", "#7c3aed", "#dc2626", "#6b7280")  # of models
_WIDTH, _LINE, _TOP = 1080, 26, 105  # pixels: of the picture, of a row of it, and above the rows
_SIDE, _BARS, _END = 24, 190, 570  # where its margin ends, and where bars begin and end
_MOST = 126  # characters of an error that have room


def stream(found: Mapping[str, Any]) -> Image.Image:
    """Seconds of a steady step as bars, by the kind of weights, the regime and the share of weights, and the bound."""
    overhead = ", ".join(f"{value} us on {name}" for name, value in found["overhead_us_per_group"].items())
    rows = [{**row, "name": _streamed(row)} for row in found["rows"]]
    drawn = "step", "bound", "its bound: max(computing, streamed bytes / bandwidth)"
    columns = {"over_bound": (690, "T/bound"), "peak_bytes": (790, "peak VRAM"), "copied_bytes": (890, "copied")}
    columns |= {"first_step": (970, "first step"), "tokens": (1050, "tokens")}
    note = f"{_setting(found)} Python per group: {overhead}"
    return _bars("Streaming: a steady step against the bound", note, rows, drawn, "", columns)


def _streamed(row: Mapping[str, Any]) -> str:
    room = "resident" if row["share"] is None else f"{row['share']:.0%}"
    return f"{row.get('weights', 'auto')}, C/T {row['ratio']:.2g}, {room}"


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


def newbie(found: Mapping[str, Any]) -> Image.Image:
    """Peak VRAM of each way's stages as bars, the article's as lines beside them; what could not run, and why."""
    kind, side = found["kind"], found["side"]
    how = "predicted for 25 GB/s, 60 TFLOPS" if kind == "predicted" else f"measured on {found['device']}"
    title = f"NewBie-image-Exp0.1, {side} x {side}, with guidance: {how}"
    step, peak = ("planned_step", "planned_bytes") if kind == "predicted" else ("step", "peak_bytes")
    rows = [{**row, "name": f"{row['name']}: {row['stage']}"} for row in found["rows"]]
    columns = {step: (770, f"s/step, {kind}"), "article": (890, "article"), "note": (_WIDTH - _SIDE, "")}
    note = "Peak VRAM of each stage. Blue: the article's ways, two with all models resident. Orange: a budget."
    drawn = peak, "article_peak_bytes", "the article's peak, on a card of 16 GB"
    return _bars(title, note, rows, drawn, "ours", columns)


def card(found: Mapping[str, Any]) -> Image.Image:
    """Return the pictures of a card's sections that have rows, one below the other."""
    about = {key: found[key] for key in ("device", "torch")}
    parts = []
    for one in found["sections"].values():
        rows, name = one.get("rows", []), one["section"]
        # Of one share there is nothing to see.
        if name == "stream" and len({row["share"] for row in rows}) > 2:
            parts.append(stream({**one, **about}))
        elif name == "peers" and "regime" in one and rows:
            parts.append(peers({**one, **about}))
    if not parts:
        figure = new_figure(_WIDTH, 60)
        write(figure, _SIDE, 28, f"{found['device']}: nothing was measured", MUTED)
        parts = [to_image(figure)]
    whole, top = Image.new("RGB", (_WIDTH, sum(part.height for part in parts)), "white"), 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


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
