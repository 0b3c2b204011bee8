"""Plans of runs that take pictures: what sees them is a stage, their tokens count, and peaks are those measured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.bench.downloads import full_size
from ballast.memory import manager
from ballast.memory.rates import ASSUMED
from ballast.pipelines.planning import forecast_cache
from ballast.pipelines.planning.sampling_forecasts import Sampling
from ballast.pipelines.planning.vae_forecasts import VaeForecasts
from pictured import pipelines as tiny_pictured
from pictured.clocked import klein_step_seconds
from pictured.pictures import mask, picture
from selection import few

Folders = Callable[[str], Path]
ONE = picture(96, 64)
RUNS: dict[str, dict[str, Any]] = {
    "flux": {"image": ONE, "mask": mask(96, 64), "strength": 0.6},
    "kontext": {"_auto_resize": False},
    "wan_i2v": {"image": ONE, "frames": 9},
    "ltx": {"image": ONE, "frames": 17},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    return tiny_pictured.folders_in(tmp_path_factory.mktemp("pictured"), tiny_folders)


@pytest.fixture(autouse=True)
def _without_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget of which needs a dry run; see test_decode."""
    monkeypatch.setattr(VaeForecasts, "stripes", lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize("name", few(RUNS, "kontext", "ltx"))
def test_predicted_peaks_are_what_is_measured(name: str, folders: Folders, sim: ModuleType) -> None:
    """Of each stage: never below, at most 5 % above; resident and streamed; the same latents."""
    pipe = ballast.open_pipeline(folders(name), device="sim")
    cond = pipe.encode("a boat", images=ONE if name == "kontext" else None)
    run: dict[str, Any] = {"width": 96, "height": 64, "steps": 4, **RUNS[name]}
    made = []
    for strategy in ("resident", "streamed"):
        least = pipe.plan(vram=1, strategy="streamed", cond=cond, **run).sampling.peak_vram_bytes
        seen = pipe.plan(vram="1GB", cond=cond, **run)
        budget = least if strategy == "streamed" else seen.peak_vram_bytes
        budget = max(budget, *(stage.peak_vram_bytes for stage in seen.stages if stage.name == "encode picture"))
        plan = pipe.plan(vram=budget, cond=cond, **run)
        pipe.runner = pipe.runner.set(vram_bytes=budget)
        before = len(manager("sim").timeline.stages)
        made.append(pipe.sample(cond, **run, on_step=lambda step, steps, latents: None))
        pipe.runner = pipe.runner.set(vram_bytes=None)
        records = list(manager("sim").timeline.stages)[before:]
        planned = [stage for stage in plan.stages if stage.name != "decode"]
        assert [record.name for record in records] == [stage.name for stage in planned]
        assert records[0].name == "encode picture"
        for record, stage in zip(records, planned, strict=True):
            assert record.peak_bytes <= stage.peak_vram_bytes <= 1.05 * record.peak_bytes, (strategy, stage.name)
    assert torch.equal(*made)


@pytest.mark.soak
def test_a_kept_transformer_counts_while_the_picture_is_made_ready(tiny_folders: Folders, sim: ModuleType) -> None:
    """It is there before the first call of the second run, whole or as far as the budget leaves it room."""
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim", keep=True)
    cond, stages, planned = pipe.encode("a boat"), manager("sim").timeline.stages, []
    run: dict[str, Any] = {"image": picture(640, 384), "strength": 1.0, "steps": 1}
    for vram in (None, None, "1GB", 4_000_000):
        pipe = pipe.within(vram=vram, keep=True)
        pipe.sample(cond, **run)
        assert stages[-1].name == "sample" and stages[-1].planned
        assert stages[-1].planned.peak_vram_bytes == stages[-1].own_peak_bytes
        planned.append(stages[-1].own_peak_bytes)
    first, kept, stated, least = planned
    assert first < least < kept == stated, planned


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen_edit", marks=pytest.mark.long), pytest.param("hunyuan_video_i2v", marks=pytest.mark.soak)],
)
def test_what_an_encoder_sees_is_planned(name: str, folders: Folders, sim: ModuleType) -> None:
    """Before anything is encoded: the picture's tokens in the encoder, and in all that follows, as they are run."""
    run: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "frames": 9 if "video" in name else None}
    with tiny_pictured.without_videos():
        pipe = ballast.open_pipeline(folders(name), device="sim", vram="1GB")
        plan = pipe.plan(prompt="a boat", negative_prompt="grey", images=ONE, **run)
        before = len(manager("sim").timeline.stages)
        pipe.decode(pipe.sample(pipe.encode("a boat", "grey", images=ONE), **run))
    records = list(manager("sim").timeline.stages)[before:]
    assert [record.name for record in records] == [stage.name for stage in plan.stages]
    for record, stage in zip(records, plan.stages, strict=True):
        assert record.peak_bytes <= stage.peak_vram_bytes <= 1.05 * record.peak_bytes, stage.name


