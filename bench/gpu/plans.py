"""Plans against what the allocator and the driver count, for each stage of a run within three budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...memory.sizes import format_bytes
from ...pipelines import open_pipeline
from ...pipelines.planning.plans import TYPICAL_PROMPT
from .. import newbie
from . import section
from .section import Section

_SHAPES = Path(__file__).resolve().parents[2] / "demo" / "shapes"  # the model that a dry run draws with
_SHARES = (1.0, 0.8, 0.65)  # of what its plan takes without a budget
_STEPS = 4
_RUN = 15  # seconds of one, about


def main(argv: Sequence[str]) -> None:
    """Run as a process of its own."""
    section.run(argv, lambda to: _Runs(to).measure())


class _Runs:
    """Whole runs of one pipeline, each within another budget."""

    def __init__(self, to: Section) -> None:
        self.to, self.meter = to, to.meter()
        self.idle_bytes = self.meter.used_bytes()
        folder = _SHAPES if to.dry else newbie.published(Path("NewBie-image-Exp0.1").resolve(), weights=True)
        side = 64 if to.dry else 1024
        self.size: dict[str, Any] = {"width": side, "height": side, "steps": _STEPS}
        self.pipe = open_pipeline(folder, device=self.meter.device, cache_dir=Path("cache").resolve())
        to.tell(model=folder.name, side=side, steps=_STEPS)

    def measure(self) -> None:
        budgets: Sequence[int] = newbie.BUDGETS
        if self.to.dry:
            whole = self.pipe.plan(**self.size, vram="1GB").peak_vram_bytes
            budgets = [int(share * whole) for share in _SHARES]
        for number, budget_bytes in enumerate(budgets):
            prompt = f"{TYPICAL_PROMPT}, number {number}"  # or its embeddings would be there
            what = f"a budget of {format_bytes(budget_bytes)}"
            self.to.attempt(what, _RUN, self._run, budget_bytes, prompt)

    def _run(self, budget_bytes: int, prompt: str) -> None:
        manager, pipe = self.pipe.manager, self.pipe.within(vram=budget_bytes)
        plan = pipe.plan(**self.size, prompt=prompt)
        manager.free()
        manager.timeline.clear()
        ends: list[float] = []
        cond, encoding = self._driver(lambda: pipe.encode(prompt))
        latents, sampling = self._driver(
            lambda: pipe.sample(cond, on_step=lambda *_: ends.append(time.perf_counter()), **self.size)
        )
        picture, decoding = self._driver(lambda: pipe.decode(latents))
        if not picture.isfinite().all():
            raise ValueError("the picture has values that are not finite")
        drivers = {"encode": encoding, "sample": sampling, "decode": decoding}
        steps = {"sample": (plan.step_seconds, (ends[-1] - ends[0]) / (len(ends) - 1))}
        for stage in plan.stages:
            records = [record for record in manager.timeline.stages if record.name == stage.name]
            peak_bytes, driver_bytes = max(record.peak_bytes for record in records), drivers[stage.name]
            planned_step, step = steps.get(stage.name, (None, None))
            self.to.row(
                budget_bytes=budget_bytes, stage=stage.name, placement=stage.main.label, tries=len(records),
                planned_bytes=stage.peak_vram_bytes, peak_bytes=peak_bytes, driver_bytes=driver_bytes,
                over_planned=peak_bytes / stage.peak_vram_bytes, is_kept=peak_bytes <= budget_bytes,
                is_kept_by_driver=driver_bytes is not None and driver_bytes <= budget_bytes,
                planned_step=planned_step, step=step,
            )  # fmt: skip

    def _driver(self, call: Any) -> tuple[Any, int | None]:
        """Return what a call returns, and the most that the driver counted meanwhile."""
        self.meter.accelerator.empty_cache()
        with self.meter.driver_peak() as used:
            made = call()
        return made, used.over(self.idle_bytes)
