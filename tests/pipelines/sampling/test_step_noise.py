"""Schedulers that draw noise in each step: equal to stock by the run's generator, alone and in batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import tiny
import torch

Folders = Callable[[str], Path]
SEED, STEPS = 7, 3
SDE = {"algorithm_type": "sde-dpmsolver++"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux lcm": ("flux", "FlowMatchLCMScheduler", {}),
    "flux euler": ("flux", "FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "ltx euler": ("ltx", "FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "ltx lcm": ("ltx", "FlowMatchLCMScheduler", {}),
    "sana sde": ("sana", "DPMSolverMultistepScheduler", SDE | FLOW),
    "pixart sde": ("pixart_sigma", "DPMSolverMultistepScheduler", SDE),
    "pixart tcd": ("pixart_sigma", "TCDScheduler", {}),
    "pixart ddpm": ("pixart_sigma", "DDPMScheduler", {}),
    "pixart lcm": ("pixart_sigma", "LCMScheduler", {}),
}
SHORT = ("ltx euler", "pixart tcd")
LONG = ("sana", "pixart ddpm")


def marked(case: str) -> Any:
    mark = pytest.mark.long if case.startswith(LONG) else pytest.mark.soak
    return case if case in SHORT else pytest.param(case, marks=mark)


def drawing_folder(case: str, tiny_folders: Folders, tmp_path: Path) -> Path:
    """The family's folder with the scheduler of the case."""
    family, scheduler, config = CASES[case]
    folder = tmp_path / family
    shutil.copytree(tiny_folders(family), folder)
    shutil.rmtree(folder / "scheduler")
    getattr(diffusers, scheduler)(**config).save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    text = index.read_text(encoding="utf-8")
    before = text[text.index('"scheduler"') :].split('"', 6)[5]
    index.write_text(text.replace(before, scheduler), encoding="utf-8")
    return folder


def stock(folder: Path) -> torch.Tensor:
    """The latents of the unmodified pipeline, which draws all from torch's own generator, seeded when it begins."""
    pipe: Any = getattr(diffusers, tiny.family_of(folder).class_name)
    begin = pipe.check_inputs

    def seeded(*args: Any, **more: Any) -> None:
        torch.manual_seed(SEED)
        begin(*args, **more)

    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "check_inputs", seeded)
        return tiny.stock(folder, steps=STEPS, generator=torch.default_generator)[0].float()


@pytest.mark.parametrize("case", [*map(marked, CASES)])
def test_steps_draw_as_stock_does(case: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    """Stock's loop may draw from torch's own generator, so that is what it is given; another seed is another picture.

    A picture of a batch is the one that its seed makes alone.
    """
    folder = drawing_folder(case, tiny_folders, tmp_path)
    expected = stock(folder)
    torch.manual_seed(SEED)
    pipe, encode, _, _ = tiny.stages(CASES[case][0], folder, "sim")
    cond, family = encode(), tiny.FAMILIES[CASES[case][0]]
    width, height = family.size
    run = {"width": width, "height": height, "frames": family.frames, "guidance": family.guidance, "steps": STEPS}
    run |= family.call_kwargs
    made = pipe.sample(cond, **run, seed=SEED)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)
    other = pipe.sample(cond, **run, seed=SEED + 1)
    assert not torch.allclose(made, other, atol=1e-2)
    both = pipe.sample(cond, **run, seed=SEED, batch=2)
    torch.testing.assert_close(both, torch.cat([made, other]), atol=1e-4, rtol=1e-4)  # some are in thousands
    assert torch.initial_seed() == SEED, "what the caller draws follows the caller's own seed"
    assert sim.stats().allocated_bytes == 0
