"""Draws a plan as a timeline is drawn: the VRAM that each unit's weights and the work beside them will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from .picture import GROUND, MUTED, WORK, Chart, unit_colours
from .planning.runplan import seconds
from .sizes import format_bytes

if TYPE_CHECKING:
    from .planning.runplan import RunPlan
    from .vocabulary import Role

_ROLES: dict[str, Role] = {"encode": "text_encoder", "sample": "transformer", "decode": "vae"}
_LEAST_SHARE = 0.085  # of the width, for a part so short that it would vanish
_MOST_LOADING = 0.4  # of a part's width, so that its weights can be seen


@dataclass(frozen=True)
class _Part:
    """A piece of the time axis: one unit at work, after `loading` seconds in which its weights come."""

    stage: str
    unit: str
    seconds: float
    loading: float
    idle_bytes: int
    weights_bytes: int
    peak_bytes: int
    steps: int
    label: str

    @property
    def loading_share(self) -> float:
        """How much of its time passes before the weights are there."""
        return self.loading / self.seconds if self.seconds else 0.0


def draw_plan(plan: RunPlan, width: int, height: int) -> Image.Image:
    """An RGB picture of `width` by `height` pixels."""
    parts = _parts(plan)
    chart = Chart(width, height, plan.peak_vram_bytes, [plan.budget_bytes] * len(plan.stages), plan.brief())
    draw, y_at = chart.draw, chart.y_at
    shares, to_scale = _shares([part.seconds for part in parts])
    lengths = [(chart.right - chart.left) * share for share in shares]
    starts = [chart.left + sum(lengths[:number]) for number in range(len(parts) + 1)]
    colours = unit_colours({part.unit: _ROLES.get(part.stage, "other") for part in parts})
    edges = [x for x, part, before in zip(starts, parts, [None, *parts], strict=False)
             if before is None or part.stage != before.stage]  # fmt: skip
    edges.append(chart.right)

    chart.ground(edges)
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        ready = start + min(part.loading_share, _MOST_LOADING) * (end - start)
        draw.rectangle((start, y_at(part.idle_bytes), ready, chart.bottom), WORK)
        draw.rectangle((ready, y_at(part.peak_bytes), end, chart.bottom), WORK)
        if (end - ready) / part.steps > 5 * chart.scale:
            for step in range(part.steps):
                x = ready + (end - ready) * step / part.steps
                draw.line((x, y_at(part.peak_bytes), x, chart.bottom), GROUND, 1)
        draw.rectangle((ready, y_at(part.weights_bytes), end, chart.bottom), colours[part.unit])
        draw.line((start, chart.bottom, start, chart.bottom + 5 * chart.scale), MUTED, 1)
        at = (start + end) / 2, chart.bottom + 6 * chart.scale
        draw.text(at, part.label, MUTED, chart.font, anchor="mt")
    facts = [f"{seconds(stage.seconds)}, peak {format_bytes(stage.peak_vram_bytes)}" for stage in plan.stages]
    chart.stages(edges, [stage.name for stage in plan.stages], facts)
    chart.frame(colours, edges)
    if not to_scale or any(part.loading_share > _MOST_LOADING for part in parts):
        draw.text((chart.right, 12 * chart.scale), "time is not to scale", MUTED, chart.font, anchor="ra")
    return chart.picture()


def draw_plans(plans: Sequence[RunPlan], width: int, height: int) -> Image.Image:
    """Pictures of plans, `height` pixels each, one above the other."""
    whole = Image.new("RGB", (width, height * len(plans)))
    for number, plan in enumerate(plans):
        whole.paste(draw_plan(plan, width, height), (0, number * height))
    return whole


def _parts(plan: RunPlan) -> list[_Part]:
    parts = []
    for stage in plan.stages:
        for unit in stage.units:
            size = stage.idle_bytes, unit.weights_bytes, unit.peak_vram_bytes
            loading = unit.first_step_seconds - unit.step_seconds
            first, rest = unit.first_step_seconds, stage.steps - 1
            label = f"first step {seconds(first)}" if rest else seconds(first)
            parts.append(_Part(stage.name, unit.unit, first, loading, *size, 1, label))
            if rest:
                more = f"{rest} x {seconds(unit.step_seconds)}"
                parts.append(_Part(stage.name, unit.unit, rest * unit.step_seconds, 0, *size, rest, more))
    return parts


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
