"""`scheduler`, `shift` and `sigmas`: equal to the stock pipeline with the same scheduler, or refused in one line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.pipelines.sampling.scheduler_choice import CLASSES, SAMPLERS

Folders = Callable[[str], Path]
SEED, STEPS = 7, 4
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
SHIFT = {"shift": 3.0}
OBJECTS: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": SHIFT,
    "FlowMatchHeunDiscreteScheduler": SHIFT,
    "FlowMatchLCMScheduler": SHIFT,
    "LTXEulerAncestralRFScheduler": {},
    "UniPCMultistepScheduler": FLOW,
    "DPMSolverMultistepScheduler": FLOW,
    "DPMSolverSinglestepScheduler": FLOW | {"lower_order_final": True},
    "DEISMultistepScheduler": FLOW,
    "SASolverScheduler": FLOW,
}
SHORT = [
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "UniPCMultistepScheduler",
    "SASolverScheduler",
]
LONG = [
    *(pytest.param(name, list(OBJECTS), marks=pytest.mark.long) for name in ("qwenimage", "ltx")),
    *(pytest.param(name, list(OBJECTS), marks=pytest.mark.soak) for name in ("flux", "wan", "sd3")),
]


@pytest.fixture
def opened(tiny_folders: Folders, sim: ModuleType) -> Callable[[str], Any]:
    """A family's stock call and its staged call, which take a scheduler."""

    def open_family(name: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Any]:
        folder, family = tiny_folders(name), tiny.FAMILIES[name]
        pipe, encode, _, _ = tiny.stages(name, folder, "sim")
        width, height = family.size
        run = {"width": width, "height": height, "frames": family.frames, "guidance": family.guidance}
        sample = functools.partial(pipe.sample, encode(), **run, seed=SEED, **family.call_kwargs)
        return functools.partial(stock, folder), sample, pipe

    return open_family


def stock(folder: Path, **more: Any) -> torch.Tensor:
    """The latents of the unmodified pipeline, which draws all from torch's own generator, seeded when it begins."""
    pipe: Any = getattr(diffusers, tiny.family_of(folder).class_name)
    begin = pipe.check_inputs

    def seeded(*args: Any, **given: Any) -> None:
        torch.manual_seed(SEED)
        begin(*args, **given)

    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "check_inputs", seeded)
        return tiny.stock(folder, generator=torch.default_generator, **more)[0].float()


def made(name: str, dynamic: bool) -> Any:
    cls = getattr(diffusers, name)
    takes = inspect.signature(cls.__init__).parameters
    shifting = {"use_dynamic_shifting": True} if dynamic and "use_dynamic_shifting" in takes else {}
    return cls(**OBJECTS[name] | shifting)


@pytest.mark.parametrize(("family", "names"), [("flux", SHORT), *LONG])
def test_a_scheduler_object_runs_as_in_the_stock_pipeline(family: str, names: list[str], opened: Any) -> None:
    """Those that the stock pipeline refuses are refused in its words. The object itself is left as it is."""
    whole, sample, pipe = opened(family)
    dynamic = bool(pipe.model.parts.tool("scheduler").config.get("use_dynamic_shifting"))
    ran = 0
    for name in names:
        try:
            expected = whole(steps=STEPS, scheduler=made(name, dynamic))
        except Exception as error:
            with pytest.raises(type(error)) as caught:
                sample(steps=STEPS, scheduler=made(name, dynamic))
            assert str(caught.value) == str(error), name
            continue
        ran += 1
        given = made(name, dynamic)
        before = given.timesteps
        torch.testing.assert_close(sample(steps=STEPS, scheduler=given), expected, atol=1e-5, rtol=1e-5)
        assert given.timesteps is before
    assert ran >= 3


