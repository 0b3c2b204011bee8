"""Ways to draw: modules computed once, passes in lockstep, cached steps, compiled blocks, in the least VRAM.

The transformers have published widths, a few of their layers, and random weights. Prompts are random embeddings. Each
way stands beside its plan, and beside the bits of the resident run.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..pipelines import open_pipeline
from ..pipelines.encoding.conditioning import Conditioning
from . import newbie
from .downloads import published_folders
from .harness import Run
from .measure import Meter

STEPS = 10
_SECONDS = 4  # of a way, about; a compiled one takes longer
_WAYS: dict[str, dict[str, Any]] = {
    "resident": {"strategy": "resident"},
    "least VRAM": {},
    "once": {"once": True},
    "lockstep": {"lockstep": True},
    "once, lockstep": {"once": True, "lockstep": True},
    "static:2": {"cache": "static:2"},
    "compiled": {"compile": True},
}
# Of each model: sizes of its transformer, those of a dry run, embeddings of a prompt, and what the call takes.
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "FLUX.1-dev": (
        {"num_layers": 3, "num_single_layers": 6},
        {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "axes_dims_rope": (4, 4, 8)},
        {"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)},
        {"guidance": 3.5},
    ),
    "Qwen-Image": (
        {"num_layers": 5},
        {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (8, 4, 4)},
        {"prompt_embeds": (1, 128, 3584), "negative_prompt_embeds": (1, 20, 3584)},
        {"guidance": 4.0},
    ),
}  # fmt: skip


def measure(to: Run) -> None:
    """Add a row for each model and way. A way that cannot run says why."""
    meter, side = to.meter(), to.request.get("side", 512)
    to.tell(side=side, steps=STEPS)
    for name, (layers, small, embeddings, run) in _MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = published_folders.build(name, Path(scratch) / name, small if to.dry else layers)
            newbie.draw(folder / "transformer")
            opening = published_folders.opening(name, folder)
            pipe = open_pipeline(**opening, device=meter.device, cache_dir=Path(scratch) / "cache")
            random = torch.Generator().manual_seed(0)
            cond = Conditioning({key: torch.randn(size, generator=random) for key, size in embeddings.items()})
            given, truth = {"width": side, "height": side, "steps": STEPS, **run}, None
            for way, more in _WAYS.items():
                if way.endswith("lockstep") and "negative_prompt_embeds" not in embeddings:
                    continue  # there is one pass
                arguments = {"strategy": "leafwise", **given, **more}
                found = to.attempt(f"{name}, {way}", _SECONDS, _row, meter, pipe, cond, arguments, truth)
                if found:
                    row, latents = found
                    truth = latents if truth is None else truth
                    to.row(model=name, way=way, **row)


def _row(
    meter: Meter, pipe: Any, cond: Conditioning, arguments: dict[str, Any], truth: torch.Tensor | None
) -> tuple[dict[str, Any], torch.Tensor]:
    """Draw, and return the figures of the way with its latents."""
    manager = pipe.manager
    manager.free()
    manager.timeline.clear()
    plan = None if arguments.get("compile") else pipe.plan(cond=cond, **arguments)
    torch._dynamo.reset()
    brought, marks = manager.device_bytes_in, [meter.mark()]
    latents = pipe.sample(cond, **arguments, on_step=lambda *_: marks.append(meter.mark()))
    meter.accelerator.synchronize()
    first, *steps = (meter.seconds(*pair) for pair in itertools.pairwise(marks))
    peak_bytes = max(record.peak_bytes for record in manager.timeline.stages)
    planned = plan and max(stage.peak_vram_bytes for stage in plan.stages if stage.name != "decode")
    figures = {
        "first_step": first, "step": statistics.fmean(steps), "planned_step": plan and plan.step_seconds,
        "peak_bytes": peak_bytes, "planned_bytes": planned, "over_planned": peak_bytes / planned if planned else None,
        "copied_bytes": manager.device_bytes_in - brought, "is_equal": truth is None or torch.equal(latents, truth),
    }  # fmt: skip
    return figures, latents
