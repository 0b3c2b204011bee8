"""The plans of a whole run, stage by stage, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .planner import Candidate, Plan
from .rates import Rates
from .report import format_table
from .sizes import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class StagePlan:
    """One stage: its units' plans in the order of their first calls, and what it holds before them."""

    name: str
    units: tuple[Plan, ...]
    idle_bytes: int = 0
    note: str = ""

    @property
    def peak_vram_bytes(self) -> int:
        """The most on the device in this stage: its units take turns."""
        return max((plan.peak_vram_bytes for plan in self.units), default=self.idle_bytes)

    @property
    def main(self) -> Plan:
        """The unit that takes most of the time."""
        return max(self.units, key=lambda plan: (plan.step_seconds, plan.peak_vram_bytes))


@dataclass(frozen=True)
class RunPlan:
    """What a run will take: bytes, seconds, and why. `str()` of it is a table with the reasons."""

    model: str
    device: str
    work: str
    steps: int
    budget_bytes: int
    rates: Rates
    stages: tuple[StagePlan, ...]

    @property
    def sampling(self) -> Plan:
        """The plan of the transformer."""
        return next(stage for stage in self.stages if stage.name == "sample").main

    @property
    def placement(self) -> str:
        """How the transformer sits."""
        return self.sampling.placement

    @property
    def resident_blocks(self) -> tuple[int, ...]:
        """The blocks of the transformer that stay on the device."""
        return self.sampling.resident_blocks

    @property
    def peak_vram_bytes(self) -> int:
        """The most on the device in the whole run."""
        return max(stage.peak_vram_bytes for stage in self.stages)

    @property
    def ram_bytes(self) -> int:
        """What the largest unit holds in RAM."""
        return max(plan.ram_bytes for stage in self.stages for plan in stage.units)

    @property
    def step_seconds(self) -> float:
        """Seconds of a steady sampling step."""
        return self.sampling.step_seconds

    @property
    def first_step_seconds(self) -> float:
        """Seconds of the first sampling step, which brings the weights."""
        return self.sampling.first_step_seconds

    @property
    def bound_seconds(self) -> float:
        """No sampling step in this placement can be faster."""
        return self.sampling.bound_seconds

    @property
    def reason(self) -> str:
        """Why the transformer sits so, in one sentence."""
        return self.sampling.reason

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The other placements of the transformer, with why not."""
        return self.sampling.rejected

    @property
    def fits(self) -> bool:
        """Whether every stage fits the budget."""
        return all(plan.fits for stage in self.stages for plan in stage.units)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("stage", "unit", "placement", "weights", "peak VRAM", "RAM", "per step", "first")
        ]
        for stage in self.stages:
            for i, plan in enumerate(stage.units):
                per_step = seconds(plan.step_seconds) if stage.name == "sample" else ""
                first = seconds(plan.first_step_seconds)
                sizes = map(format_bytes, (plan.weights_bytes, plan.peak_vram_bytes, plan.ram_bytes))
                label = f"{plan.label}, {stage.note}" if stage.note else plan.label
                rows.append(("" if i else stage.name, plan.unit, label, *sizes, per_step, first))
        others = [("not", "weights", "peak VRAM", "per step", "because")]
        for other in self.rejected:
            sizes = map(format_bytes, (other.weights_bytes, other.peak_vram_bytes))
            others.append((other.label, *sizes, seconds(other.step_seconds), other.why_not))
        parts = [self.headline(), format_table(rows), self.reason]
        if len(others) > 1:
            parts.append(format_table(list(others)))
        return "\n\n".join([*parts, self.basis()])

    def headline(self) -> str:
        """One line: what runs where, the budget, the peak, and the time."""
        total = seconds(self.first_step_seconds + (self.steps - 1) * self.step_seconds)
        where = f"on {self.device} with {format_bytes(self.budget_bytes)}"
        peak, step = format_bytes(self.peak_vram_bytes), seconds(self.step_seconds)
        takes = f"peak {peak}; {step} a step, {total} for {self.steps}"
        doubt = "" if self.fits else " IT DOES NOT FIT."
        return f"{self.model}, {self.work}, {where}: {self.sampling.label}; {takes}.{doubt}"

    def basis(self) -> str:
        """Where the seconds come from."""
        rates = self.rates
        to_device = f"{rates.pinned_bytes_per_second / 1e9:.1f} GB/s to the device"
        unpinned = f"{rates.paged_bytes_per_second / 1e9:.1f} unpinned"
        disk = f"{rates.disk_bytes_per_second / 1e9:.1f} GB/s from disk"
        compute = f"{rates.operations_per_second / 1e12:.1f} TFLOPS"
        bound = f"no step in this placement is faster than {seconds(self.bound_seconds)}"
        return f"Seconds are for {to_device} ({unpinned}), {disk} and {compute}, {rates.source}; {bound}."

    def picture(self, width: int = 1200, height: int = 480) -> Image:
        """Predicted VRAM over time, by unit, as an RGB picture."""
        from .picture import draw_plan

        return draw_plan(self, width, height)


def seconds(value: float) -> str:
    """A time as people say it: "0.41 s", "3.2 min"."""
    if value >= 90:
        return f"{value / 60:.1f} min"
    if value and value < 0.0995:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
