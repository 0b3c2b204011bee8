"""What an opening imports is not gone through by the garbage collector, which runs again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ballast.collector import paused_collector
from ballast.pipelines import opening


def test_the_collector_waits_for_an_opening(
    tiny_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = []

    class Watched(opening.GenericPipeline):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            collecting.append(gc.isenabled())
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(opening, "GenericPipeline", Watched)
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
