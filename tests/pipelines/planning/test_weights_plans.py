"""What weights in fewer bits take and gain at the published sizes: what docs/models.md says of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ballast
import pytest
from ballast.bench.downloads import full_size
from ballast.memory.planning.runplan import seconds
from ballast.memory.rates import ASSUMED
from ballast.memory.sizes import format_bytes
from gguf import GGMLQuantizationType as Type
from places import ROOT
from selection import few
from sparse_gguf import quantized

Folders = Callable[[str], Path]
pytestmark = pytest.mark.long

SIZE: dict[str, Any] = {"width": 1024, "height": 1024}
FORMATS = {
    "plain, bfloat16": "auto",
    "exact12": "exact12",
    "fp8": "fp8",
    "int8": "int8",
    "GGUF Q8_0": "",
    "GGUF Q4_K": "",
}
KINDS = {"GGUF Q8_0": Type.Q8_0, "GGUF Q4_K": Type.Q4_K}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("full")

    @functools.cache
    def folder(name: str) -> Path:
        built = full_size.build("flux" if name in KINDS else name, root / name)
        if name in KINDS:
            quantized(built / "transformer", KINDS[name])
        return built

    return folder


@pytest.mark.parametrize("name", few(FORMATS, "exact12", "GGUF Q4_K"))
def test_docs_tell_what_the_planner_says(name: str, folders: Folders, tmp_path: Path) -> None:
    docs = (ROOT / "docs" / "models.md").read_text("utf-8")
    rates = replace(ASSUMED, pinned_bytes_per_second=12e9)
    folder, weights = folders(name if name in KINDS else "flux"), FORMATS[name]
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=tmp_path, weights=weights or "auto")
    plan = pipe.plan(**SIZE, vram="6GB", ram="64GB", rates=rates).sampling
    assert plan.fits and plan.step_seconds <= 1.05 * plan.bound_seconds
    row = (
        f"| {name} | {format_bytes(plan.ram_bytes)} | {format_bytes(round(plan.transfer_seconds * 12e9))} | "
        f"{seconds(plan.transfer_seconds)} | {seconds(plan.step_seconds)} |"
    )
    assert row in docs, row


@pytest.mark.soak
def test_hidream_in_twelve_bits_takes_a_quarter_less_ram(folders: Folders, tmp_path: Path) -> None:
    def plan(weights: str, ram: str) -> Any:
        pipe = ballast.open_pipeline(
            folders("hidream"), device="cpu", cache_dir=tmp_path, weights=weights, variant="dev"
        )
        return pipe.plan(**SIZE, vram="8GB", ram=ram, rates=ASSUMED).sampling

    plain, twelve = plan("auto", "64GB"), plan("exact12", "64GB")
    assert 31.8 < plain.ram_bytes / 2**30 < 32
    assert twelve.ram_bytes / 2**30 <= 24.2 and twelve.fits
    short = plan("exact12", "20GB")
    assert short.fits and short.from_disk and "do not fit 20.0 GB of RAM" in short.reason
