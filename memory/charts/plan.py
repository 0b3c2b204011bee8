"""A chart of a plan, drawn as a timeline is: the VRAM that each unit's weights and the work beside them will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from PIL import Image

from .axes import GROUND, MUTED, SMALL, WORK, ByteChart, unit_colours

_LEAST_SHARE = 0.085  # of the width, for a part so short that it would vanish
_MOST_LOADING = 0.4  # of a part's width, so that its weights can be seen


@dataclass(frozen=True)
class Part:
    """A piece of the time axis: one unit at work for some steps, after `loading` seconds in which its weights come."""

    unit: str
    role: str
    label: str
    seconds: float
    loading: float
    idle_bytes: int
    weights_bytes: int
    peak_bytes: int
    steps: int = 1

    @property
    def loading_share(self) -> float:
        """How much of its time passes before the weights are there."""
        return self.loading / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Stage:
    """One stage: what is said of it, and its parts."""

    name: str
    fact: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Plan:
    """The plan of a run for one budget."""

    title: str
    budget_bytes: int
    peak_bytes: int
    stages: tuple[Stage, ...]


def draw_plan(plan: Plan, width: int, height: int) -> Image.Image:
    """An RGB picture of `width` by `height` pixels."""
    parts = [part for stage in plan.stages for part in stage.parts]
    shares, to_scale = _shares([part.seconds for part in parts])
    starts = [0.0, *accumulate(shares)]
    edges = [0.0, *(starts[number] for number in accumulate(len(stage.parts) for stage in plan.stages))]
    chart = ByteChart(width, height, plan.peak_bytes, [plan.budget_bytes] * len(plan.stages), edges, plan.title)
    axes, colours = chart.axes, unit_colours({part.unit: part.role for part in parts})

    def box(start: float, end: float, size: int, colour: str) -> None:
        axes.bar(start, size, end - start, align="edge", color=colour, linewidth=0, antialiased=False)

    for part, (start, end) in zip(parts, pairwise(starts), strict=True):
        ready = start + min(part.loading_share, _MOST_LOADING) * (end - start)
        box(start, ready, part.idle_bytes, WORK)
        box(ready, end, part.peak_bytes, WORK)
        if (chart.pixel(end) - chart.pixel(ready)) / part.steps > 5:
            ends = [ready + (end - ready) * step / part.steps for step in range(part.steps)]
            axes.vlines(ends, 0, part.peak_bytes, GROUND, linewidth=0.5, zorder=1)
        box(ready, end, part.weights_bytes, colours[part.unit])
    axes.set_xticks(starts, [""] * len(starts))
    axes.tick_params(axis="x", length=5, width=0.8, color=MUTED)
    chart.row(starts, [part.label for part in parts], chart.bottom + 14, SMALL, [MUTED] * len(parts), centred=True)
    chart.stages([stage.name for stage in plan.stages], [stage.fact for stage in plan.stages])
    true = to_scale and all(part.loading_share <= _MOST_LOADING for part in parts)
    return chart.finish({**colours, "working memory": WORK}, {}, "" if true else "time is not to scale")


def draw_plans(plans: Sequence[Plan], width: int, height: int) -> Image.Image:
    """Pictures of plans, `height` pixels each, one above the other."""
    whole = Image.new("RGB", (width, height * len(plans)))
    for number, plan in enumerate(plans):
        whole.paste(draw_plan(plan, width, height), (0, number * height))
    return whole


def _shares(times: Sequence[float]) -> tuple[list[float], bool]:
    """The share of the axis that each part gets, and whether these are true to the times."""
    whole = sum(times)
    true = [time / whole if whole else 1 / len(times) for time in times]
    least = min(_LEAST_SHARE, 0.7 / len(times))
    if all(share >= least for share in true):
        return true, True
    widened = [max(share, least) for share in true]
    for _ in times:  # what the short ones get the long ones give
        spare = sum(share - least for share in widened)
        excess = sum(widened) - 1
        widened = [share - (share - least) * excess / spare if spare else 1 / len(times) for share in widened]
    return widened, False
