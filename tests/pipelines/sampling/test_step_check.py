"""Values that are not finite are found while the device computes on: a step is waited for when the next is queued."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from ballast.memory.simulated import card as state
from ballast.pipelines.sampling.latents import StepCheck

STEPS = 3


def step(x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """Takes a second of the device."""
    return torch.mm(x, x) * times


def first(sim: ModuleType) -> torch.Tensor:
    sim.enable(total="4GB", tflops=2 * 64**3 / 1e12)
    torch.sim.Stream()
    made = (torch.eye(64) / 2).to("sim")
    sim.reset_stats()
    return made


@torch.inference_mode()
def test_the_host_waits_for_the_step_before(sim: ModuleType) -> None:
    latents, check = first(sim), StepCheck()
    begun = state.card.host
    waited = []
    for taken in range(1, STEPS + 1):
        latents = step(latents)
        check.check(latents, taken, STEPS)
        waited.append(round(state.card.host - begun))
    assert waited == [0, 1, STEPS], "the last step has none after it"


@torch.inference_mode()
@pytest.mark.parametrize("bad", range(1, STEPS + 1))
def test_the_step_that_made_them_is_named_at_the_latest_at_the_end(sim: ModuleType, bad: int) -> None:
    latents, check, queued = first(sim), StepCheck(), 0
    with pytest.raises(ValueError, match=f"step {bad} of {STEPS} made NaN"):
        for taken in range(1, STEPS + 1):
            queued = taken
            latents = step(latents, float("nan") if taken == bad else 1.0)
            check.check(latents, taken, STEPS)
    assert queued == min(bad + 1, STEPS)


@torch.inference_mode()
def test_a_call_that_ends_early_is_looked_at_too(sim: ModuleType) -> None:
    check = StepCheck()
    check.check(first(sim) * float("inf"), 1, STEPS)
    with pytest.raises(ValueError, match=f"step 1 of {STEPS}"):
        check.finish()
    check.finish()


def test_what_blocks_anyway_is_looked_at_at_once() -> None:
    with pytest.raises(ValueError, match="step 1 of 2"):
        StepCheck().check(torch.full((4,), torch.nan), 1, 2)
