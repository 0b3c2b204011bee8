"""NewBie-image-Exp0.1: the rows of an article about its memory, and whole runs in 8, 6 and 4 GB, stage by stage.

On a GPU plans stand against what the allocator and the driver count, with random weights of the published sizes.
Without one the planner predicts: the stages are of a dry run on shapes, and the seconds are for its assumed rates.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..memory.errors import DoesNotFitError
from ..memory.memory_manager import MemoryManager
from ..memory.rates import ASSUMED
from ..memory.sizes import format_bytes
from ..memory.weights.stored import stored_tensors
from ..memory.weights.unit import ManagedModel
from ..pipelines import open_pipeline
from ..pipelines.planning.plans import TYPICAL_PROMPT
from ..pipelines.sampling.kernels import compiles
from . import models
from .downloads import full_size
from .harness import Run
from .measure import Meter, resolve_device
from .places import DEMO

# On a card of 16 GB, its GB taken for 2**30 bytes as ours are. The rows between have no figures.
_ARTICLE = {
    "baseline": {"article": "15.2 GB, 1.87 s", "article_peak_bytes": int(15.2 * 2**30), "article_step": 1.87},
    "all together": {"article": "13.3 GB, 1.58 s", "article_peak_bytes": int(13.3 * 2**30), "article_step": 1.58},
}
BUDGETS = (8 * 2**30, 6 * 2**30, 4 * 2**30)
_SHARES = (1.0, 0.8, 0.65)  # of what the plan of a small model takes: its budgets
_VISION_BYTES = 419_816_304 * 2  # what reads pictures in Gemma-3-4B's checkpoint, in bfloat16
_RUN = 15  # seconds of one, about


@dataclass(frozen=True)
class Way:
    """One run: all models on the card at once, or in stages; within a budget or without; compiled or not."""

    name: str
    staged: bool = True
    compile: bool = False
    budget_bytes: int | None = None


def ways(budgets: Sequence[int], article: bool, compiled: bool) -> list[Way]:
    """Return the article's four ways, then ours; those compiled as well where there is something to measure."""
    rows = [Way("baseline", staged=False), Way("compile only", staged=False, compile=True)]
    rows += [Way("staged, fp32 decode"), Way("all together", compile=True)]
    ours = [Way(f"ours, {format_bytes(size).replace('.00', '')}", budget_bytes=size) for size in budgets]
    return rows * article + ours + [replace(way, name=f"{way.name}, compiled", compile=True) for way in ours * compiled]


def measure(to: Run) -> None:
    """Add a row for each way and stage, as measured, or as predicted where there is no GPU.

    `folder` holds a NewBie, or is "demo"; without one it is made of the published sizes, on a GPU with 16 GB of random
    weights, for the time of the run. A way that cannot run says why.
    """
    request, side, steps = to.request, to.request.get("side", 1024), to.request.get("steps", 6)
    device, given = request["device"], request.get("folder")
    if steps < 3:
        raise ValueError(f"--steps is {steps}; it takes at least 3, of which the first does not count.")
    if not given and device == "sim":
        raise ValueError("the simulated device is too slow for the published sizes. Use --device cpu or --dry.")
    predicts = device != "sim" and resolve_device(device).type == "cpu"
    if predicts:
        to.tell(kind="predicted", device="predicted", torch=torch.__version__, rates=asdict(ASSUMED))
    meter = Meter(torch.device("cpu")) if predicts else to.meter()
    idle_bytes = meter.used_bytes()
    to.tell(side=side, steps=steps, **({} if predicts else {"kind": "measured"}))
    with tempfile.TemporaryDirectory() as scratch:
        folder = DEMO if given == "demo" else Path(given) if given else None
        folder = folder or published(Path(scratch) / "NewBie-image-Exp0.1", weights=not predicts)
        pipe = open_pipeline(folder, device=meter.device, cache_dir=Path(scratch) / "cache")
        budgets = request.get("budgets", BUDGETS)
        if given == "demo":
            whole = pipe.plan(width=side, height=side, steps=steps, vram="1GB").peak_vram_bytes
            budgets = [int(share * whole) for share in _SHARES]
        ours = request.get("ways") == "ours" or given == "demo"
        for number, way in enumerate(ways(budgets, not ours, not ours and not predicts)):
            runs = _Runs(pipe, meter, way, side, steps, request.get("vision_bytes", _VISION_BYTES), idle_bytes)
            prompt = f"{TYPICAL_PROMPT}, number {number}"  # or its embeddings would be there
            found = to.attempt(way.name, _RUN, runs.predicted if predicts else runs.measured, prompt)
            for row in found or ():
                to.row(name=way.name, **_ARTICLE.get(way.name if row["stage"] == "sample" else "", {}), **row)


