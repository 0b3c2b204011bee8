"""`ballast bench stream`, the part without a card: transformers of the published sizes against the bound, on paper.

Dry runs of the pipelines, opened from configs alone, tell what each group weighs and computes; the solver, which runs
go by too, tells how long a step takes. No device, no weights.
"""

from __future__ import annotations

import itertools
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
from . import report
from .bounds import bound_seconds
from .downloads import full_size
from .harness import Run, apart
from .stream import RING_GROUPS

BUS_BYTES_PER_SECOND = ASSUMED.pinned_bytes_per_second
RESIDENCIES = tuple(tenths / 10 for tenths in range(11))  # shares of the weights that there is room for beside the ring
RATIOS = (0.25, 0.5, 1.0, 2.0)  # seconds of computing for each second of copying all groups
RAM_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the weights that RAM has room for beside the windows
NEAR = 1.05  # of the bound


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

_SECONDS = 600  # for the dry run of one model


def measure(to: Run) -> None:
    """Add the rows of each model, and print the worst of it.

    Seconds are those of one call of the transformer. `ram_share` is how much of the weights RAM has room for; what is
    neither there nor on the device comes from disk. Raises ValueError for a model that is not known, and RuntimeError
    for one that cannot be opened.
    """
    names, ratios = to.request["models"], to.request.get("ratios", RATIOS)
    if unknown := set(names) - set(MODELS):
        raise ValueError(f"--models has {', '.join(sorted(unknown))}. Known are {', '.join(MODELS)}.")
    to.tell(bus_bytes_per_second=BUS_BYTES_PER_SECOND, ring_groups=RING_GROUPS, models=[])
    to.tell(disk_bytes_per_second=ASSUMED.disk_bytes_per_second)
    for name in names:
        loads = find_loads(MODELS[name])
        to.facts["models"].append(facts(name, loads))
        rows = list(
            solve(
                name, loads, to.request.get("residencies", RESIDENCIES), ratios,
                to.request.get("ram_shares", RAM_SHARES),
            )
        )  # fmt: skip
        to.add(rows)
        over = [row["over_bound"] for row in rows]
        worst = (
            f"{max(row['over_bound'] for row in rows if row['compute_over_transfer'] == ratio):.2f} at C/T {ratio:g}"
            for ratio in ratios
        )
        report.say(f"{name}: T/bound at most {', '.join(worst)}")
        far = sum(each > NEAR for each in over)
        report.say(
            f"    {sum(over) / len(over):.3f} in the mean, {max(over):.2f} at most; "
            f"{far} of {len(over)} rows above {NEAR:g}"
        )


def find_loads(model: Model) -> Loads:
    """Return the groups of a model's transformer and what they compute, by a dry run in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"XDG_CACHE_HOME": scratch}
        found = apart("published.work", asdict(model), Path(scratch), _SECONDS, environment)
    if "error" in found:
        raise RuntimeError(f"{model.folder} cannot be opened in its published size: {found['error']}")
    (row,) = found["rows"]
    return Loads(tuple(GroupLoad(*group) for group in row["groups"]), BUS_BYTES_PER_SECOND, row["before_seconds"])


def work(to: Run) -> None:
    """Add one row: the loads of the model that is asked for, in the process that is made for it."""
    torch.set_num_threads(2)
    name, scratch = to.request["folder"], Path.cwd()  # the folder holds configs and headers, and no weights
    pipe = open_pipeline(
        full_size.build(name, scratch / name), device="cpu", cache_dir=scratch / "cache", **to.request["options"]
    )
    loads = loads_of(pipe, to.request["run"])
    groups = [[group.packed_bytes, group.held_bytes, group.seconds] for group in loads.groups]
    to.row(groups=groups, before_seconds=loads.before_seconds)


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
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model: what its groups compute is scaled to each ratio, as a whole.

    RAM has room for its share of the weights, and for the windows that reads pass through. No schedule of these groups
    in this room is faster than `bound_seconds`: see `bounds`.
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
            yield {
                "model": name, "residency": residency, "compute_over_transfer": ratio, "ram_share": ram_share,
                "step_seconds": step, "bound_seconds": bound, "over_bound": step / bound,
            }  # fmt: skip


def _compute(loads: Loads) -> float:
    """Seconds that one call computes."""
    return loads.before_seconds + sum(group.seconds for group in loads.groups)
