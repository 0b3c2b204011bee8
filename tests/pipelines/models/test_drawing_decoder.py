"""A decoder that draws noise, LTX-2.5's: it goes on with the run's generator, however late and often it is called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import striped
from ballast.pipelines.decoding.rescue import load_latents, save_latents
from ballast.pipelines.decoding.tiling import can_stripe
from ballast.pipelines.sampling.latents import noise_of
from modular import modular_folders, newest
from pictured import pipelines as pictured

RUN: dict[str, Any] = {"width": 32, "height": 16, "frames": 7, "steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return modular_folders.save("ltx25", tmp_path_factory.mktemp("drawing") / "ltx25")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("found")


@pytest.fixture
def pipe(folder: Path, cache: Path, sim: ModuleType) -> Any:
    with pictured.without_videos(), newest.resizing():
        yield ballast.open_pipeline(folder, device="sim", cache_dir=cache)


def test_video_and_sound_are_those_of_its_own_call(folder: Path, pipe: Any) -> None:
    heard: list[torch.Tensor] = []

    def hear(stock: Any) -> None:
        stock.vocoder.register_forward_hook(lambda _module, _args, sound: heard.append(sound))

    given = {"width": 32, "height": 16, "num_frames": 7, "num_inference_steps": 1}
    _, pictures = modular_folders.stock(folder, prompt="a red boat", prepare=hear, **given)
    latents = pipe.sample(pipe.encode("a red boat"), **RUN)
    made = pipe.decode_all(latents)
    torch.testing.assert_close(made["images"], pictures, atol=1e-5, rtol=0)
    assert torch.equal(made["sound"].waveform, heard[0])


@pytest.mark.long
def test_each_picture_of_a_batch_has_its_own_noise(pipe: Any) -> None:
    cond = pipe.encode("a red boat")
    both = pipe.sample(cond, batch=2, seed=3, **RUN)
    alone = [pipe.sample(cond, seed=seed, **RUN) for seed in (3, 4)]
    made = pipe.decode(both)
    for video, latents in zip(made, alone, strict=True):
        assert torch.equal(video, pipe.decode(latents)[0])
    assert not torch.equal(*noise_of(both))


def test_it_draws_the_same_again_and_from_a_file(pipe: Any, tmp_path: Path) -> None:
    latents = pipe.sample(pipe.encode("a red boat"), **RUN)
    made = pipe.decode(latents)
    assert torch.equal(pipe.decode(latents), made)
    save_latents(latents, tmp_path / "boat.latent")
    assert torch.equal(pipe.decode(load_latents(tmp_path / "boat.latent")), made)


@pytest.mark.long
def test_out_of_memory_draws_nothing_away(pipe: Any, sim: ModuleType) -> None:
    """The second try draws what the first had drawn."""
    latents = pipe.sample(pipe.encode("a red boat"), **RUN)
    made = pipe.decode(latents)
    sim.reset_stats()
    pipe.decode(latents)
    with sim.fail_after(sim.stats().allocation_count * 3 // 4):
        assert torch.equal(pipe.decode(latents), made)
    assert sim.stats().allocated_bytes == 0


def test_latents_that_no_longer_say_their_noise_are_told(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    latents = pipe.sample(pipe.encode("a red boat"), **RUN).clone()
    made = pipe.decode(latents)
    (line,) = [each.getMessage() for each in caplog.records if "draws noise" in each.getMessage()]
    assert "\n" not in line and "seed 0" in line
    assert torch.equal(pipe.decode(latents), made)


@pytest.mark.parametrize(
    ("size", "words"), [({"frames": 1}, "frames is 1; .* takes 3 or more"), ({"height": 4}, "height is 4; .* from 6")]
)
def test_what_is_too_small_for_its_neighborhoods_is_refused_at_once(
    size: dict[str, int], words: str, pipe: Any
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        pipe.sample(pipe.encode("a red boat"), **RUN | size)
    assert "\n" not in str(refused.value)


def test_without_room_it_does_not_wait_for_stripes(
    folder: Path, cache: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At published size these took hours, of which the plan of them alone took minutes."""
    assert not can_stripe(pipe.decoder.module)
    monkeypatch.setattr(striped, "forecast", lambda *_, **__: pytest.fail("in stripes"))
    monkeypatch.setattr(striped, "run", lambda *_, **__: pytest.fail("in stripes"))
    latents = pipe.sample(pipe.encode("a red boat"), **RUN)
    narrow = ballast.open_pipeline(folder, device="sim", cache_dir=cache, vram="3.6MB")
    stage = next(each for each in narrow.plan(prompt="a red boat", **RUN).stages if each.name == "decode")
    assert "on the CPU" in str(stage)
    torch.testing.assert_close(narrow.decode(latents), pipe.decode(latents), atol=1e-6, rtol=0)
