"""What an opening imports is not gone through by the garbage collector, which runs again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from ballast.collector import paused_collector
from ballast.pipelines import opening
from ballast.pipelines.models.claims import Claims
from ballast.pipelines.models.diffusers.diffusers_model import DiffusersModel, open_diffusers


def test_the_collector_waits_for_an_opening(
    tiny_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = []

    def watched(folder: Path, dtype: str, claims: Claims) -> DiffusersModel:
        collecting.append(gc.isenabled())
        return open_diffusers(folder, dtype, claims)

    monkeypatch.setattr(opening, "open_diffusers", watched)
    opening.open_pipeline(tiny_folders("flux"), device="cpu")
    assert collecting == [False] and gc.isenabled()
    with pytest.raises(FileNotFoundError):
        opening.open_pipeline(tiny_folders("flux") / "nowhere", device="cpu")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector(), paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
