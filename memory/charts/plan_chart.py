"""A chart of a plan over time: the VRAM that each unit's weights and working memory will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from PIL import Image

from .axes import GROUND, MUTED, SMALL, WORK, ByteChart, unit_colours

_LEAST_SHARE = 0.085  # share of the width that even the shortest part gets
_MOST_LOADING = 0.4  # share of a part's width that loading may take, so that its weights can be seen


@dataclass(frozen=True)
class Part:
    """A part of the time axis: one unit at work for `steps` steps.

    It takes `seconds`, of which the first `loading` seconds bring the weights.
    """

    stage: str
    unit: str
    role: str
    label: str
    seconds: float
    loading: float
    idle_bytes: int
    weights_bytes: int
    peak_bytes: int
    steps: int = 1


@dataclass(frozen=True)
class Plan:
    """The plan of a run for one budget: its parts in the order of its stages, and a few words for each stage."""

    title: str
    budget_bytes: int
    stages: dict[str, str]
    parts: tuple[Part, ...]


def draw_plan(plan: Plan, width: int, height: int, scale: float = 1.0) -> Image.Image:
    """Return an RGB picture of a plan, of `width` by `height` pixels times `scale`."""
    parts, shares = plan.parts, _shares([part.seconds for part in plan.parts])
    starts = [0.0, *accumulate(shares)]
    edges = [starts[at] for at, part in enumerate(parts) if not at or part.stage != parts[at - 1].stage] + starts[-1:]
    loading = [part.loading / part.seconds if part.seconds else 0.0 for part in parts]
    to_scale = max(loading) <= _MOST_LOADING and shares == [part.seconds for part in parts]
    title = plan.title + ("" if to_scale else "; time is not to scale")
    peak = max(part.peak_bytes for part in parts)
    chart = ByteChart(width, height, peak, [plan.budget_bytes] * len(plan.stages), edges, title)
    colours = unit_colours({part.unit: part.role for part in parts})
    for part, share, (start, end) in zip(parts, loading, pairwise(starts), strict=True):
        ready = start + min(share, _MOST_LOADING) * (end - start)
        lefts, widths = (start, ready, ready), (ready - start, end - ready, end - ready)
        sizes, fills = (part.idle_bytes, part.peak_bytes, part.weights_bytes), (WORK, WORK, colours[part.unit])
        chart.axes.bar(lefts, sizes, widths, align="edge", color=fills, linewidth=0, antialiased=False)
        if (chart.pixel(end) - chart.pixel(ready)) / part.steps > 5:
            steps = [ready + (end - ready) * step / part.steps for step in range(part.steps)]
            chart.axes.vlines(steps, part.weights_bytes, part.peak_bytes, GROUND, linewidth=0.5)
    chart.axes.set_xticks(starts, [""] * len(starts))
    chart.axes.tick_params(axis="x", length=5, width=0.8, color=MUTED)
    chart.row(starts, [part.label for part in parts], chart.bottom + 14, [MUTED] * len(parts), SMALL, at="center")
    chart.stages(list(plan.stages), list(plan.stages.values()))
    return chart.finish({**colours, "working memory": WORK}, {}, scale)


def draw_plans(plans: Sequence[Plan], width: int, height: int, scale: float = 1.0) -> Image.Image:
    """Return an RGB picture of plans one above the other, each of `width` by `height` pixels times `scale`."""
    drawn = [draw_plan(plan, width, height, scale) for plan in plans]
    whole = Image.new("RGB", (drawn[0].width, sum(each.height for each in drawn)))
    for number, each in enumerate(drawn):
        whole.paste(each, (0, number * each.height))
    return whole


def _shares(times: Sequence[float]) -> list[float]:
    """Return the share of the time axis of each part: the times as they are, unless short parts would vanish."""
    whole = sum(times)
    true = [time / whole if whole else 1 / len(times) for time in times]
    least = min(_LEAST_SHARE, 0.7 / len(times))
    if all(share >= least for share in true):
        return list(times) if whole else true
    widened = [max(share, least) for share in true]
    for _ in times:  # take from the long parts what the short ones get
        spare, excess = sum(share - least for share in widened), sum(widened) - 1
        widened = [share - (share - least) * excess / spare if spare else 1 / len(times) for share in widened]
    return widened
