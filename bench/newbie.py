"""`ballast bench newbie`: the rows of an article about NewBie-image-Exp0.1's memory, and ours in 8, 6 and 4 GB.

Measured on a GPU, with random weights of the published sizes. Without one the planner predicts: the stages are
of a dry run on shapes, and the seconds are for its assumed rates.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..memory import simulated
from ..memory.accelerator import resolve_device
from ..memory.errors import DoesNotFitError, release_frames
from ..memory.manager import MemoryManager
from ..memory.rates import ASSUMED
from ..memory.sizes import format_bytes
from ..memory.weights.stored import stored_tensors
from ..memory.weights.unit import ManagedModel
from ..pipelines import open_pipeline
from ..pipelines.planning.plans import TYPICAL_PROMPT
from ..pipelines.sampling.kernels import compiles
from . import charts, full_size, models, report
from .measure import Meter, environment

# On a card of 16 GB, its GB taken for 2**30 bytes as ours are. The rows between have no figures.
ARTICLE = {
    "baseline": {"article": "15.2 GB, 1.87 s", "article_peak_bytes": int(15.2 * 2**30), "article_step": 1.87},
    "all together": {"article": "13.3 GB, 1.58 s", "article_peak_bytes": int(13.3 * 2**30), "article_step": 1.58},
}
BUDGETS = (8 * 2**30, 6 * 2**30, 4 * 2**30)
VISION_BYTES = 419_816_304 * 2  # what reads pictures in Gemma-3-4B's checkpoint, in bfloat16
_STAGES = ("encode", "sample", "decode")


@dataclass(frozen=True)
class Way:
    """One row: all models on the card at once, or in stages; within a budget or without; compiled or not."""

    name: str
    staged: bool = True
    compile: bool = False
    budget_bytes: int | None = None


def ways(budgets: Sequence[int], measured: bool) -> list[Way]:
    """Return the article's four rows, then ours; those compiled as well where there is something to measure."""
    rows = [Way("baseline", staged=False), Way("compile only", staged=False, compile=True)]
    rows += [Way("staged, fp32 decode"), Way("all together", compile=True)]
    ours = [Way(f"ours, {format_bytes(size).replace('.00', '')}", budget_bytes=size) for size in budgets]
    return rows + ours + [replace(way, name=f"{way.name}, compiled", compile=True) for way in ours if measured]


def run(
    device: str,
    out: Path,
    steps: int = 6,
    folder: Path | None = None,
    side: int = 1024,
    budgets: Sequence[int] = BUDGETS,
    vision_bytes: int = VISION_BYTES,
) -> int:
    """Measure, or predict where there is no GPU; write the .json and the .png anew after each row. Returns 0.

    `folder` holds a NewBie; None makes one of the published sizes, on a GPU with 16 GB of random weights, for the time
    of the run. A row that cannot run says why.
    """
    on = resolve_device(device)
    if steps < 3:
        raise ValueError(f"--steps is {steps}; it takes at least 3, of which the first does not count.")
    if folder is None and on.type == simulated.DEVICE_TYPE:
        raise ValueError("the simulated device is too slow for the published sizes. Use --device cpu, which predicts.")
    predicts = on.type == "cpu"
    kind, find = ("predicted", _predicted) if predicts else ("measured", _measured)
    found: dict[str, Any] = {"kind": kind, "side": side, "steps": steps, "rows": []}
    if predicts:
        found |= {"device": kind, "torch": torch.__version__, "rates": asdict(ASSUMED)}
    else:
        found |= environment(Meter(on), str(side))
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or published(Path(scratch) / "NewBie-image-Exp0.1", weights=not predicts)
        for way in ways(budgets, not predicts):
            row: dict[str, Any] = {"name": way.name, **ARTICLE.get(way.name, {})}
            cache = Path(scratch) / ("cache" if predicts else way.name)  # each way that runs encodes
            try:
                pipe = open_pipeline(folder, device=on, vram=way.budget_bytes, cache_dir=cache)
                row |= find(pipe, way, side, steps, vision_bytes)
            except Exception as error:
                row["error"] = " ".join(f"{type(error).__name__}: {error}".replace(scratch, "").split())[:300]
                release_frames(error)
            found["rows"].append(row)
            wrote = _write(found, out)
            report.say(f"{way.name}: {row.get('error', 'done')}")
    report.say(f"\n{_title(found)}\n\n{_table(found)}\n\n{wrote}")
    return 0


def published(folder: Path, weights: bool) -> Path:
    """Return a folder of the published sizes, with random weights or with files of zeros that take no disk."""
    full_size.build_newbie(folder)
    if weights:
        draw(folder)
    return folder


