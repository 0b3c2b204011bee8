"""The newest models at their published sizes, without weights: they open, and plans keep every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ballast
import pytest
from ballast.memory.rates import ASSUMED
from ballast.pipelines.encoding.pictures import Frames, as_stock
from modular import full_size_modular, newest
from modular.full_size_modular import MODELS
from modular.own_calls import calls_of_transformer
from pictured import pipelines as pictured
from selection import few

GB = 2**30
BUDGETS = 8, 16, 24  # GB
STEPS = 4
# What the blocks of the models that are run by their own call name its arguments otherwise.
OWN_WORDS: dict[str, dict[str, str]] = {
    "FLUX.3": {},
    "Anima": {},
    "MiniMax-H3": {"frames": "num_frames"},
    "LTX-2.5": {"frames": "num_frames"},
    "Wan-Animate 2": {"frames": "segment_frame_length", "video": "driving_video"},
}
PICTURES = {"image": tuple, "driving_video": Frames}  # by their words
# Billions of parameters of the transformer.
BILLIONS = {"FLUX.3": 5.54, "Anima": 1.96, "MiniMax-H3": 33.14, "Wan-Animate 2": 16.59, "LTX-2.5": 18.88}


@pytest.mark.long
@pytest.mark.parametrize("name", few(MODELS, "Anima"))
def test_plans_keep_every_budget_and_more_is_never_slower(name: str, tmp_path: Path) -> None:
    folder = full_size_modular.build(name, tmp_path / "model")
    with pictured.without_videos(), newest.resizing():
        pipe: Any = ballast.open_pipeline(folder, device="cpu", cache_dir=tmp_path / "cache")
        plans = [
            pipe.plan(prompt="a boat", vram=budget * GB, ram="256GB", steps=8, rates=ASSUMED, **MODELS[name].run)
            for budget in BUDGETS
        ]
    transformer = next(unit for unit in pipe.denoisers if unit.name == "transformer")
    assert transformer.size_bytes / 2e9 == pytest.approx(BILLIONS[name], rel=0.01)
    for budget, plan in zip(BUDGETS, plans, strict=True):
        assert plan.fits, plan
        assert max(stage.peak_vram_bytes for stage in plan.stages) <= budget * GB
    seconds = [round(plan.step_seconds, 9) for plan in plans]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("name", few(OWN_WORDS, "Anima", "FLUX.3"))
def test_a_step_takes_what_its_own_call_takes(name: str, tmp_path: Path) -> None:
    """The planned peak and seconds are those of diffusers' call on the clock of a simulated card, all weights there."""
    folder, run = full_size_modular.build(name, tmp_path / "model"), MODELS[name].run
    with pictured.without_videos(), newest.resizing():
        pipe: Any = ballast.open_pipeline(folder, device="cpu", cache_dir=tmp_path / "cache")
        plan = pipe.plan(prompt="a boat", vram=200 * GB, ram="256GB", steps=STEPS, rates=ASSUMED, **run)
        given = {OWN_WORDS[name].get(key, key): value for key, value in run.items()}
        given |= as_stock({word: kind(given[word]) for word, kind in PICTURES.items() if word in given})
        given |= {"prompt": "a boat", "num_inference_steps": STEPS}
        calls = calls_of_transformer(folder, pipe.model, ASSUMED, given)
    assert len(calls) >= STEPS - 1, "MiniMax-H3 counts the levels of noise, one more than its calls"
    assert plan.sampling.placement == "resident"
    planned = plan.sampling.peak_vram_bytes - plan.sampling.weights_bytes
    assert 0.95 * planned <= max(call.peak_bytes for call in calls) <= planned
    assert plan.step_seconds == pytest.approx((calls[-1].ended - calls[0].began) / STEPS, rel=0.01)
