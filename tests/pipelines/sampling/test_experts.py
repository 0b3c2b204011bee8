"""Two experts of one model, as Wan 2.2 has them: the first leaves at the boundary in every budget, as plans say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager

STEPS, BOUNDARY = 4, 2  # steps in all, and those of the first one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("experts") / "wan"
    pipe: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(at)
    return at


@pytest.mark.long
def test_the_first_is_gone_after_the_boundary(folder: Path, tmp_path: Path, sim: ModuleType) -> None:
    family = tiny.FAMILIES["wan"]
    expected, _ = tiny.stock(folder, steps=STEPS)
    size = {"width": family.size[0], "height": family.size[1], "frames": family.frames}
    run: dict[str, Any] = {**size, "steps": STEPS, "guidance": family.guidance, **family.call_kwargs}
    opened = ballast.open_pipeline(folder, device="sim", cache_dir=tmp_path)
    cond = opened.encode("a red boat", "blurry, grey", **family.encode_kwargs)
    peaks = {}
    for strategy, vram in (("resident", "1GB"), ("streamed", 1)):
        peaks[strategy] = opened.plan(**run, cond=cond, vram=vram, strategy=strategy).sampling.peak_vram_bytes
    tight = opened.denoisers[0].size_bytes * 5 // 4  # which does not hold both
    for vram, ram, keep in ((peaks["resident"], None, False), (peaks["streamed"], tight, True)):
        pipe = opened.within(vram, ram, keep)
        plan = pipe.plan(**run, cond=cond).stages[0]
        seen: list[tuple[bool, ...]] = []
        held: list[int] = []

        def look(step: int, steps: int, latents: torch.Tensor) -> None:
            seen.append(tuple(unit.placement is not None for unit in opened.denoisers))  # noqa: B023
            held.append(sum(unit.host_bytes for unit in opened.denoisers))  # noqa: B023

        latents = pipe.sample(cond, **run, on_step=look)
        torch.testing.assert_close(latents, expected.float(), atol=1e-5, rtol=0)
        assert seen == [(True, False)] * BOUNDARY + [(False, True)] * (STEPS - BOUNDARY)
        assert ram is None or max(held) <= ram, "RAM as well"
        record = manager("sim").timeline.stages[-1]
        assert record.peak_bytes <= plan.peak_vram_bytes <= 1.05 * record.peak_bytes
        assert record.peak_bytes <= vram
        placements = {unit.name: unit.placement for unit in record.units.values()}
        assert {unit.unit: unit.placement for unit in plan.units} == placements
    manager("sim").free()
    assert sim.stats().allocated_bytes == 0