def published(folder: Path, weights: bool) -> Path:
    """Return a folder of the published sizes, with random weights or with files of zeros that take no disk.

    With zeros a GPU takes less power, and runs faster.
    """
    full_size.build("newbie", folder)
    if weights:
        draw(folder)
    return folder


def draw(folder: Path) -> None:
    """Write random weights into a folder's files."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(models.POOL, generator=generator)
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("r+b") as file:
            for name, at in stored_tensors([path]).items():
                weight = models.drawn(torch.Size(at.shape), name, pool.to(at.dtype), generator)
                file.seek(at.offset)
                file.write(weight.view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Runs:
    """One way of running an open pipeline, planned and measured. `idle_bytes` the driver had counted before."""

    pipe: Any
    meter: Meter
    way: Way
    side: int
    steps: int
    vision_bytes: int
    idle_bytes: int | None

    @property
    def size(self) -> dict[str, Any]:
        return {"width": self.side, "height": self.side, "steps": self.steps}

    def predicted(self, prompt: str) -> list[dict[str, Any]]:
        """Return rows by the planner. Compiled blocks are planned as uncompiled ones: bytes as without, no seconds.

        With all models resident a stage's peak is all weights and its largest activations, so that of the run is all
        weights and the largest working memory. Among them are Gemma's vision tower, and a VAE that decodes in its own
        type.
        """
        pipe, way, rows = self.pipe, self.way, []
        plan = pipe.plan(**self.size, vram=way.budget_bytes or "1TB", ram="64GB", rates=ASSUMED)
        vae = _own_vae(pipe)
        units = [unit for stage in plan.stages for unit in stage.units]
        weights_bytes = sum(unit.weights_bytes for unit in units if unit.unit != vae.name) + vae.size_bytes
        for stage in plan.stages:
            peak_bytes = stage.peak_vram_bytes
            if not way.staged:
                works_bytes = max(unit.peak_vram_bytes - unit.weights_bytes for unit in stage.units)
                if stage.name == "decode":  # which is planned in float32
                    works_bytes = works_bytes * vae.size_bytes // pipe.decoder.size_bytes
                peak_bytes = weights_bytes + self.vision_bytes + works_bytes
            step = plan.step_seconds if stage.name == "sample" and not way.compile else None
            note = "as without" if way.compile else "" if plan.fits else "does not fit"
            row = {"stage": stage.name, "placement": stage.main.label, "planned_bytes": peak_bytes}
            rows.append({**row, "planned_step": step, "note": note})
        return rows

    def measured(self, prompt: str) -> list[dict[str, Any]]:
        """Return rows of a run. Those of staged ones have the plan beside them."""
        way, manager = self.way, self.pipe.manager
        pipe = self.pipe.within(vram=way.budget_bytes) if way.budget_bytes else self.pipe
        manager.free()
        manager.timeline.clear()
        plan = pipe.plan(**self.size, prompt=prompt) if way.staged and not way.compile else None
        torch._dynamo.reset()  # each way compiles anew
        marks, graphs, before, drivers = [], [], compiles(), {}

        def on_step(*_: Any) -> None:
            marks.append(self.meter.mark())
            graphs.append(compiles() - before)

        sampling = {**self.size, "on_step": on_step, "compile": way.compile}
        if way.staged:
            cond, drivers["encode"] = self._driver(lambda: pipe.encode(prompt))
            latents, drivers["sample"] = self._driver(lambda: pipe.sample(cond, **sampling))
            picture, drivers["decode"] = self._driver(lambda: pipe.decode(latents))
            if not picture.isfinite().all():
                raise ValueError("the picture has values that are not finite")
        else:
            _run_all_resident(pipe, manager, sampling, self.vision_bytes, prompt)
        self.meter.accelerator.synchronize()
        last, graphs = marks[-self.steps :], graphs[-self.steps :]  # what ran out of memory began again
        step = statistics.median(self.meter.seconds(*pair) for pair in zip(last, last[1:], strict=False))
        compiled = way.compile and graphs[-1] > 0
        rows = []
        for stage in ("encode", "sample", "decode"):
            records = [record for record in manager.timeline.stages if record.name == stage]
            # A stage plans again when it begins, by the rates that those before it measured.
            planned = plan and (records[-1].planned or next(one for one in plan.stages if one.name == stage))
            peak_bytes, driver_bytes = max(record.peak_bytes for record in records), drivers.get(stage)
            limit, samples = way.budget_bytes or math.inf, stage == "sample"
            main = planned.main.label if planned else records[-1].units["transformer"].placement if samples else None
            rows.append({
                "stage": stage, "placement": main, "tries": len(records), "budget_bytes": way.budget_bytes,
                "planned_bytes": planned and planned.peak_vram_bytes, "peak_bytes": peak_bytes,
                "over_planned": peak_bytes / planned.peak_vram_bytes if planned else None,
                "driver_bytes": driver_bytes, "is_kept": peak_bytes <= limit,
                "is_kept_by_driver": driver_bytes is not None and driver_bytes <= limit,
                "planned_step": plan.step_seconds if plan and samples else None, "step": step if samples else None,
                "recompiles": graphs[-1] - graphs[1] if compiled and samples else None,
                "note": "nothing was compiled" if way.compile and not compiled else "",
            })  # fmt: skip
        return rows

    def _driver(self, call: Any) -> tuple[Any, int | None]:
        """Return what a call returns, and the most that the driver counted meanwhile."""
        self.meter.accelerator.empty_cache()
        with self.meter.driver_peak() as used:
            made = call()
        return made, used.over(self.idle_bytes)


def _own_vae(pipe: Any) -> ManagedModel:
    """Return the VAE of the baseline in bfloat16, as FLUX.1's is published and stock pipelines run it."""
    return replace(pipe.model.parts["vae"], dtype=pipe.model.parts["transformer"].run_dtype).unit("baseline")


def _run_all_resident(
    pipe: Any, manager: MemoryManager, sampling: dict[str, Any], vision_bytes: int, prompt: str
) -> None:
    """Encode, sample and decode with every model on the device from before, to stay. DoesNotFitError if one left.

    The vision tower, which nothing calls, is there as so many bytes.
    """
    units = [*pipe.encoders, *pipe.denoisers, vae := manager.adopt(_own_vae(pipe))]
    tower = torch.empty(vision_bytes, dtype=torch.uint8, device=manager.device)
    try:
        for unit in units:
            manager.pin(unit)
            with manager.use(unit, "resident"):
                pass
        latents = pipe.sample(pipe.encode(prompt), strategy="resident", **sampling)
        with manager.stage("decode", [vae]), manager.use(vae, "resident") as module:
            own = latents.to(manager.device, next(module.parameters()).dtype)
            module.decode(own, return_dict=False)[0].float().cpu()  # type: ignore[operator]
        if left := [unit.name for unit in units if not unit.placement or unit.placement.name != "resident"]:
            raise DoesNotFitError(f"{', '.join(left)} did not fit beside the others")
        del tower
    finally:
        for unit in units:
            manager.pin(unit, False)
            manager.evict(unit)
