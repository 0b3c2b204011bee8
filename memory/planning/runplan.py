"""The plans of a whole run, stage by stage, and their text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..charts.text_tables import format_table
from ..rates import ASSUMED, Rates
from ..sizes import format_bytes
from .planner import Candidate, Plan

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..charts import plan_chart as charts

_ROLES = {"encode": "text_encoder", "sample": "transformer", "decode": "vae"}


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage: the plans of its units, in the order of their first calls.

    `idle_bytes` is what the stage holds on the device before them. All calls together make `steps` steps, and compute
    for `computing_seconds` at least. Seconds are for `rates`.
    """

    name: str
    units: tuple[Plan, ...]
    idle_bytes: int = 0
    note: str = ""
    steps: int = 1
    rates: Rates = ASSUMED
    computing_seconds: float = 0.0

    @property
    def peak_vram_bytes(self) -> int:
        """The most bytes on the device in this stage: that of one unit, since its units take turns."""
        return max((plan.peak_vram_bytes for plan in self.units), default=self.idle_bytes)

    @property
    def driver_bytes(self) -> int:
        """The most bytes that the driver counts for this process in this stage, as far as it tells."""
        return max((plan.driver_bytes for plan in self.units), default=self.idle_bytes)

    def beginning_with(self, weights_bytes: int) -> StagePlan:
        """Return the same plan for a stage that begins with `weights_bytes` of weights on the device.

        These were kept from the run before.
        """
        idle = self.idle_bytes + weights_bytes
        units = tuple(replace(plan, peak_vram_bytes=max(plan.peak_vram_bytes, idle)) for plan in self.units)
        return replace(self, units=units, idle_bytes=idle)

    @property
    def main(self) -> Plan:
        """The plan of the unit that takes most of the time."""
        return max(self.units, key=lambda plan: (plan.step_seconds, plan.peak_vram_bytes))

    @property
    def step_seconds(self) -> float:
        """Seconds of a steady step: the sum over all units, each with its calls in one step."""
        return sum(plan.step_seconds for plan in self.units)

    @property
    def first_step_seconds(self) -> float:
        """Seconds of the first step, which brings the weights. A stage of one step takes no more than this."""
        return sum(plan.first_step_seconds for plan in self.units)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the stage reads from disk."""
        return sum(plan.disk_bytes for plan in self.units)

    @property
    def seconds(self) -> float:
        """Seconds of the whole stage."""
        return self.first_step_seconds + (self.steps - 1) * self.step_seconds


@dataclass(frozen=True)
class BestBatch:
    """A number of pictures to sample at once, and the seconds of sampling for each of them."""

    pictures: int
    seconds: float


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: bytes, seconds, and the reasons. `str()` of it is a table with the reasons.

    `pictures` are sampled, `at_once` of them together. `caveat` holds sentences about the limits of the forecast, and
    about LoRAs. `best` is None if several pictures cannot be sampled at once, or if not even one fits.
    """

    model: str
    device: str
    work: str
    steps: int
    budget_bytes: int
    rates: Rates
    stages: tuple[StagePlan, ...]
    caveat: str = ""
    pictures: int = 1
    at_once: int = 1
    best: BestBatch | None = None

    @property
    def is_timed(self) -> bool:
        """Return whether the seconds are a forecast. False on the CPU, and on a simulated card without a clock."""
        return not (self.on_cpu or math.isinf(self.rates.operations_per_second))

    @property
    def on_cpu(self) -> bool:
        """Return whether the transformer runs on the CPU, whose seconds are not predicted."""
        return any(stage.name == "sample" and stage.main.placement == "cpu" for stage in self.stages)

    @property
    def _untimed(self) -> str:
        """The words in place of seconds that are not predicted."""
        return "not predicted on the CPU" if self.on_cpu else "not predicted on the simulated card"

    @property
    def picture_seconds(self) -> float:
        """Seconds of sampling for each picture."""
        return self._sample.seconds / self.pictures

    @property
    def samples(self) -> bool:
        """Return whether sampling fits the budget."""
        return all(plan.fits for plan in self._sample.units)

    @property
    def sampling(self) -> Plan:
        """The plan of the transformer."""
        return self._sample.main

    @property
    def _sample(self) -> StagePlan:
        """The plan of the sampling stage."""
        return next(stage for stage in self.stages if stage.name == "sample")

    @property
    def placement(self) -> str:
        """The placement of the transformer."""
        return self.sampling.placement

    @property
    def resident_groups(self) -> tuple[int, ...]:
        """The weight groups of the transformer that stay on the device."""
        return self.sampling.resident_groups

    @property
    def peak_vram_bytes(self) -> int:
        """The most bytes on the device in the whole run."""
        return max(stage.peak_vram_bytes for stage in self.stages)

    @property
    def driver_bytes(self) -> int:
        """The most bytes that the driver counts for this process, as far as it tells. The budget limits this figure."""
        return max(stage.driver_bytes for stage in self.stages)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the run reads from disk, given what is in RAM now."""
        return sum(stage.disk_bytes for stage in self.stages)

    @property
    def _peak_words(self) -> str:
        """The peak in words, with the driver's figure if that is higher. On the CPU it is the RAM of the weights."""
        if self.on_cpu and not self.peak_vram_bytes:
            return f"{format_bytes(self.ram_bytes)} of RAM in weights"
        peak, driver = format_bytes(self.peak_vram_bytes), format_bytes(self.driver_bytes)
        return peak if peak == driver else f"{peak} ({driver} by the driver)"

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that the weights of the largest unit take."""
        return max(plan.ram_bytes for stage in self.stages for plan in stage.units)

    @property
    def step_seconds(self) -> float:
        """Seconds of a steady sampling step."""
        return self._sample.step_seconds

    @property
    def first_step_seconds(self) -> float:
        """Seconds of the first sampling step, which brings the weights."""
        return self._sample.first_step_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of all stages of the plan."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the seconds of a sampling step in this placement."""
        return sum(plan.bound_seconds for plan in self._sample.units)

    @property
    def reason(self) -> str:
        """The reason for the transformer's placement, in one sentence. Each other unit that does not fit adds one."""
        plans = [plan for stage in self.stages for plan in stage.units]
        others = [f"{plan.unit}: {plan.reason}" for plan in plans if not plan.fits and plan is not self.sampling]
        return " ".join([self.sampling.reason, *others])

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The rejected placements of the transformer, each with its `why_not`."""
        return self.sampling.rejected

    @property
    def fits(self) -> bool:
        """Return whether every stage fits the budget."""
        return all(plan.fits for stage in self.stages for plan in stage.units)

    def __str__(self) -> str:
        told = ("driver",) * any(plan.overhead_bytes for stage in self.stages for plan in stage.units)
        rows: list[tuple[str, ...]] = [
            ("stage", "unit", "placement", "weights", "peak VRAM", *told, "RAM", "per step", "first")
        ]
        for stage in self.stages:
            for i, plan in enumerate(stage.units):
                per_step = self._time(plan.step_seconds) if stage.name == "sample" else ""
                first = self._time(plan.first_step_seconds)
                driver = (plan.driver_bytes,) * len(told)
                sizes = map(format_bytes, (plan.weights_bytes, plan.peak_vram_bytes, *driver, plan.ram_bytes))
                label = f"{plan.label}, {stage.note}" if stage.note else plan.label
                rows.append(("" if i else stage.name, plan.unit, label, *sizes, per_step, first))
        others: list[tuple[str, ...]] = [("not", "weights", "peak VRAM", "per step", "because")]
        for other in self.rejected:
            sizes = map(format_bytes, (other.weights_bytes, other.peak_vram_bytes))
            others.append((other.label, *sizes, self._time(other.step_seconds), other.why_not))
        parts = [self.headline(), format_table(rows), self.reason]
        if len(others) > 1:
            parts.append(format_table(others))
        bound = f" No step in this placement is faster than {seconds(self.bound_seconds)}." * self.is_timed
        return "\n\n".join([*parts, f"{self.batch_words()}{self.disk_words()}", f"{self.basis()}{bound}"])

    def _time(self, value: float) -> str:
        return seconds(value) if self.is_timed or (self.on_cpu and value) else "-"

    def headline(self) -> str:
        """Return one line: the model, the device, the budget, the placement, the peak, and the time."""
        total = seconds(self._sample.seconds)
        card = "" if self.device == "cpu" else f"on {self.device} "  # a plan made on the CPU is for a card elsewhere
        where = f"{card}with {format_bytes(self.budget_bytes)}{' of RAM' if self.on_cpu and not card else ''}"
        peak, step = self._peak_words, seconds(self.step_seconds)
        takes = f"peak {peak}; {f'{step} a step, {total} for {self.steps}' if self.is_timed else self._untimed}"
        doubt = "" if self.fits else " IT DOES NOT FIT."
        return f"{self.model}, {self.work}, {where}: {self.sampling.label}; {takes}.{doubt}"

    def brief(self) -> str:
        """Return a shorter line, such as a chart's title: the budget, the placement, the peak, and the time."""
        took = f"{seconds(self.step_seconds)} a step, {seconds(self.total_seconds)} in all"
        took = took if self.is_timed else self._untimed
        peak = f"peak {self._peak_words}{'' if self.fits else ' DOES NOT FIT'}"
        return f"{format_bytes(self.budget_bytes)}: {self.sampling.label}; {peak}; {took}"

    def batch_words(self) -> str:
        """Return one or two sentences: seconds of sampling for each picture, and the best batch."""
        if not self.is_timed:
            words = "The time of sampling, and with it the best batch, is not predicted on the simulated card."
            if self.on_cpu:
                words = "The time of sampling is not predicted on the CPU."
            return f"{words} It samples {self.at_once} at once." if self.pictures > 1 else words
        at_once = f", {self.at_once} at once" if self.pictures > 1 else ""
        words = f"Sampling takes {seconds(self.picture_seconds)} a picture{at_once}"
        if self.best is None or self.best.pictures == 1:
            return f"{words}. For this budget the best batch is 1."
        return f"{words}. For this budget the best batch is {self.best.pictures}: {seconds(self.best.seconds)} each."

    def disk_words(self) -> str:
        """Return the words for the bytes that the run reads from disk, "" where it reads nothing."""
        return f" It reads {format_bytes(self.disk_bytes)} from disk." if self.disk_bytes else ""

    def basis(self) -> str:
        """Return the rates that the seconds are based on, and the caveat, as sentences."""
        rates = self.rates
        to_device = f"{rates.pinned_bytes_per_second / 1e9:.1f} GB/s to the device"
        unpinned = f"{rates.paged_bytes_per_second / 1e9:.1f} unpinned"
        disk = f"{rates.disk_bytes_per_second / 1e9:.1f} GB/s from disk"
        compute = f"{rates.operations_per_second / 1e12:.1f} TFLOPS"
        if rates.attention:
            compute += f" ({rates.attention / 1e12:.1f} in attention)"
        if math.isinf(rates.operations_per_second):
            compute = "computing in no time"
        caveat = f"{self.caveat} " if self.caveat else ""
        if self.on_cpu and self.device == "cpu":
            return f"{caveat}Seconds are those of reading: {disk}, {rates.source}."
        return f"{caveat}Seconds are for {to_device} ({unpinned}), {disk} and {compute}, {rates.source}."

    def picture(self, width: int = 1200, height: int = 480) -> Image:
        """Return a chart of the predicted VRAM over time by unit, as an RGB picture. See `draw_plans`."""
        return draw_plans([self], width, height)


