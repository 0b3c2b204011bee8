"""Plans of one run with its weights held in each of the ways that there are, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from ...memory.charts.text_tables import format_table
from ...memory.codecs.converters import CONVERTERS
from ...memory.planning.runplan import RunPlan, seconds
from ...memory.sizes import format_bytes

AS_STORED = "auto"
CHOICES = (AS_STORED, *CONVERTERS)


def compare_weights(plans: Mapping[str, RunPlan]) -> str:
    """Tabulate what each choice of weights takes and gains within one budget, by its word.

    `AS_STORED` must be among them. A choice that changes nothing, as where all is encoded already, has no row.
    """
    stored = plans[AS_STORED]
    rows: list[tuple[str, ...]] = [
        ("weights", "placement", "RAM", "peak VRAM", "per step", "gain", "total", "fits", "quality")
    ]
    for choice, plan in plans.items():
        if choice != AS_STORED and _takes(plan) == _takes(stored):
            continue
        sizes = map(format_bytes, (plan.ram_bytes, plan.peak_vram_bytes))
        gain = "" if plan is stored else _gain(stored.step_seconds, plan.step_seconds)
        quality = CONVERTERS[choice].quality if choice in CONVERTERS else "as it is stored"
        times = seconds(plan.step_seconds), gain, seconds(plan.total_seconds)
        rows.append((choice, plan.sampling.label, *sizes, *times, "yes" if plan.fits else "NO", quality))
    budget = format_bytes(stored.budget_bytes)
    if len(rows) == 2:
        return f"Weights with {budget}: no choice changes anything, they are encoded already."
    return f"Weights with {budget} of VRAM, a gain being time saved in each step:\n\n{format_table(rows)}"


def _gain(before: float, after: float) -> str:
    """Return how much less time that is; nothing of a simulated card that computes in no time."""
    return f"{round(100 * (1 - after / before))} %" if before else ""


def _takes(plan: RunPlan) -> tuple[int, int, float]:
    return plan.ram_bytes, plan.peak_vram_bytes, plan.step_seconds
