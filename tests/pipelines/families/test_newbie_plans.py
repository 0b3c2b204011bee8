"""NewBie at the published sizes, by a dry run: what docs/models.md promises for cards of 4 to 24 GB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ballast
import pytest
import thumbnails
from ballast.bench.downloads import full_size
from ballast.memory.planning.runplan import seconds
from ballast.memory.rates import ASSUMED
from ballast.memory.sizes import format_bytes
from places import ROOT
from selection import few

GIB = 2**30
PUBLISHED = {"transformer": 3.487e9, "text_encoder": 3.880e9, "text_encoder_2": 0.558e9, "vae": 0.0838e9}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Plans at 1024 x 1024 with guidance, with 64 GB of RAM, at assumed rates."""
    root = tmp_path_factory.mktemp("full")
    folder = full_size.build_newbie(root / "NewBie-image-Exp0.1")
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=root / "cache")

    def plan(gigabytes: int, **more: Any) -> Any:
        return pipe.plan(width=1024, height=1024, vram=f"{gigabytes}GB", ram="64GB", rates=ASSUMED, **more)

    plan.pipe = pipe  # type: ignore[attr-defined]
    return plan


def test_sizes_are_the_published_ones(planned: Callable[..., Any]) -> None:
    pipe = planned.pipe  # type: ignore[attr-defined]
    units = (*pipe.encoders, *pipe.denoisers, pipe.decoder)
    found = {unit.name: sum(p.numel() for p in unit.module.parameters()) for unit in units}
    assert found == {name: pytest.approx(count, rel=1e-3) for name, count in PUBLISHED.items()}


@pytest.mark.long
def test_whole_run_with_the_transformer_resident_in_8_gb(planned: Callable[..., Any]) -> None:
    plan = planned(8)
    assert plan.fits and plan.peak_vram_bytes <= 8 * GIB
    assert plan.placement == "resident"
    assert max(stage.peak_vram_bytes for stage in plan.stages) == plan.peak_vram_bytes


def test_whole_run_streamed_in_4_gb(planned: Callable[..., Any]) -> None:
    plan = planned(4)
    assert plan.fits and plan.peak_vram_bytes <= 4 * GIB
    assert plan.placement == "streamed"


@pytest.mark.long
@pytest.mark.parametrize("batch", few([2, 4], 4))
def test_batches_are_planned(batch: int, planned: Callable[..., Any]) -> None:
    plan = planned(8, prompt=["a boat"] * batch)
    assert plan.fits and plan.peak_vram_bytes <= 8 * GIB


def test_docs_tell_what_the_planner_says(planned: Callable[..., Any]) -> None:
    models = (ROOT / "docs" / "models.md").read_text("utf-8")
    plans = [planned(gigabytes) for gigabytes in (4, 6, 8, 12, 16, 24)]
    cells = [f"{format_bytes(plan.peak_vram_bytes)}, {seconds(plan.step_seconds)}" for plan in plans]
    row = f"| NewBie-image-Exp0.1 | 28, 4.5 | 6.49 GB | {' | '.join(cells)} |"
    assert row in models, row
    assert all(plan.fits for plan in plans)


def test_the_thumbnail_shows_what_the_planner_says(planned: Callable[..., Any]) -> None:
    thumbnails.check("3 NewBie picture", [planned(4), planned(8)])
