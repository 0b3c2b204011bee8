"""What a node of the host took, seen from outside: its own peak, whether or not weights came for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import ballast
import torch
from ballast.memory import manager
from ballast.memory.reports.observed import Observation

MB = 2**20


def use(nbytes: int) -> None:
    del_soon = torch.empty(nbytes, dtype=torch.uint8, device="sim")
    del del_soon


def test_peak_is_that_of_the_node_and_not_of_those_before(sim: ModuleType) -> None:
    timeline = manager("sim").timeline
    use(10 * MB)
    seen = Observation(timeline, "KSampler", "prompt", 2**30)
    use(MB)
    seen.look()
    use(2 * MB)
    seen.finish()
    (stage,) = timeline.stages
    assert (stage.name, stage.run) == ("KSampler", "prompt")
    assert 2 * MB <= stage.peak_bytes < 3 * MB
    assert stage.events[0].peak_bytes < MB, "it is drawn, too"
    assert not stage.units, "it computed, and no weights came"


def test_one_that_takes_nothing_is_left_out(sim: ModuleType) -> None:
    timeline = manager("sim").timeline
    use(10 * MB)
    Observation(timeline, "KSampler", "prompt", 2**30).finish()
    assert not list(timeline.stages)


def test_one_within_a_stage_of_ours_is_left_out(sim: ModuleType) -> None:
    timeline = manager("sim").timeline
    with manager("sim").stage("sample", []):
        seen = Observation(timeline, "KSampler", "prompt", 2**30)
        use(MB)
        seen.finish()
    assert [stage.name for stage in timeline.stages] == ["sample"]


def test_a_stage_of_ours_meanwhile_tells_more(sim: ModuleType, tiny_folders: Callable[[str], Path]) -> None:
    timeline = manager("sim").timeline
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim")
    cond = pipe.encode("a boat")
    timeline.clear()
    seen = Observation(timeline, "BallastSampler", "prompt", 2**30)
    use(MB)
    pipe.sample(cond, steps=2, width=32, height=32, on_step=lambda *_: seen.look())
    assert len(seen._stage.events) == 1, "ours notes what happens"
    use(MB)
    seen.finish()
    assert [stage.name for stage in timeline.stages] == ["sample"]
