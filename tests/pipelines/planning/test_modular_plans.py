"""The newest models at their published sizes, without weights: they open, and plans keep every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ballast
import pytest
from ballast.memory.rates import ASSUMED
from modular import full_size_modular, newest
from modular.full_size_modular import MODELS
from pictured import pipelines as pictured
from selection import few

GB = 2**30
BUDGETS = 8, 16, 24  # GB
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
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
