"""`ballast bench stream`, the part without a card: transformers of the published sizes against the bound, on paper.

Dry runs of the pipelines, opened from configs alone, tell what each group weighs and computes; the solver, which runs
go by too, tells how long a step takes. No device, no weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..memory.planning.fit import sizes_of
from ..memory.planning.solver import GroupLoad, Loads, place
from ..memory.planning.tiers import windows_bytes
from ..memory.rates import ASSUMED
from ..pipelines import open_pipeline
from ..pipelines.encoding.pictures import Pictures
from ..pipelines.pipeline import Pipeline
from ..pipelines.planning.forecasts import quietly
from ..pipelines.planning.plans import TYPICAL_PROMPT
from ..pipelines.sampling.inputs import Request
from ..pipelines.stages.encode import encoding_of, text_of
from ..pipelines.stages.sample import Drawing, prepare, sampling_of
from . import charts, full_size, report
from .apart import measure
from .bounds import bound_seconds

BUS_BYTES_PER_SECOND = ASSUMED.pinned_bytes_per_second
RESIDENCIES = tuple(tenths / 10 for tenths in range(11))  # shares of the weights that there is room for beside the ring
RATIOS = (0.25, 0.5, 1.0, 2.0)  # seconds of computing for each second of copying all groups
RAM_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the weights that RAM has room for beside the windows
NEAR = 1.05  # of the bound
RING_GROUPS = 5  # of the largest: the room for the ring


@dataclass(frozen=True)
class Model:
    """A folder that `full_size` makes, how it is opened, and the run that is looked at."""

    folder: str
    run: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


_PICTURE = {"width": 1024, "height": 1024}
MODELS = {
    "FLUX.1-dev": Model("flux", _PICTURE),
    "HiDream-I1 Dev": Model("hidream", _PICTURE, {"variant": "dev"}),
    "HiDream-I1 Full": Model("hidream", _PICTURE, {"variant": "full"}),
    "NewBie-image-Exp0.1": Model("newbie", _PICTURE),
    "Qwen-Image": Model("qwenimage", {"width": 1328, "height": 1328, "guidance": 4.0}),
    "Wan 2.2 14B": Model("wan", {"width": 832, "height": 480, "frames": 81, "guidance": 5.0}),  # one of its two
    "Pyramid-Flow miniFlux": Model("pyramid", {"width": 640, "height": 384, "frames": 121}),
}

_BUILDERS = {"newbie": full_size.build_newbie, "pyramid": full_size.build_pyramid}
_SECONDS = 600  # for the dry run of one model


@dataclass(frozen=True)
class Row:
    """A steady step of a model with room for a share of its weights. Seconds are those of one call of the transformer.

    `ram_share` is how much of the weights RAM has room for; what is neither there nor on the device comes from disk.
    No schedule of these groups in this room is faster than `bound_seconds`: see `bounds`.
    """

    model: str
    residency: float
    compute_over_transfer: float
    ram_share: float
    step_seconds: float
    bound_seconds: float
    over_bound: float


def run(
    out: Path,
    names: Sequence[str] = tuple(MODELS),
    residencies: Sequence[float] = RESIDENCIES,
    ratios: Sequence[float] = RATIOS,
) -> int:
    """Write stream.json and stream.png anew after each model, print the worst of each. Returns 0.

    Raises ValueError for a model that is not known, and RuntimeError for one that cannot be opened.
    """
    if unknown := set(names) - set(MODELS):
        raise ValueError(f"--models has {', '.join(sorted(unknown))}. Known are {', '.join(MODELS)}.")
    found: dict[str, Any] = {"bus_bytes_per_second": BUS_BYTES_PER_SECOND, "ring_groups": RING_GROUPS, "models": []}
    found["disk_bytes_per_second"] = ASSUMED.disk_bytes_per_second
    found["rows"] = []
    for name in names:
        loads = find_loads(MODELS[name])
        found["models"].append(facts(name, loads))
        rows = [asdict(row) for row in solve(name, loads, residencies, ratios)]
        found["rows"] += rows
        worst = {f"{ratio:g}": max(_over(rows, ratio)) for ratio in ratios}
        report.say(f"{name}: T/bound at most {', '.join(f'{over:.2f} at C/T {at}' for at, over in worst.items())}")
        report.say(f"    {summary(rows)}")
        wrote = report.write_as("stream", found, charts.published(found), out)
    report.say(f"\n{report.table({key: key for key in Row.__dataclass_fields__}, found['rows'])}\n\n{wrote}")
    return 0


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Tell in a line how near the steps come to their bounds."""
    over = [row["over_bound"] for row in rows]
    mean, worst, far = sum(over) / len(over), max(over), sum(each > NEAR for each in over)
    return f"{mean:.3f} in the mean, {worst:.2f} at most; {far} of {len(over)} rows above {NEAR:g}"


