"""Sound beside a video: the same as the stock call makes, kept with the latents, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import torch
from ballast.pipelines.decoding.rescue import load_latents, save_latents
from ballast.pipelines.equivalence import sound_check
from ballast.pipelines.equivalence.verdicts import Verdict
from ballast.pipelines.sampling.latents import note_sound, sound_of
from modular import newest
from selection import few

RUN = {"width": 64, "height": 32, "guidance": 4.0, "steps": 2}
FRAMES, PROMPT, NEGATIVE = 9, "a red boat", "blurry, grey"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newest.ltx2_class(tmp_path_factory.mktemp("sound") / "ltx2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    """The video [1,F,H,W,3] and the sound [1,C,T] of the stock call."""
    pipe: Any = diffusers.LTX2Pipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    sides = {"width": RUN["width"], "height": RUN["height"], "num_frames": FRAMES}
    how = {"num_inference_steps": RUN["steps"], "guidance_scale": RUN["guidance"], "output_type": "pt"}
    drawing = torch.Generator("cpu").manual_seed(0)
    made = pipe(PROMPT, negative_prompt=NEGATIVE, generator=drawing, **sides, **how)
    return made.frames.movedim(-3, -1), made.audio


Opened = Callable[..., Any]


@pytest.fixture
def opened(folder: Path, cache: Path) -> Opened:
    return lambda device="cpu", **how: ballast.open_pipeline(folder, device=device, cache_dir=cache, **how)


def sampled(pipe: Any, **how: Any) -> torch.Tensor:
    made: torch.Tensor = pipe.sample(pipe.encode(PROMPT, NEGATIVE), frames=FRAMES, **RUN | how)
    return made


@pytest.mark.parametrize("strategy", few(["resident", "leafwise"], "leafwise"))
def test_video_and_sound_are_those_of_the_stock_call(
    strategy: str, opened: Opened, stock: Any, sim: ModuleType
) -> None:
    """To the bit, with nothing left on the device; what makes the sound comes after all else has left."""
    pipe = opened("sim")
    assert not pipe.model.left_out
    latents = sampled(pipe, strategy=strategy)
    assert sim.stats().allocated_bytes == 0
    made = pipe.decode_all(latents)
    assert sim.stats().allocated_bytes == 0
    video, sound = stock
    torch.testing.assert_close(made["images"], video, atol=1e-6, rtol=0)
    assert torch.equal(made["sound"].waveform, sound)
    assert made["sound"].sample_rate == 16000
    assert [stage.name for stage in pipe.manager.timeline.stages][-2:] == ["decode", "decode sound"]


def test_a_batch_and_runs_of_many_have_the_sound_of_each(opened: Opened, cache: Path) -> None:
    pipe = opened()
    alone = [pipe.decode_sound(sampled(pipe, seed=seed)).waveform for seed in (0, 1)]
    both = pipe.decode_sound(sampled(pipe, batch=2))
    torch.testing.assert_close(both.waveform, torch.cat(alone), atol=1e-6, rtol=0)
    items = [ballast.pipelines.stages.batch_runs.Item(PROMPT, NEGATIVE, sampling=lambda: {"frames": FRAMES, **RUN})]
    made = [each for each in pipe.run_items(items) if each.images is not None]
    assert torch.equal(made[0].sound.waveform, alone[0])


def test_files_keep_the_sound_and_copies_do_not(opened: Opened, tmp_path: Path) -> None:
    pipe = opened()
    latents = sampled(pipe)
    save_latents(latents, tmp_path / "one.latent")
    read = load_latents(tmp_path / "one.latent")
    assert torch.equal(pipe.decode_sound(read).waveform, pipe.decode_sound(latents).waveform)
    assert pipe.decode_sound(latents.clone()) is None
    assert "sound" not in pipe.decode_all(latents.clone())


def test_latents_with_the_sound_of_others_have_none() -> None:
    latents = torch.zeros(2, 4, 1, 1, 1)
    note_sound(latents, [torch.zeros(1)])
    assert sound_of(latents) == ()


def test_sound_that_is_not_the_stock_calls_is_left_out(opened: Opened) -> None:
    """As of a pipeline that changes it after its last module: the note says what is left out."""
    model = opened().model
    silent, sound = Verdict(left_out=("audio_vae", "vocoder")), model.sound
    found = sound_check.with_sound(model, model.parts, silent, lambda: Verdict())
    assert found.sound == ("audio_vae.decode", "vocoder.forward")
    assert sound_check.with_sound(model, model.parts, silent, lambda: Verdict("differs")) == silent
    assert model.sound is None and {unit.name for unit in sound.units} <= {unit.name for unit in model.denoisers}
    with pytest.raises(ValueError, match="makes other sound"):
        latents = torch.zeros(1, 4, 1, 1, 1)
        sound_check.check_sound(replace(sound), latents, {u.name: u.module for u in sound.units}, torch.ones(1, 2, 8))


def test_what_makes_the_sound_is_planned(opened: Opened, sim: ModuleType) -> None:
    """Its stage comes last, and takes what was planned."""
    pipe = opened("sim")
    plan = pipe.plan(frames=FRAMES, vram="1GB", **RUN)
    stage = plan.stages[-1]
    assert stage.name == "decode sound" and [unit.unit for unit in stage.units] == ["audio_vae", "vocoder"]
    latents = sampled(pipe)
    sim.reset_stats()
    pipe.decode_sound(latents)
    assert 0.95 * stage.peak_vram_bytes <= sim.stats().peak_bytes <= stage.peak_vram_bytes
