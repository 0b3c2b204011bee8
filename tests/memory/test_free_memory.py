"""Drivers that do not tell how much memory is free, or tell the same whatever is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from ballast import open_pipeline
from ballast.memory.accelerator import Accelerator, _outside

MB = 2**20


def test_what_this_process_has_not_is_free_where_none_is_told(sim: ModuleType) -> None:
    sim.enable(total="64MB", tells_free=False)
    accelerator = Accelerator(torch.device("sim:0"))
    with pytest.raises(RuntimeError, match="available free memory"):
        torch.get_device_module("sim").mem_get_info()
    held = torch.empty(10 * MB, dtype=torch.uint8, device="sim")
    assert (accelerator.free_bytes(), accelerator.total_bytes()) == (54 * MB, 64 * MB)
    assert "64.0 MB" in repr(accelerator)
    del held
    assert accelerator.free_bytes() == 64 * MB


@pytest.mark.parametrize("told", [20, 64])
def test_constant_is_not_believed(told: int, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sim.enable(total="64MB")
    accelerator = Accelerator(torch.device("sim:0"))
    monkeypatch.setattr(torch.get_device_module("sim"), "mem_get_info", lambda device=None: (told * MB, 64 * MB))
    assert accelerator.free_bytes() == told * MB
    held = torch.empty(15 * MB, dtype=torch.uint8, device="sim")
    assert accelerator.free_bytes() == (told - 15) * MB
    del held


def test_share_of_the_process_is_all_that_is_free(sim: ModuleType) -> None:
    sim.enable(total="64MB", reserved="10MB")
    accelerator, backend = Accelerator(torch.device("sim:0")), torch.get_device_module("sim")
    for share, free in ((1.0, 54), (0.5, 32), (0.9, 54)):
        backend.set_per_process_memory_fraction(share)
        assert accelerator.free_bytes() == free * MB
        held = torch.empty(20 * MB, dtype=torch.uint8, device="sim")
        assert accelerator.free_bytes() == (free - 20) * MB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(accelerator.free_bytes() + 1, dtype=torch.uint8, device="sim")
        torch.empty(accelerator.free_bytes(), dtype=torch.uint8, device="sim")
        del held


@pytest.mark.parametrize(
    ("used", "outside"), [(None, 0), (5 * MB, 2 * MB), (3 * MB, 0), (2 * MB, 0), (8 * MB, 5 * MB), (8 * MB + 1, 0)]
)
def test_count_of_another_process_is_not_taken_for_ours(used: int | None, outside: int) -> None:
    """3 MB are the allocator's, and 8 MB are taken on the card."""
    assert _outside(used, 3 * MB, 8 * MB) == outside


def test_pipeline_is_planned_and_runs(sim: ModuleType, tiny_folders: Callable[[str], Path], tmp_path: Path) -> None:
    width, height = tiny.FAMILIES["sd3"].size
    found = []
    for tells in (True, False):
        sim.enable(total="64MB", tells_free=tells)
        pipe = open_pipeline(tiny_folders("sd3"), device="sim", cache_dir=tmp_path / str(tells))
        plan = pipe.plan(width=width, height=height, steps=1)
        latents = pipe.sample(pipe.encode("a fox"), width=width, height=height, steps=1, seed=1)
        found.append((plan.peak_vram_bytes, pipe.decode(latents)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
