"""What is planned is what lies there: the layout in a plan, and the one that the engine made true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from ballast.memory import manager
from selection import few

Folders = Callable[[str], Path]


SHARES = {"auto": (0.0, 0.4, 1.0), "streamed": (0.4,), "leafwise": (0.0,), "resident": (1.0,)}


@pytest.mark.parametrize("name", few(tiny.FAMILIES, "flux"))
def test_planned_layout_is_the_one_in_force(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    sim.enable(total="1GB", h2d_gbps=0.02, tflops=1e-3)
    family = tiny.FAMILIES[name]
    pipe, encode, _, _ = tiny.stages(name, tiny_folders(name), "sim")
    cond = encode()
    size: dict[str, Any] = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "steps": 2}
    run = {**size, **family.call_kwargs}
    least = pipe.plan(cond=cond, **run, vram=1).sampling.peak_vram_bytes
    most = pipe.plan(cond=cond, **run).sampling.peak_vram_bytes
    layouts, results = set(), []
    for strategy in ("auto", "streamed", "leafwise", "resident"):
        for share in SHARES[strategy]:
            vram = int(least + share * (most - least)) + 1000
            seen: list[Any] = []

            def look(*_: Any, seen: list[Any] = seen) -> None:
                seen.append([unit.placement and unit.placement.layout for unit in pipe.denoisers])

            results.append(pipe.within(vram=vram).sample(cond, **run, strategy=strategy, on_step=look))
            planned = manager("sim").timeline.stages[-1].planned
            assert planned is not None and len(seen) == 2
            for plan, layout in zip(planned.units, seen[-1], strict=True):
                if layout is not None:  # of units that take turns the others have left
                    assert layout == plan.layout, (strategy, share)
                    layouts.add(layout)
            assert any(seen[-1])
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(layouts) >= 3
