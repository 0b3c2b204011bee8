"""What a node of the host took, seen from outside: its own peak, whether or not weights came for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import ballast
import pytest
import torch
from ballast.memory import manager
from ballast.memory.reports.observed import Observation
from ballast.memory.reports.timeline import OnDevice, Timeline

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


class Model:
    """One of the host's models, with some bytes on the card."""

    def __init__(self, timeline: Timeline, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = nbytes
        monkeypatch.setattr(timeline, "_guests", self.there)

    def there(self) -> tuple[OnDevice, ...]:
        return (OnDevice("unet (ComfyUI)", "denoiser", self.bytes),) if self.bytes else ()


@pytest.mark.parametrize("looks", [0, 2])
@pytest.mark.parametrize("left", [0, 2 * MB])
@pytest.mark.parametrize("target", [0, MB])
def test_one_whose_weights_leave_counts_if_some_stay_or_it_has_a_budget(
    target: int, left: int, looks: int, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that only unloads is left out."""
    timeline = manager("sim").timeline
    model = Model(timeline, 4 * MB, monkeypatch)
    seen = Observation(timeline, "KSampler", "prompt", 2**30)
    timeline.target_bytes, model.bytes = target, left
    for _ in range(looks):
        seen.look()
    seen.finish()
    assert [stage.name for stage in timeline.stages] == ["KSampler"] * bool(target or left)
    assert all(stage.budget_bytes == (target or 2**30) for stage in timeline.stages)
