"""A chart of past stages: the VRAM that each unit's weights and working memory took over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from matplotlib.patches import StepPatch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from PIL import Image

from ..sizes import format_bytes
from .axes import INK, LARGE, MUTED, OTHERS, WORK, ByteChart, new_figure, to_image, unit_colours, write


@dataclass(frozen=True)
class Span:
    """A span of time, in seconds since its stage began.

    `weights` maps each unit to the bytes of its weights, `peak_bytes` is the peak of allocated bytes. `guests` maps
    each of the host's models to its bytes on the device, which come on top of `peak_bytes`.
    """

    start: float
    end: float
    weights: Mapping[str, int]
    peak_bytes: int
    guests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage. `planned_bytes` is its planned peak, 0 if there was no plan.

    `other_bytes` are bytes on the device that are not ours. `run` names the run that the stage belongs to.
    """

    title: str
    seconds: float
    budget_bytes: int
    peak_bytes: int
    spans: tuple[Span, ...]
    planned_bytes: int = 0
    other_bytes: int = 0
    run: str = ""
    failed: bool = False


def draw_timeline(
    stages: Sequence[Stage], roles: Mapping[str, str], width: int, height: int, scale: float = 1.0
) -> Image.Image:
    """Draw the bytes of our units, with those of host models above them. Time between stages is left out.

    The picture has `width` by `height` pixels times `scale`. `roles` maps each unit to its role. A line parts the
    stages of different runs.
    """
    edges = [0.0, *accumulate(stage.seconds for stage in stages)]
    spans = [span for stage in stages for span in stage.spans]
    peak = max((span.peak_bytes + sum(span.guests.values()) for span in spans), default=0)
    if not edges[-1] or not peak:
        figure = new_figure(width, height)
        nothing = "All stages ran on the CPU: there is no VRAM to show." if edges[-1] else "Nothing has run yet."
        write(figure, 24, 54, nothing, size=LARGE)
        return to_image(figure, scale)
    several = len({stage.run for stage in stages}) > 1
    budgets = [stage.budget_bytes for stage in stages]
    planned = [stage.planned_bytes for stage in stages]
    chart = ByteChart(width, height, max(peak, *planned), budgets, edges, title=" " * several)
    axes, colours = chart.axes, unit_colours(roles)
    count = 2 * (chart.right - chart.left)  # two columns in a pixel, which shows a gap between steps
    weights, guests, peaks = _columns(stages, edges, roles, count)
    ends, whole = np.linspace(0, edges[-1], count + 1), sum(weights.values())
    top = peaks + sum(guests.values())
    for name, sizes in guests.items():
        if sizes.any():
            axes.add_artist(StepPatch(top, ends, color=colours[name], linewidth=0))
            top = top - sizes
    # Draw the whole stack, then the stack without its uppermost unit over it, and so on. `axes.stairs` would be slow:
    # it computes the limits of everything that it adds.
    axes.add_artist(StepPatch(peaks, ends, color=WORK, linewidth=0))
    for name, sizes in reversed(weights.items()):
        axes.add_artist(StepPatch(whole, ends, color=colours[name], linewidth=0))
        whole = whole - sizes
    for (start, end), size in zip(pairwise(edges), planned, strict=True):
        if size:
            chart.level(start, end, size, MUTED)
    facts = [f"{stage.seconds:.2f} s, peak {format_bytes(stage.peak_bytes)}" for stage in stages]
    chart.stages([stage.title for stage in stages], facts, [stage.failed for stage in stages])
    firsts = [at for at, stage in enumerate(stages) if several and (not at or stage.run != stages[at - 1].run)]
    for at in firsts:
        axes.axvline(edges[at], color=INK, linewidth=1.5, linestyle="-", marker="", zorder=3)
    runs = [f"| run: {stages[at].run}" for at in firsts]
    chart.row([*(edges[at] for at in firsts), edges[-1]], runs, 18, [MUTED] * len(runs), LARGE)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g} s"))
    areas = {**colours, "working memory": WORK}
    if others := max(stage.other_bytes for stage in stages):
        areas[f"not drawn: {format_bytes(others)} of other models"] = OTHERS
    return chart.finish(areas, {"planned peak": MUTED} if any(planned) else {}, scale)


def _columns(
    stages: Sequence[Stage], edges: Sequence[float], names: Mapping[str, str], count: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Return in each of `count` columns the weights of each unit, the bytes of each host model, and the peak.

    If several spans fall into one column, the highest peak shows.
    """
    weights, guests = ({name: np.zeros(count) for name in names} for _ in range(2))
    peaks = np.zeros(count)
    for stage, begun in zip(stages, edges, strict=False):
        if not stage.spans:
            continue
        times = np.array([(span.start, span.end) for span in stage.spans]) + begun
        first, last = np.clip(times / edges[-1] * count, 0, count - 1).astype(int).T
        highest = np.array([span.peak_bytes for span in stage.spans])
        # One span follows another: a column has the weights of the last that begins in it or before.
        at = np.arange(first[0], last[-1] + 1)
        covering = np.searchsorted(first, at, "right") - 1
        for name in names:
            weights[name][at] = np.array([span.weights.get(name, 0) for span in stage.spans])[covering]
            guests[name][at] = np.array([span.guests.get(name, 0) for span in stage.spans])[covering]
        peaks[at] = np.maximum(peaks[at], highest[covering])
        np.maximum.at(peaks, last, highest)
    return weights, guests, peaks