def test_references_count(folders: Folders) -> None:
    """Each is as many tokens as a picture of its size; the encoder is planned with those that it reads."""
    pipe = ballast.open_pipeline(folders("kontext"), device="cpu")
    run: dict[str, Any] = {"width": 96, "height": 64, "steps": 4, "vram": "1GB", "_auto_resize": False}
    plain, small, large = (pipe.plan(**run, **given) for given in ({}, {"images": ONE}, {"images": picture(192, 128)}))
    names = ["encode", "encode picture", "sample", "decode"]
    assert [stage.name for stage in small.stages] == names
    assert [stage.name for stage in plain.stages] == ["encode", "sample", "decode"]
    assert plain.sampling.peak_vram_bytes < small.sampling.peak_vram_bytes < large.sampling.peak_vram_bytes
    assert plain.step_seconds < small.step_seconds < large.step_seconds
    assert "encode picture" in str(small)


def test_a_second_budget_repeats_no_dry_run_of_sampling(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told what a dry run of its own would tell."""
    runs: list[Sampling] = []
    dry_run = Sampling.dry_run

    def counted(self: Sampling, *args: Any) -> Any:
        runs.append(self)
        return dry_run(self, *args)

    monkeypatch.setattr(Sampling, "dry_run", counted)
    monkeypatch.setattr(forecast_cache, "_ram", OrderedDict())
    run: dict[str, Any] = {"width": 96, "height": 64, "steps": 4, "_auto_resize": False, "rates": ASSUMED}
    pipe = ballast.open_pipeline(folders("kontext"), device="cpu", cache_dir=tmp_path / "kept")
    known = [pipe.plan(**run, images=ONE, vram=vram) for vram in ("1GB", "8MB")]
    assert len(runs) == 1 and known[0].sampling != known[1].sampling
    monkeypatch.setattr(forecast_cache, "_ram", OrderedDict())
    fresh = ballast.open_pipeline(folders("kontext"), device="cpu", cache_dir=tmp_path / "fresh")
    assert fresh.plan(**run, images=ONE, vram="8MB").sampling == known[1].sampling and len(runs) == 2


@pytest.mark.soak
def test_two_references_at_full_size(tmp_path: Path) -> None:
    """FLUX.2 Klein 4B, each of one megapixel: their tokens count, in seconds and on the card.

    Resident, and with a third of the weights streamed; the clock is that of diffusers' own call on a simulated card.
    """
    folder = full_size.build("flux2_klein", tmp_path / "klein")
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=tmp_path / "cache")
    run: dict[str, Any] = {"width": 1024, "height": 1024, "steps": 4, "guidance": 1.0, "rates": ASSUMED}
    peaks = []
    for references in range(3):
        given = {"images": [picture(1024, 1024)] * references} if references else {}
        for placement, vram in (("resident", "40GB"), ("streamed", "6GB")):
            plan = pipe.plan(prompt="a boat", vram=vram, ram="64GB", **run, **given)
            clock = klein_step_seconds(references, ASSUMED, streamed=placement == "streamed")
            assert plan.sampling.placement == placement
            assert plan.step_seconds == pytest.approx(clock, rel=0.05), (references, placement)
            peaks += [plan.sampling.peak_vram_bytes] * (placement == "resident")
    assert peaks == sorted(set(peaks))
