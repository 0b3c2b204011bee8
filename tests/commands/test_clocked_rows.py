"""Figures of published models against diffusers' own call at full size, on shapes and on the clock of a simulated card.

All weights lie on that card. A PC that is bound by arithmetic is as fast.
"""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from ballast.bench.downloads import full_size
from ballast.commands.planned_models import COMPUTERS, load_models, load_rows
from ballast.memory.files import read_json
from ballast.memory.rates import ASSUMED
from ballast.pipelines.files.single.published import FACTS
from pictured.clocked import step_seconds
from selection import few

MODELS = {model.name: model for model in load_models()}
NEAR = 0.02
DTYPE = torch.bfloat16
# The pipeline, its transformer, and the shapes of what encoders give, of both prompts where a step is guided.
CASES: dict[str, tuple[type, type, dict[str, tuple[int, ...]]]] = {
    "FLUX.1 schnell": (
        diffusers.FluxPipeline,
        diffusers.FluxTransformer2DModel,
        {"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)},
    ),
    "Stable Diffusion 3.5 Medium": (
        diffusers.StableDiffusion3Pipeline,
        diffusers.SD3Transformer2DModel,
        {
            "prompt_embeds": (1, 333, 4096),
            "negative_prompt_embeds": (1, 333, 4096),
            "pooled_prompt_embeds": (1, 2048),
            "negative_pooled_prompt_embeds": (1, 2048),
        },
    ),
    "Wan 2.1 text 1.3B": (
        diffusers.WanPipeline,
        diffusers.WanTransformer3DModel,
        {"prompt_embeds": (1, 512, 4096), "negative_prompt_embeds": (1, 512, 4096)},
    ),
}


@pytest.mark.parametrize("name", few(CASES, "Wan 2.1 text 1.3B"))
def test_a_step_takes_as_long_as_in_diffusers(name: str) -> None:
    stock, kind, texts = CASES[name]
    model, folder = MODELS[name], FACTS / "models" / MODELS[name].facts
    config = {**read_json(folder / "transformer" / "config.json"), **model.transformer}
    transformer = full_size.empty(kind, {key: value for key, value in config.items() if not key.startswith("_")})
    scheduler: Any = getattr(diffusers, read_json(folder / "model_index.json")["scheduler"][1])
    parts = {"scheduler": scheduler.from_pretrained(folder / "scheduler"), "transformer": transformer.to(DTYPE)}
    names = {"frames": "num_frames", "guidance": "guidance_scale"}
    given = {names.get(key, key): value for key, value in model.run.items() if key != "steps"}
    given |= {key: torch.zeros(shape, dtype=DTYPE) for key, shape in texts.items()}
    figures = load_rows()[name]["bf16"].figures[COMPUTERS[-1].key]
    assert step_seconds(stock, parts, ASSUMED, given) == pytest.approx(figures.step, rel=NEAR)
