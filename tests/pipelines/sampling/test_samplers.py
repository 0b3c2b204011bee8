"""Samplers and schedules against the numbers that ComfyUI's own functions give, in float32 and without a model.

`samplers.json` has them: schedules by name, steps and shift, and samplers by name and steps, of the analytic flow below
from four numbers with given noise. bong_tangent is RES4LYF's.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from ballast.pipelines.sampling import samplers
from ballast.pipelines.sampling.schedules import SCHEDULES, simple

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "samplers.json").read_text(encoding="utf-8"))
SHIFT = 3.0
START = [0.5, -1.25, 2.0, 0.125]


def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return x * 0.75 - sigma * 0.5


def sampled(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, int]:
    """What a sampler makes of the flow, and how often it is called."""
    drawn = count(1)
    monkeypatch.setattr(samplers, "randn_tensor", lambda *_, **__: torch.cos(torch.arange(4.0) * next(drawn))[None])
    scheduler = samplers.FlowSampler(shift=SHIFT)
    scheduler.solver_name = name
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    scheduler.arrange(torch.tensor(simple(steps, SHIFT)), None, None, SHIFT)
    x = torch.tensor([START])
    for at, time in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, scheduler.sigmas[at]), time, x, return_dict=False)[0]
    return x.flatten(), len(scheduler.timesteps)


@pytest.mark.parametrize("case", KNOWN["samplers"])
def test_a_sampler_gives_the_numbers_of_comfyui(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, steps = case.split()
    made, calls = sampled(name, int(steps), monkeypatch)
    torch.testing.assert_close(made, torch.tensor(KNOWN["samplers"][case]), atol=1e-6, rtol=1e-6)
    assert calls == (2 * int(steps) - 1 if name == "heun" else int(steps))


@pytest.mark.parametrize("case", KNOWN["schedules"])
def test_a_schedule_gives_the_numbers_of_comfyui(case: str) -> None:
    name, steps, shift = case.split()
    made = torch.tensor(SCHEDULES[name](int(steps), float(shift)))
    torch.testing.assert_close(made, torch.tensor(KNOWN["schedules"][case]), atol=1e-7, rtol=1e-6)


def test_all_of_them_are_known() -> None:
    assert {case.split()[0] for case in KNOWN["samplers"]} == set(samplers.SOLVERS)
    assert {case.split()[0] for case in KNOWN["schedules"]} == set(SCHEDULES)
    with pytest.raises(ValueError, match="bong_tangent takes at least 2 steps"):
        SCHEDULES["bong_tangent"](1, 1.0)