def draw_plans(plans: Sequence[RunPlan], width: int, height: int, scale: float = 1.0) -> Image:
    """Return charts of plans, one above the other, each of `width` by `height` pixels times `scale`.

    Without matplotlib return a picture that says so.
    """
    from ..charts import drawn

    def draw() -> Image:
        from ..charts import plan_chart as charts

        return charts.draw_plans([_charted(plan) for plan in plans], width, height, scale)

    return drawn(draw, round(width * scale), round(height * len(plans) * scale))


def _charted(plan: RunPlan) -> charts.Plan:
    """Return the data of a plan's chart. The first step of each stage, which brings the weights, is a part of its own.

    On a device without a clock all steps are equally long, and show no seconds.
    """
    from ..charts import plan_chart as charts

    parts, facts = [], {}
    for stage in plan.stages:
        took = f"{seconds(stage.seconds)}, " * plan.is_timed
        facts[stage.name] = f"{took}peak {format_bytes(stage.peak_vram_bytes)}"
        rest = stage.steps - 1
        for unit in stage.units:
            named = stage.name, unit.unit, _ROLES.get(stage.name, "other")
            sizes = stage.idle_bytes, unit.weights_bytes, unit.peak_vram_bytes
            first, each = (unit.first_step_seconds, unit.step_seconds) if plan.is_timed else (0.0, 0.0)
            words = f"first step {seconds(first)}" if rest else seconds(first)
            others = f"{rest} x {seconds(each)}"
            if not plan.is_timed:
                words, others = "first step" * bool(rest), f"{rest} more"
            parts.append(charts.Part(*named, words, first, first - each, *sizes))
            if rest:
                parts.append(charts.Part(*named, others, rest * each, 0, *sizes, rest))
    return charts.Plan(plan.brief(), plan.budget_bytes, facts, tuple(parts))


