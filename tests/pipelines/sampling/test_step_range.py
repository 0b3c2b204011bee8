"""`start_step` and `end_step`: a run that is cut in two is the whole run, to the bit, or is refused in one line."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory.rates import ASSUMED
from ballast.pipelines.decoding.rescue import load_latents, save_latents
from ballast.pipelines.equivalence import verdicts
from ballast.pipelines.sampling.guidance_range import GuidanceRange
from ballast.pipelines.sampling.step_range import StepRange
from ballast.pipelines.stock.stand_ins import Entering
from pictured import pipelines
from pictured.pictures import picture
from selection import few

Folders = Callable[[str], Path]
STEPS, CUT = 5, 2
FAMILIES = ("flux", "qwenimage", "wan", "sd3", "ltx")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("step_range")


class Opened:
    """A tiny pipeline on the simulated card, with its prompt encoded."""

    def __init__(self, folder: Path, cache: Path, **opening: Any) -> None:
        family = tiny.family_of(folder)
        self.pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache, **opening)
        self.cond = self.pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
        width, height = family.size
        run = {"width": width, "height": height, "frames": family.frames, "steps": STEPS, "guidance": family.guidance}
        self.run = run | {"scheduler": "euler"} | family.call_kwargs

    def __call__(self, **more: Any) -> torch.Tensor:
        return self.pipe.sample(self.cond, **self.run | more)

    def in_two(self, **more: Any) -> torch.Tensor:
        return self(start_step=CUT, latents=self(end_step=CUT, **more), **more)


@pytest.fixture
def opened(tiny_folders: Folders, cache: Path, sim: ModuleType) -> Callable[..., Opened]:
    return lambda name, **opening: Opened(tiny_folders(name), cache, **opening)


@pytest.mark.parametrize("name", few(FAMILIES, "flux", "ltx"))
def test_two_runs_are_one(name: str, opened: Any, tiny_folders: Folders) -> None:
    run = opened(name)
    seen: list[tuple[int, int]] = []
    left = run(end_step=CUT, on_step=lambda step, steps, _: seen.append((step, steps)))
    assert seen == [(1, CUT), (2, CUT)]
    with pytest.raises(ValueError, match=f"left at step {CUT} of {STEPS}, and are no picture yet"):
        run.pipe.decode(left)
    seen.clear()
    made = run(start_step=CUT, latents=left, on_step=lambda step, steps, _: seen.append((step, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(made, run())
    assert not torch.allclose(made, run(start_step=CUT, latents=left + 0.1), atol=1e-4)
    assert run.pipe.decode(made).isfinite().all()
    if name in ("flux", "sd3", "ltx"):  # whose own scheduler is euler
        torch.testing.assert_close(made, tiny.stock(tiny_folders(name), steps=STEPS)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("hunyuan_video", "bf16", marks=pytest.mark.soak),  # test_a_file_says_where_it_was_left cuts it too
        pytest.param("hunyuan_video15", "bf16", marks=pytest.mark.soak),
        ("mochi", "bf16"),
        ("ltx_timestep", "fp32"),
    ],
)
def test_what_the_loop_has_beside_values_is_kept(name: str, dtype: str, opened: Any) -> None:
    """HunyuanVideo goes on in bfloat16 after float32. Mochi rounds each step. LTX draws noise behind its loop."""
    run = opened(name, dtype=dtype)
    run.run |= {"scheduler": None} if name == "mochi" else {}
    assert torch.equal(run.in_two(), run())


@pytest.mark.long
def test_a_first_frame_and_two_experts(cache: Path, sim: ModuleType, tmp_path: Path) -> None:
    """What begins at a picture, and a second transformer that takes over in the second half."""
    given, two = picture(64, 64), tmp_path / "wan"
    pipe = ballast.open_pipeline(pipelines.save("wan_i2v", tmp_path / "wan_i2v"), device="sim", cache_dir=cache)
    run: dict[str, Any] = {"width": 64, "height": 64, "frames": 5, "steps": 4, "scheduler": "euler", "image": given}
    cond = pipe.encode("a red boat", "blurry, grey")
    left = pipe.sample(cond, **run, end_step=CUT)
    assert torch.equal(pipe.sample(cond, **run, start_step=CUT, latents=left), pipe.sample(cond, **run))
    wan: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(wan.transformer).from_config(wan.transformer.config).eval().requires_grad_(False)
    type(wan)(**wan.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(two)
    experts = Opened(two, cache)
    assert torch.equal(experts.in_two(), experts())


def test_latents_get_the_strides_of_noise() -> None:
    """FLUX.2 transposes its noise. With several threads other strides were other last bits."""
    latents, noise = torch.rand(1, 6, 4), torch.zeros(1, 4, 6).mT
    prepare = Entering(latents, torch.bfloat16).in_place_of_noise(lambda: (noise, "ids"))
    given, ids = prepare()
    assert ids == "ids" and given.stride() == noise.stride() and torch.equal(given, latents.bfloat16())


def test_heun_is_cut_between_its_steps(opened: Any) -> None:
    run, seen = opened("sd3"), []
    more = {"scheduler": "heun", "on_step": lambda step, steps, _: seen.append(steps)}
    assert torch.equal(run.in_two(**more), run(**more))
    assert seen == [4] * 4 + [5] * 5 + [9] * 9
    own = {"scheduler": "FlowMatchHeunDiscreteScheduler"}
    assert torch.equal(run.in_two(**own), run(**own))


STREAMED: dict[str, Any] = {"guidance": 3.5, "strategy": "leafwise", "guidance_range": (0.2, 0.8)}


@pytest.mark.long
@pytest.mark.parametrize(
    "ways",
    [
        {"once": True, "lockstep": True},
        {"batch": 2},
        *(pytest.param({way: True}, marks=pytest.mark.soak) for way in ("once", "lockstep")),
    ],
)
def test_it_goes_together_with_what_spares_copies(ways: dict[str, Any], opened: Any) -> None:
    run = opened("qwenimage")
    run.run |= STREAMED | ways
    assert torch.equal(run.in_two(), run())


def test_it_goes_together_with_what_streams_and_guides(opened: Any) -> None:
    """A range of guidance is that of the whole."""
    run = opened("qwenimage")
    run.run |= STREAMED
    whole = run()
    assert torch.equal(run.in_two(), whole)
    assert not torch.allclose(run(guidance_range=(0.0, 0.4)), whole, atol=1e-4)


@pytest.mark.long
def test_loras_are_those_of_each_half(opened: Any, tiny_folders: Folders, tmp_path: Path) -> None:
    run = opened("qwenimage")
    run.run |= STREAMED
    whole = run()
    loras = lora_files.two(tiny_folders("qwenimage"), tmp_path)
    left = run(end_step=CUT)
    run.pipe.set_loras(loras)
    changed = run(start_step=CUT, latents=left)
    assert not torch.allclose(changed, whole, atol=1e-4)
    assert torch.equal(run.in_two(), run())
    run.pipe.set_loras(None)
    assert torch.equal(run(start_step=CUT, latents=left), whole)


def test_plans_count_the_steps_that_run(opened: Any) -> None:
    run = opened("sd3")
    rates = {"vram": "64MB", "rates": ASSUMED, "cond": run.cond}
    plans = [
        run.pipe.plan(**run.run | rates | more) for more in ({}, {"end_step": CUT}, {"start_step": CUT, "end_step": 4})
    ]
    assert [plan.steps for plan in plans] == [STEPS, CUT, 2]
    part, half = GuidanceRange(0.2, 0.6, True), StepRange(CUT, STEPS, STEPS)
    assert half.guided(part) == 1 and StepRange(0, CUT, STEPS).guided(part) == 1
    heun = StepRange(1, 3, 3, order=2)
    assert (heun.whole, heun.first, heun.calls) == (5, 2, 3)


def test_what_does_not_survive_a_cut_is_refused(opened: Any, tiny_folders: Folders) -> None:
    """In one line, which says what is wrong."""
    run = opened("flux")
    left = run(end_step=CUT)
    stops, goes_on = {"end_step": CUT}, {"start_step": CUT, "latents": left}
    for given, words in (
        *(
            ({**stops, "scheduler": name}, f"with {name}: its steps need earlier ones")
            for name in ("dpmpp_2m", "euler_ancestral", "lcm", "res_multistep", "er_sde", "dpmpp_2m_sde")
        ),
        ({**stops, "scheduler": "unipc"}, "with UniPCMultistepScheduler: its steps"),
        ({"start_step": CUT}, "there is nothing to go on from"),
        ({"latents": left}, "but no start_step to go on at"),
        ({**goes_on, "noise": left}, "noise and latents are given"),
        ({**goes_on, "start_step": 3}, "left at step 2 of 5, and this run goes on at step 3 of 5"),
        ({**goes_on, "steps": 4}, "left at step 2 of 5, and this run goes on at step 2 of 4"),
        ({**goes_on, "width": 64}, "the latents to go on from are"),
        ({"end_step": 6}, "of 5 steps they take 0 <= start_step < end_step <= 5"),
        ({"end_step": 0}, "of 5 steps they take"),
        ({"start_step": 1.5}, "start_step is '1.5'; it takes a whole number"),
        ({**stops, "cache": "static:2"}, "do not go together with cache"),
        ({**stops, "cards": 2}, "do not go together with cards"),
        ({**stops, "image": torch.rand(1, 32, 48, 3), "strength": 0.5}, "do not go together with strength"),
    ):
        with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
            run(**given)
    assert torch.equal(run(start_step=0, end_step=STEPS), run())
    for name in ("wan", "hidream"):
        other = opened(name)
        with pytest.raises(ValueError, match="takes no start_step and no end_step"):
            other(end_step=CUT, scheduler=None)


def test_a_class_is_refused_whose_cut_differs(opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the second half begins at another noise level, the proof sees it before anything is loaded."""
    monkeypatch.setattr(verdicts, "_known", OrderedDict())
    run = Opened(tiny.save("sd3", tmp_path / "sd3"), tmp_path)
    first = StepRange.first.fget
    monkeypatch.setattr(StepRange, "first", property(lambda part: first(part) - (part.start > 0)))
    with pytest.raises(ValueError, match="a run that is cut in two does not end as the whole. Leave them out"):
        run(end_step=CUT)


def test_latents_that_a_pipeline_changes_are_refused(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened("sd3")
    left, wrap = run(end_step=CUT), Entering.in_place_of_noise

    def scaled(entering: Entering, prepare: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(entering, prepare)
        return functools.wraps(prepare)(lambda *args, **kwargs: wrapped(*args, **kwargs) * 1.5)

    monkeypatch.setattr(Entering, "in_place_of_noise", scaled)
    with pytest.raises(RuntimeError, match="changes the latents that it goes on from"):
        run(start_step=CUT, latents=left)


def test_a_file_says_where_it_was_left(opened: Any, tmp_path: Path) -> None:
    run = opened("hunyuan_video", dtype="bf16")
    save_latents(run(end_step=CUT), tmp_path / "left.latent")
    left = load_latents(tmp_path / "left.latent")
    with pytest.raises(ValueError, match="goes on at step 3 of 5"):
        run(start_step=3, latents=left)
    assert torch.equal(run(start_step=CUT, latents=left), run())
    assert run(start_step=CUT, latents=left.clone()).isfinite().all()  # which says nothing of it
