"""HiDream-I1 at the published sizes, by a dry run: what docs/models.md promises for cards of 4 to 24 GB."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from typing import Any

import ballast
import pytest
import thumbnails
from ballast.bench.downloads import full_size
from ballast.memory.planning.runplan import seconds
from ballast.memory.rates import ASSUMED
from ballast.memory.sizes import format_bytes
from ballast.memory.weights.structure import block_lists
from ballast.pipelines.models.hidream.variants import VARIANTS
from places import ROOT
from selection import few

GIB = 2**30
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Plans of the published sizes at 1024 x 1024, with 64 GB of RAM, at assumed rates."""
    root = tmp_path_factory.mktemp("full")
    folder = full_size.build("hidream", root / "hidream")

    @functools.cache
    def pipe(variant: str) -> Any:
        return ballast.open_pipeline(folder, device="cpu", cache_dir=root / "cache", variant=variant)

    @functools.cache
    def plan(variant: str, gigabytes: int) -> Any:
        return pipe(variant).plan(width=1024, height=1024, vram=f"{gigabytes}GB", ram="64GB", rates=ASSUMED)

    plan.pipe = pipe  # type: ignore[attr-defined]
    return plan


def test_captions_are_a_list_of_their_own(planned: Callable[..., Any]) -> None:
    """49 projections, which run once a step, stream like the 16 and the 32 blocks after them."""
    module = planned.pipe("full").denoisers[0].module  # type: ignore[attr-defined]
    lists = {name: len(blocks) for name, blocks in block_lists(module)}
    assert lists == {"double_stream_blocks": 16, "single_stream_blocks": 32, "caption_projection": 49}


@pytest.mark.parametrize("variant", few(VARIANTS, "full", "dev"))
def test_docs_tell_what_the_planner_says(variant: str, planned: Callable[..., Any]) -> None:
    models = (ROOT / "docs" / "models.md").read_text("utf-8")
    numbers = VARIANTS[variant]
    plans = [planned(variant, gigabytes) for gigabytes in (4, 6, 8, 12, 16, 24)]
    cells = [f"{format_bytes(plan.peak_vram_bytes)}, {seconds(plan.step_seconds)}" for plan in plans]
    guidance = f"{numbers.guidance:g}" if numbers.guidance > 1 else "none"
    row = f"| HiDream-I1 {variant.title()} | {numbers.steps}, {guidance} | 31.9 GB | {' | '.join(cells)} |"
    assert row in models, row
    assert all(plan.fits for plan in plans)


def test_docs_print_the_table_of_the_planner(planned: Callable[..., Any]) -> None:
    commands = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    for gigabytes in (8, 12, 24):  # the table that `ballast plan` prints
        plan = planned("full", gigabytes)
        assert f"{plan.sampling.label}  {format_bytes(plan.peak_vram_bytes)}" in commands


def test_the_drawing_of_stages_shows_a_plan(planned: Callable[..., Any]) -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"), run_name="drawings")
    shown = [figures for models in drawings["STAGES"].values() for _, *figures, _, _ in models]
    pipe = planned.pipe("fast")  # type: ignore[attr-defined]
    wholes = [unit.size_bytes for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder)]
    plans = [plan for stage in planned("fast", drawings["BUDGET"]).stages for plan in stage.units]
    for (whole, held, peak), nbytes, plan in zip(shown, wholes, plans, strict=True):
        said = (nbytes / GIB, plan.weights_bytes / GIB, plan.peak_vram_bytes / GIB)
        assert said == pytest.approx((whole, held, peak), abs=0.06)


def test_docs_tell_what_too_little_ram_costs(planned: Callable[..., Any]) -> None:
    models, readme = ((ROOT / name).read_text("utf-8") for name in ("docs/models.md", "README.md"))
    for variant in VARIANTS:
        plans = [in_ram(planned.pipe(variant), gigabytes - 5) for gigabytes in (16, 32, 64)]  # type: ignore[attr-defined]
        row = f"| HiDream-I1 {variant.title()} | {' | '.join(seconds(plan.step_seconds) for plan in plans)} |"
        assert row in models, row
        assert row in readme or variant != "dev", row
        assert all(plan.fits for plan in plans)
    for text in (models, readme):
        said = " ".join(text.split())
        assert "of which 5 GB are left to the system, with an SSD of 3 GB/s" in said
    assert ASSUMED.disk_bytes_per_second == 3e9


def in_ram(pipe: Any, gigabytes: int) -> Any:
    """The plan in 8 GB of VRAM, with so much RAM for weights."""
    return pipe.plan(width=1024, height=1024, vram="8GB", ram=f"{gigabytes}GB", rates=ASSUMED)


@pytest.mark.parametrize(("gigabytes", "most"), [(16, 3.6), (20, 2.1), (24, 1.45)])
def test_short_ram_costs_only_what_has_to_be_read(planned: Callable[..., Any], gigabytes: int, most: float) -> None:
    plan = in_ram(planned.pipe("dev"), gigabytes)  # type: ignore[attr-defined]
    assert plan.step_seconds <= most
    assert plan.sampling.ram_bytes <= gigabytes * GIB
    assert plan.step_seconds >= plan.sampling.read_bytes / 3e9


def test_encoders_run_in_4_gb(planned: Callable[..., Any]) -> None:
    """Each whole where it fits, T5 and Llama streamed."""
    encode = planned("full", 4).stages[0]
    assert encode.name == "encode"
    assert all(unit.fits and unit.peak_vram_bytes <= 4 * GIB for unit in encode.units)
    assert {unit.unit: unit.placement for unit in encode.units} == {
        "text_encoder": "resident",
        "text_encoder_2": "resident",
        "text_encoder_3": "streamed",
        "text_encoder_4": "streamed",
    }


def test_encoders_peak_at_llama_where_they_are_whole(planned: Callable[..., Any]) -> None:
    """13 GB, its table of words apart, not the 24 GB of all four; diffusers leaves Llama there and brings T5 too."""
    encode = planned("full", 24).stages[0]
    assert {unit.placement for unit in encode.units} == {"resident"}
    largest = max(unit.weights_bytes for unit in encode.units)
    assert largest == pytest.approx(13.00 * GIB, rel=0.001)
    assert encode.peak_vram_bytes <= 1.01 * largest


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_in_8_gb(variant: str, planned: Callable[..., Any]) -> None:
    """The plan says so, and why, with seconds."""
    plan = planned(variant, 8)
    assert plan.fits and plan.peak_vram_bytes <= 8 * GIB
    assert plan.sampling.placement == "streamed"
    assert plan.steps == VARIANTS[variant].steps
    assert 0 < plan.step_seconds < plan.step_seconds * plan.steps < plan.total_seconds
    said = str(plan)
    assert "31.9 GB of weights do not fit 8.00 GB" in said and "pass through a ring of" in said
    assert " s a step, " in said and f" for {plan.steps}." in said
    assert "an upper bound, for any routing among its experts" in said


def test_the_thumbnail_shows_what_the_planner_says(planned: Callable[..., Any]) -> None:
    thumbnails.check("4 HiDream picture", [planned("fast", 8), planned("fast", 24)])
