"""Sampler Settings: what is left alone is left out, and the rest reaches the run, its plan and no other model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.sample import Sampler
from ballast.nodes.sampler_settings import SamplerSettings
from host import run_node

CHOSEN = {"sampler": "heun", "schedule": "beta", "shift": 2.0}
MEANT = {"scheduler": "heun", "sigmas": "beta", "shift": 2.0}


@pytest.fixture(scope="module")
def reference(tiny_folders: Callable[[str], Path]) -> Iterator[Any]:
    link = Path(folder_paths.get_folder_paths("diffusers")[0]) / "flux"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tiny_folders("flux"), target_is_directory=True)
    yield run_node(LoadPipeline, pipeline="flux", device="cpu").result[0]
    link.unlink()


def test_what_is_left_alone_is_left_out() -> None:
    assert run_node(SamplerSettings).result[0] == {}
    assert run_node(SamplerSettings, **CHOSEN).result[0] == MEANT
    cached = {"cache": "static", "cache_amount": 3.0, "guidance_end": 0.5}
    assert run_node(SamplerSettings, **cached).result[0] == {"cache": "static:3", "guidance_range": (0.0, 0.5)}
    shared = {"cache": "easycache", "once": True, "lockstep": True}
    assert run_node(SamplerSettings, **shared).result[0] == shared
    part = {"start_step": 2, "end_step": 3, "measure": True}
    assert run_node(SamplerSettings, **part).result[0] == part


def test_two_samplers_share_the_steps(reference: Any) -> None:
    """The latent of the first is what the second goes on from, and no picture before."""
    size = {"width": 48, "height": 32, "steps": 4}
    cond = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]

    def sampled(latent: Any = None, **part: int) -> Any:
        settings = run_node(SamplerSettings, **part).result[0]
        run = {"pipeline": reference, "conditioning": cond, **size, "sampler_settings": settings}
        return run_node(Sampler, **run, **({} if latent is None else {"latent": latent})).result[0]

    left = sampled(end_step=1)
    assert torch.equal(sampled(left, start_step=1)["samples"], sampled()["samples"])
    with pytest.raises(ValueError, match="left at step 1 of 4, and are no picture yet"):
        run_node(VaeDecode, pipeline=reference, latent=left)
    with pytest.raises(ValueError, match="nothing to go on from. Connect the latent of a sampler that ended"):
        sampled(start_step=1)


def test_settings_reach_the_run_and_its_plan(reference: Any) -> None:
    settings = run_node(SamplerSettings, **CHOSEN).result[0]
    size = {"width": 48, "height": 32, "steps": 3}
    cond = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]
    latent = run_node(Sampler, pipeline=reference, conditioning=cond, **size, sampler_settings=settings).result[0]
    assert torch.equal(latent["samples"], reference.open().sample(cond, **size, **MEANT))
    plain = run_node(Sampler, pipeline=reference, conditioning=cond, **size, sampler_settings={}).result[0]
    assert not torch.allclose(plain["samples"], latent["samples"], atol=1e-3)
    for given, calls in ((settings, 5), ({}, 3)):
        plan = run_node(VramPlan, pipeline=reference, **size, vram_gb="1", sampler_settings=given).result[1]
        assert f"{calls} steps" in plan or f"for {calls}" in plan, plan
    cached, shared = {"cache": "static:2", "measure": True}, {"once": True, "lockstep": True}
    for given in (cached, shared):
        run = {"pipeline": reference, "conditioning": cond, **size, "sampler_settings": given}
        assert torch.equal(
            run_node(Sampler, **run).result[0]["samples"], reference.open().sample(cond, **size, **given)
        )
    plan = run_node(VramPlan, pipeline=reference, **size, vram_gb="1", sampler_settings=cached).result[1]
    assert "The cache static:2 computes 2 of 3 steps." in plan