def _over(rows: Sequence[dict[str, Any]], ratio: float) -> list[float]:
    return [row["over_bound"] for row in rows if row["compute_over_transfer"] == ratio]


def find_loads(model: Model) -> Loads:
    """Return the groups of a model's transformer and what they compute, by a dry run in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"XDG_CACHE_HOME": scratch}
        found = measure("published", asdict(model), Path(scratch), _SECONDS, environment)
    if "error" in found:
        raise RuntimeError(f"{model.folder} cannot be opened in its published size: {found['error']}")
    groups = tuple(GroupLoad(*group) for group in found["groups"])
    return Loads(groups, BUS_BYTES_PER_SECOND, found["before_seconds"])


def main(argv: Sequence[str]) -> None:
    """Write the loads of the model that a request (JSON) describes to a file, in the process that is made for it."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    torch.set_num_threads(2)
    name, scratch = request["folder"], answer.parent  # the folder holds configs and headers, and no weights
    build = _BUILDERS.get(name) or functools.partial(full_size.build, name)
    pipe = open_pipeline(build(scratch / name), device="cpu", cache_dir=scratch / "cache", **request["options"])
    loads = loads_of(pipe, request["run"])
    groups = [[group.packed_bytes, group.held_bytes, group.seconds] for group in loads.groups]
    answer.write_text(json.dumps({"groups": groups, "before_seconds": loads.before_seconds}), "utf-8")


def loads_of(pipe: Pipeline, run: dict[str, Any]) -> Loads:
    """Return the groups of an open pipeline's transformer, and the work of one call on the assumed card."""
    model = pipe.model
    size = run.get("width"), run.get("height"), model.default_steps
    request = Request(*size, run.get("guidance"), run.get("frames"))
    job = prepare(model, pipe.runner, None, 1, Pictures(), request, Drawing())
    sampling = sampling_of(model, {**job.arguments, "generator": None, "latents": None})
    with quietly():
        _, cond = encoding_of(model, text_of(model, TYPICAL_PROMPT, None, {})).dry_run()
        forecast, _ = sampling.dry_run(cond)
    unit = pipe.denoisers[0]
    unit.learn(forecast.units[unit.name].call_order)
    return sizes_of(unit).loads(forecast.units[unit.name], ASSUMED)


def facts(name: str, loads: Loads) -> dict[str, Any]:
    """Return what a model is made of, and how much it computes on the assumed card for each second of copying."""
    packed = [group.packed_bytes for group in loads.groups]
    ratio = _compute(loads) * loads.bytes_per_second / sum(packed)
    return {
        "model": name,
        "groups": len(packed),
        "weight_bytes": sum(group.held_bytes for group in loads.groups),
        "largest_bytes": max(packed),
        "compute_over_transfer": ratio,
    }


def solve(
    name: str,
    loads: Loads,
    residencies: Sequence[float] = RESIDENCIES,
    ratios: Sequence[float] = RATIOS,
    ram_shares: Sequence[float] = RAM_SHARES,
) -> Iterator[Row]:
    """Yield the rows of a model: what its groups compute is scaled to each ratio, as a whole.

    RAM has room for its share of the weights, and for the windows that reads pass through.
    """
    groups, bus, disk = loads.groups, loads.bytes_per_second, ASSUMED.disk_bytes_per_second
    weight_bytes = sum(group.held_bytes for group in groups)
    ring_bytes = RING_GROUPS * max(group.packed_bytes for group in groups)
    copying = sum(group.packed_bytes for group in groups) / bus
    for ratio, ram_share in itertools.product(ratios, ram_shares):
        times = ratio * copying / _compute(loads)
        scaled = tuple(replace(group, seconds=group.seconds * times) for group in groups)
        ram_bytes = windows_bytes(loads.sizes) + math.ceil(ram_share * weight_bytes) if ram_share < 1 else None
        load = Loads(scaled, bus, loads.before_seconds * times, disk, ram_bytes=ram_bytes)
        for residency in residencies:
            room_bytes = math.ceil(residency * weight_bytes) + ring_bytes
            step = place(load, room_bytes).seconds
            bound = bound_seconds(load, room_bytes)
            yield Row(name, residency, ratio, ram_share, step, bound, step / bound)


def _compute(loads: Loads) -> float:
    """Seconds that one call computes."""
    return loads.before_seconds + sum(group.seconds for group in loads.groups)