def draw(folder: Path) -> None:
    """Write random weights into a folder's files: with zeros a GPU takes less power, and runs faster."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(models._POOL, generator=generator)
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("r+b") as file:
            for name, at in stored_tensors([path]).items():
                scale = math.prod(at.shape[1:]) ** -0.5 if len(at.shape) > 1 else 0.02
                weight = models._drawn(torch.Size(at.shape), pool.to(at.dtype), scale, generator)
                if len(at.shape) == 1 and name.endswith("weight"):
                    weight.add_(1)  # a norm's
                file.seek(at.offset)
                file.write(weight.view(-1).view(torch.uint8).numpy().data)


def _predicted(pipe: Any, way: Way, side: int, steps: int, vision_bytes: int) -> dict[str, Any]:
    """Return a row by the planner. Compiled blocks are planned as uncompiled ones: bytes as without, seconds unknown.

    With all models resident a stage's peak is all weights and its largest activations, so that of the run is all
    weights and the largest working memory. Among them are Gemma's vision tower, and a VAE that decodes in its own type.
    """
    plan = pipe.plan(side, side, steps, vram=way.budget_bytes or "1TB", ram="64GB", rates=ASSUMED)
    peaks = {stage.name: stage.peak_vram_bytes for stage in plan.stages}
    if not way.staged:
        units, vae = [unit for stage in plan.stages for unit in stage.units], _own_vae(pipe)
        weights_bytes = sum(unit.weights_bytes for unit in units if unit.unit != vae.name) + vae.size_bytes
        for stage in plan.stages:
            works_bytes = max(unit.peak_vram_bytes - unit.weights_bytes for unit in stage.units)
            if stage.name == "decode":  # which is planned in float32
                works_bytes = works_bytes * vae.size_bytes // pipe.decoder.size_bytes
            peaks[stage.name] = weights_bytes + vision_bytes + works_bytes
    note = "as without" if way.compile else "" if plan.fits else "does not fit"
    return _row(peaks, plan.sampling.label, None if way.compile else plan.step_seconds, None, note)


def _own_vae(pipe: Any) -> ManagedModel:
    """Return the VAE of the baseline in bfloat16, as FLUX.1's is published and stock pipelines run it."""
    return replace(pipe.model.parts["vae"], dtype=pipe.model.parts["transformer"].run_dtype).unit("baseline")


def _measured(pipe: Any, way: Way, side: int, steps: int, vision_bytes: int) -> dict[str, Any]:
    manager, meter = pipe.manager, Meter(pipe.manager.device)
    manager.free()
    manager.timeline.clear()
    torch._dynamo.reset()  # each way compiles anew
    marks, graphs, before = [], [], compiles()

    def on_step(*_: Any) -> None:
        marks.append(meter.mark())
        graphs.append(compiles() - before)

    sampling = {"width": side, "height": side, "steps": steps, "on_step": on_step, "compile": way.compile}
    if way.staged:
        pipe.decode(pipe.sample(pipe.encode(TYPICAL_PROMPT), **sampling))
    else:
        _run_all_resident(pipe, manager, sampling, vision_bytes)
    meter.accelerator.synchronize()
    stages = list(manager.timeline.stages)
    peaks = {name: max(stage.peak_bytes for stage in stages if stage.name == name) for name in _STAGES}
    placement = [stage.units["transformer"].placement for stage in stages if stage.name == "sample"][-1]
    last, graphs = marks[-steps:], graphs[-steps:]  # what ran out of memory began again
    seconds = statistics.median(meter.seconds(*pair) for pair in zip(last, last[1:], strict=False))
    compiled = way.compile and graphs[-1] > 0
    notes = ["nothing was compiled"] if way.compile and not compiled else []
    notes += ["over the budget"] if max(peaks.values()) > (way.budget_bytes or math.inf) else []
    return _row(peaks, placement, seconds, graphs[-1] - graphs[1] if compiled else None, ", ".join(notes))


def _run_all_resident(pipe: Any, manager: MemoryManager, sampling: dict[str, Any], vision_bytes: int) -> None:
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
        latents = pipe.sample(pipe.encode(TYPICAL_PROMPT), strategy="resident", **sampling)
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


def _row(
    peaks: Mapping[str, int], placement: str, step: float | None, recompiles: int | None, note: str
) -> dict[str, Any]:
    found = {"peak_bytes": max(peaks.values()), "step": step, "recompiles": recompiles, "placement": placement}
    return found | {f"{name}_bytes": peaks[name] for name in _STAGES} | {"note": note}


def _title(found: Mapping[str, Any]) -> str:
    how = "predicted for 25 GB/s, 60 TFLOPS" if found["kind"] == "predicted" else f"measured on {found['device']}"
    return f"NewBie-image-Exp0.1, {found['side']} x {found['side']}, with guidance: {how}"


def _table(found: Mapping[str, Any]) -> str:
    headings = {"name": "row", "peak_bytes": "peak VRAM", "step": f"s/step, {found['kind']}", "article": "article"}
    headings |= {"recompiles": "recompiled", **{f"{name}_bytes": name for name in _STAGES}}
    rows = [{**row, "note": row.get("error", row.get("note", ""))[:80]} for row in found["rows"]]
    return report.table(headings | {"placement": "transformer", "note": "note"}, rows)


def _write(found: dict[str, Any], out: Path) -> str:
    stem = f"newbie-{re.sub(r'[^a-z0-9]+', '-', found['device'].lower()).strip('-')}"
    json_path, png_path = out / f"{stem}.json", out / f"{stem}.png"
    report.write_json(found, json_path)
    charts.newbie(found, _title(found)).save(png_path, optimize=True)
    return f"wrote {json_path}, {png_path}"