def test_names_and_shift_are_those_of_the_class(opened: Any) -> None:
    """Few steps with a shift of their own, as for LoRAs that need them; sigmas where the pipeline's call has none."""
    whole, sample, _ = opened("wan")
    unipc = functools.partial(diffusers.UniPCMultistepScheduler, **FLOW)
    euler = diffusers.FlowMatchEulerDiscreteScheduler
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"shift": 5.0}, unipc(flow_shift=5.0)),
        ({"scheduler": "unipc", "shift": 5.0}, unipc(flow_shift=5.0)),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, euler(shift=3.0)),
        ({"scheduler": "euler", "shift": 5.0}, euler(shift=5.0)),
    ]
    for given, scheduler in cases:
        expected = whole(steps=STEPS, scheduler=scheduler, guidance=1.0)
        torch.testing.assert_close(sample(steps=STEPS, guidance=1.0, **given), expected, atol=1e-5, rtol=1e-4)
    sigmas = [1.0, 0.9, 0.5]

    def set_timesteps(self: Any, count: int, device: Any = None) -> None:
        euler.set_timesteps(self, sigmas=sigmas, device=device)

    told = type("FlowMatchEulerDiscreteScheduler", (euler,), {"set_timesteps": set_timesteps})(shift=3.0)
    torch.testing.assert_close(
        sample(scheduler="euler", sigmas=sigmas), whole(steps=3, scheduler=told), atol=1e-5, rtol=1e-4
    )


def test_a_shift_takes_the_place_of_one_by_size(opened: Any) -> None:
    """FLUX.1 shifts by the size of the picture, and hands its sigmas to classes that take none of them."""
    whole, sample, _ = opened("flux")
    expected = whole(steps=STEPS, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    torch.testing.assert_close(sample(steps=STEPS, shift=3.0), expected, atol=1e-5, rtol=1e-4)
    heun = sample(steps=STEPS, scheduler="FlowMatchHeunDiscreteScheduler", shift=3.0)
    torch.testing.assert_close(sample(steps=STEPS, scheduler="heun", shift=3.0), heun, atol=1e-5, rtol=1e-4)
    own = sample(steps=STEPS)
    torch.testing.assert_close(sample(steps=STEPS, scheduler="euler"), own, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(own, expected, atol=1e-3)


@pytest.mark.long
def test_every_name_makes_a_picture(opened: Any) -> None:
    """Whatever the pipeline hands the scheduler; and the same one again by the same seed."""
    _, sample, _ = opened("flux")
    found = {name: sample(steps=2, scheduler=name, sigmas="beta") for name in SAMPLERS + CLASSES}
    assert all(latents.isfinite().all() for latents in found.values())
    assert len({tuple(latents.flatten().tolist()) for latents in found.values()}) > len(SAMPLERS)
    both = sample(steps=2, scheduler="er_sde", sigmas="beta", batch=2)
    torch.testing.assert_close(both[:1], found["er_sde"], atol=1e-4, rtol=1e-4)


def test_a_plan_counts_the_calls(opened: Any) -> None:
    """Heun's method runs the model twice a step, save in the last; a run reports as many."""
    _, sample, pipe = opened("flux")
    size = {"width": 48, "height": 32}
    plain = pipe.plan(**size, steps=STEPS, vram="64MB")
    twice = pipe.plan(**size, steps=STEPS, vram="64MB", scheduler="heun")
    seen: list[tuple[int, int]] = []
    sample(steps=STEPS, scheduler="heun", on_step=lambda step, steps, _: seen.append((step, steps)))
    assert seen[-1] == (2 * STEPS - 1, 2 * STEPS - 1)
    assert (plain.steps, twice.steps) == (STEPS, 2 * STEPS - 1)


def test_what_is_not_taken_is_refused(opened: Any, tiny_folders: Folders) -> None:
    """In one line, which lists what is."""
    _, sample, pipe = opened("flux")
    for given, words in (
        ({"scheduler": "ddim"}, r"takes no scheduler 'ddim'\. It takes euler, .*, or a scheduler object of diffusers"),
        ({"scheduler": 3}, r"scheduler is '?3'?; it takes a name, such as euler"),
        ({"shift": 0}, r"shift is '?0'?; it takes a number above 0"),
        ({"sigmas": "abc"}, r"sigmas is 'abc'; it takes a list of numbers, or one of simple, "),
        ({"scheduler": made("UniPCMultistepScheduler", True), "shift": 2.0}, "a scheduler object has its own"),
        ({"scheduler": made("UniPCMultistepScheduler", True), "sigmas": [1.0, 0.5]}, "hands no sigmas to an object"),
    ):
        for call in (sample, functools.partial(pipe.plan, vram="64MB")):
            with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
                call(**given)
    other = ballast.open_pipeline(tiny_folders("pixart_sigma"), device="sim")
    with pytest.raises(ValueError, match=r"takes no shift here: its .* is no flow matching\. It takes scheduler: DDIM"):
        other.plan(shift=3.0, vram="64MB")
    assert other.plan(scheduler="EulerDiscreteScheduler", vram="64MB", width=64, height=64)