def compare(plans: Sequence[RunPlan]) -> str:
    """Return a table of plans of the same run for several budgets, and the reason of each in one line."""
    rows: list[tuple[str, ...]] = [
        ("budget", "placement", "peak VRAM", "RAM", "disk", "per step", "first step", "total", "best batch", "fits")
    ]
    for plan in plans:
        sizes = map(format_bytes, (plan.peak_vram_bytes, plan.ram_bytes, plan.disk_bytes))
        times = map(plan._time, (plan.step_seconds, plan.first_step_seconds, plan.total_seconds))
        budget, fits = format_bytes(plan.budget_bytes), "yes" if plan.fits else "NO"
        best = str(plan.best.pictures if plan.best else 1) if plan.is_timed and plan.samples else "-"
        rows.append((budget, plan.sampling.label, *sizes, *times, best, fits))
    reasons = "\n".join(f"{format_bytes(plan.budget_bytes)}: {plan.reason}" for plan in plans)
    one = plans[0]
    return "\n\n".join([f"{one.model}, {one.work}, {one.steps} steps", format_table(rows), reasons, one.basis()])


def seconds(value: float) -> str:
    """Return a time in words: "0.41 s", "3.2 min", "12.5 ms"."""
    if not value:
        return "0 s"
    if value >= 90:
        return f"{value / 60:.1f} min"
    if value < 0.000995:
        return f"{value * 1e6:.0f} us"
    if value < 0.0995:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
