"""Encoded models that stay on the device, while sizes, steps and budgets change: as planned, and within the budget."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import manager, simulated
from encoded_folders import Pair
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

SOAK = bool(os.environ.get("BALLAST_SOAK"))
SIZES = ((32, 32), (128, 96))
CASES = [(size, steps) for size in range(len(SIZES)) for steps in (1, 2)]
WEIGHTS = [
    pytest.param("int8", marks=pytest.mark.long),
    *(pytest.param(how, marks=pytest.mark.soak) for how in ("q8_0", "4 bit")),
]


def settings_of(case: int) -> dict[str, Any]:
    (width, height), steps = SIZES[CASES[case][0]], CASES[case][1]
    return {"width": width, "height": height, "steps": steps, "guidance": 1.0}


class Bench:
    """A tiny Z-Image with an encoded transformer, what plain weights give, and the budgets between least and most."""

    def __init__(self, how: str, folder: Path, where: Path) -> None:
        self.pair = Pair(folder, ["transformer"], how, where)
        plain = self.pair.open(encoded=False)
        self.cond = plain.encode("a red boat")
        self.expected = [plain.sample(self.cond, **settings_of(case)) for case in range(len(CASES))]
        pipe, cases = self.pair.open(), range(len(CASES))
        self.least = max(self.planned(pipe, case, vram=1) for case in cases)
        self.most = max(self.planned(pipe, case, strategy="resident") for case in cases)
        once, twice = (self.planned(pipe, case, strategy="resident") for case in (0, 1))
        assert once < 0.9 * twice, "a single call decodes nothing for good"

    def planned(self, pipe: Any, case: int, **how: Any) -> int:
        return pipe.plan(**settings_of(case), cond=self.cond, **how).sampling.peak_vram_bytes


@pytest.fixture(scope="module", params=WEIGHTS)
def bench(request: pytest.FixtureRequest, tiny_folders: Callable[[str], Path], tmp_path_factory: Any) -> Bench:
    simulated.enable(total="1GB", tflops=1.0, h2d_gbps=25)
    return Bench(request.param, tiny_folders("zimage"), tmp_path_factory.mktemp("kept"))


RUN = st.tuples(st.sampled_from(range(len(CASES))), st.floats(0, 1))


@settings(
    max_examples=8,
    phases=tuple(Phase) if SOAK else (Phase.explicit,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(runs=st.lists(RUN, min_size=2, max_size=5))
@example(runs=[(1, 0.6), (3, 0.6), (1, 0.6)])  # what was decoded for the small one has no room beside the large one
@example(runs=[(2, 0.0), (2, 0.0)])  # the first leaves rotary tables, for which the second has no room
@example(runs=[(3, 0.9), (1, 0.9), (1, 1.0), (0, 1.0), (1, 0.3)])  # more is decoded, all of it, none, some
def test_what_stays_is_decoded_as_each_run_is_planned(
    bench: Bench, sim: ModuleType, runs: list[tuple[int, float]]
) -> None:
    mgr = manager("sim")
    for case, share in runs:
        vram = int(bench.least + share * (bench.most - bench.least))
        pipe = bench.pair.open(vram=vram, keep=True)
        assert torch.equal(pipe.sample(bench.cond, **settings_of(case)), bench.expected[case])
        stage = mgr.timeline.stages[-1]
        assert stage.planned is not None
        assert stage.peak_bytes <= min(stage.planned.peak_vram_bytes, vram)
        assert sim.stats().hazards == 0
    mgr.free()
    assert sim.stats().allocated_bytes == 0


def test_a_lease_inside_a_call_decodes_nothing(bench: Bench, sim: ModuleType) -> None:
    """What a call sees decoded in a workspace is not decoded for good under it."""
    mgr, pipe, leased = manager("sim"), bench.pair.open(keep=True), []
    (dit,) = pipe.denoisers
    layer = next(each for path, each in dit.module.named_modules() if path.endswith("layers.0.attention.to_q"))
    forward = layer.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mgr.use(dit):
            assert dit.placement and dit.placement.name == "resident"
            leased.append(len(dit.placement.dequantized))
        return forward(*args, **kwargs)

    layer.forward = inside
    try:
        for _ in range(2):
            assert torch.equal(pipe.sample(bench.cond, **settings_of(1)), bench.expected[1])
    finally:
        del layer.forward
    assert len(leased) == 4 and leased[0] == 0 < leased[1]
    mgr.free()
