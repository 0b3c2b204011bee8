"""Classes of diffusers whose calls do more than encode, sample and decode once: equal to stock, or refused."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import numpy as np
import pytest
import tiny
import torch
from ballast.pipelines.stock.signatures import needed_inputs, text_options
from diffusers import DiffusionPipeline
from pipeline_classes import odd_pipelines
from selection import few

Folders = Callable[[str], Path]
SIDE, FRAMES = 32, 9


@pytest.fixture(scope="module")
def odd_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = odd_pipelines.save(name, tmp_path_factory.mktemp("odd") / name)
        return made[name]

    return folder


def stock(folder: Path, **more: Any) -> torch.Tensor:
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        "a cat",
        num_inference_steps=2,
        width=SIDE,
        height=SIDE,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="np",
        **more,
    )
    return torch.as_tensor(made.frames if hasattr(made, "frames") else made.images).float()


def staged(pipe: Any, negative: str | None = None, **more: Any) -> torch.Tensor:
    frames = FRAMES if pipe.is_video else None
    cond = pipe.encode("a cat", negative)
    return pipe.decode(pipe.sample(cond, steps=2, width=SIDE, height=SIDE, frames=frames, **more))


CALLS: dict[str, dict[str, Any]] = {
    "cogview3": {},
    "sdxl": {},
    "krea2": {},
    "pag": {},
    "anyflow": {"num_frames": FRAMES},
    "hunyuandit": {"use_resolution_binning": False},
}
CALLS["sana_video"] = {"frames": FRAMES, "use_resolution_binning": False}
FAST = ("cogview3", "sdxl")


@pytest.mark.parametrize("negative", few([None, "bad"], "bad"))
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.long) for n in CALLS])
def test_staged_equals_stock(name: str, negative: str | None, odd_folders: Folders, sim: ModuleType) -> None:
    """With a negative prompt and without one, which is not the same as an empty one. AnyFlow guides above 1 only."""
    given = {} if negative is None else {"negative_prompt": negative}
    guidance = {"guidance_scale": 4.0} if negative else {}
    expected = stock(odd_folders(name), **CALLS[name], **given, **guidance)
    pipe = ballast.open_pipeline(odd_folders(name), device="sim")
    made = staged(pipe, negative, guidance=guidance.get("guidance_scale"))
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)
    assert sim.stats().allocated_bytes == 0
    assert negative is None or not torch.allclose(made, staged(pipe, "good", guidance=4.0), atol=1e-6)


@pytest.mark.parametrize("strategy", few(["streamed", "leafwise"], "leafwise"))
def test_a_table_kept_for_the_device_is_made_again(strategy: str, odd_folders: Folders, sim: ModuleType) -> None:
    """AnyFlow keeps its rotary table under the name of the device: moved away, it would be taken for one there."""
    pipe = ballast.open_pipeline(odd_folders("anyflow"), device="sim")
    expected = stock(odd_folders("anyflow"), num_frames=FRAMES)
    for _ in range(2):
        torch.testing.assert_close(staged(pipe, strategy=strategy), expected, atol=1e-4, rtol=0)


@pytest.mark.long
def test_what_runs_on_no_shapes_is_refused_without_advice_that_does_not_help(odd_folders: Folders) -> None:
    """No option of `encode` lets AnyFlow-FAR be compared."""
    folder = odd_folders("anyflow_far")
    refused = r"^AnyFlowFARPipeline cannot be staged: .* Run it with diffusers itself\.$"
    with pytest.raises(ValueError, match=refused):
        ballast.open_pipeline(folder, device="cpu").encode("a cat")
    with pytest.raises(ValueError, match=refused):
        ballast.open_pipeline(folder, device="cpu").encode("a cat", max_sequence_length=64)


def test_no_negative_is_not_an_empty_one(odd_folders: Folders) -> None:
    """SDXL takes zeros for none. The cache tells them apart too."""
    pipe = ballast.open_pipeline(odd_folders("sdxl"), device="cpu")
    none, empty = (pipe.encode("a cat", negative).tensors["negative_prompt_embeds"] for negative in (None, ""))
    assert not none.any() and empty.any()
    assert torch.equal(pipe.encode("a cat").tensors["negative_prompt_embeds"], none)
    assert pipe.encode("a cat").info["negative_prompt"] == ""


@pytest.mark.long
def test_a_scale_that_the_stock_call_fails_at_fails_alike(odd_folders: Folders, sim: ModuleType) -> None:
    """HunyuanDiT's perturbed attention has no way without guidance. With it, it is as stock."""
    given = {"use_resolution_binning": False, "negative_prompt": "bad"}
    expected = stock(odd_folders("hunyuandit_pag"), guidance_scale=4.0, **given)
    pipe = ballast.open_pipeline(odd_folders("hunyuandit_pag"), device="sim")
    torch.testing.assert_close(staged(pipe, "bad", guidance=4.0), expected, atol=1e-4, rtol=0)
    with pytest.raises(RuntimeError) as wanted:
        stock(odd_folders("hunyuandit_pag"), guidance_scale=1.0, **given)
    with pytest.raises(RuntimeError, match=re.escape(str(wanted.value))):
        staged(pipe, "bad", guidance=1.0)
    assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize("strategy", few(["auto", "leafwise"], "leafwise"))
def test_a_vae_of_pictures_decodes_the_frames_of_a_video(strategy: str, odd_folders: Folders, sim: ModuleType) -> None:
    """Latte's call gives its VAE 14 of the 16 at once, and then the rest. Its transformer takes 16, or one."""
    pipe, cond = ballast.open_pipeline(odd_folders("latte"), device="sim"), None
    for frames, scale in ((16, 4.0), (16, 1.0), (1, 4.0)):
        given = {"negative_prompt": "bad", "guidance_scale": scale, "clean_caption": False}
        expected = stock(odd_folders("latte"), video_length=frames, **given)
        cond = pipe.encode("a cat", "bad", clean_caption=False)
        latents = pipe.sample(cond, steps=2, width=SIDE, height=SIDE, frames=frames, guidance=scale, strategy=strategy)
        made = pipe.decode(latents)
        assert made.shape == (1, frames, SIDE, SIDE, 3)
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)
    assert sim.stats().allocated_bytes == 0
    with pytest.raises(ValueError, match=r"^frames is 9; \S+ takes 16 frames, or 1\.$"):
        pipe.sample(cond, steps=2, width=SIDE, height=SIDE, frames=9)
    two = pipe.encode(["a cat", "a dog"], "bad", clean_caption=False)
    several = rf"^{pipe.title} draws one at a time\. Encode one prompt, and leave batch out\.$"
    for wrong, more in ((two, {}), (cond, {"batch": 2})):
        for refuse in (pipe.sample, pipe.plan):
            with pytest.raises(ValueError, match=several):
                refuse(**{"cond": wrong, "steps": 2, "width": SIDE, "height": SIDE, "frames": 16, **more})


@pytest.mark.long
def test_a_vae_that_is_told_how_many_frames_there_are_is_refused(odd_folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"^LattePipeline cannot be staged: [^\n]+num_frames[^\n]+$"):
        ballast.open_pipeline(odd_folders("latte_temporal"), device="cpu")


@pytest.mark.parametrize("name", ["sana", "pixart_sigma"])
def test_pictures_have_the_size_that_was_asked_for(name: str, tiny_folders: Folders) -> None:
    """Their calls draw the nearest of some sizes by default, and resize what was decoded."""
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    made = pipe.decode(pipe.sample(pipe.encode("a cat"), width=64, height=32, steps=1))
    assert made.shape == (1, 32, 64, 3)
    with pytest.raises(ValueError, match="use_resolution_binning is True; sizes are drawn as they are asked for"):
        pipe.sample(pipe.encode("a cat"), width=64, height=32, steps=1, use_resolution_binning=True)


SECTIONS = "it draws a video in sections and decodes each while it samples, and stages decode once, at the end"
PICTURED = {
    "Cosmos2_5_TransferPipeline": SECTIONS,
    "WanAnimatePipeline": SECTIONS,
}


@pytest.mark.parametrize("name", PICTURED)
def test_what_starts_from_more_than_pictures_is_refused_when_opened(
    name: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folders("flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    with pytest.raises(ValueError) as caught:
        ballast.open_pipeline(folder, device="cpu")
    assert str(caught.value) == f"{name} cannot be staged: {PICTURED[name]}. Run it with diffusers itself."


def test_a_folder_without_its_controlnet_says_so(tiny_folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folders("flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxControlNetPipeline"}))
    with pytest.raises(ValueError, match="lacks controlnet, which FluxControlNetPipeline needs"):
        ballast.open_pipeline(folder, device="cpu")


@pytest.mark.parametrize("name", sorted({family.class_name for family in tiny.FAMILIES.values()}))
def test_what_starts_from_text_is_not(name: str) -> None:
    assert needed_inputs(getattr(diffusers, name)) == []


@pytest.mark.parametrize(
    ("name", "option"),
    [("sana", "complex_human_instruction"), ("flux", "max_sequence_length"), ("sd3", "prompt_2"), ("sd3", "clip_skip")],
)
def test_an_option_of_encode_is_not_taken_by_sample(name: str, option: str, tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    words = rf"^{option}: {name} reads this when it encodes the prompt. Give it to encode.$"
    with pytest.raises(TypeError, match=words):
        pipe.sample(pipe.encode("a cat"), steps=1, **{option: 1})


def test_options_that_the_loop_reads_are_not_those_of_encode() -> None:
    assert "joint_attention_kwargs" not in text_options(diffusers.FluxPipeline)
    assert "num_images_per_prompt" not in text_options(diffusers.FluxPipeline)
    assert "max_sequence_length" in text_options(diffusers.FluxPipeline)


INSTEAD = {
    "generator": ([torch.Generator()], "generator: give seed, or noise instead"),
    "callback_on_step_end": (print, "callback_on_step_end: give on_step instead"),
    "num_images_per_prompt": (2, "num_images_per_prompt: give a list of prompts, to encode instead"),
    "guidance_scale": (2.0, "guidance_scale: give guidance instead"),
}


@pytest.mark.parametrize("option", INSTEAD)
def test_arguments_of_diffusers_have_names_here(option: str, tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    value, words = INSTEAD[option]
    with pytest.raises(TypeError, match=words):
        pipe.sample(pipe.encode("a cat"), steps=1, **{option: value})


def test_several_videos_of_one_prompt_are_several_prompts(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("wan"), device="cpu")
    for refused in (lambda: pipe.encode("a cat", num_videos_per_prompt=2), lambda: pipe.plan(num_videos_per_prompt=2)):
        with pytest.raises(TypeError, match="num_videos_per_prompt: give a list of prompts, to encode instead"):
            refused()


@pytest.mark.parametrize("seed", [[1, 2], 1.5, True, None, 2**64, "7"])
def test_a_seed_is_one_whole_number(seed: Any, tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    with pytest.raises(ValueError, match="it takes one whole number of 64 bits"):
        pipe.sample(pipe.encode("a cat"), steps=1, seed=seed)


@pytest.mark.parametrize("name", few(["sd3", "flux", "wan", "qwenimage"], "flux", "wan"))
def test_noise_has_the_shape_that_is_drawn(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    pipe, encode, sample, _ = tiny.stages(name, tiny_folders(name), "sim")
    cond, drawn = encode(), []
    sample(cond, on_step=lambda step, steps, latents: drawn.append(latents.shape))
    noise = torch.randn(drawn[0])
    assert torch.isfinite(sample(cond, noise=noise)).all()
    for wrong in (noise[..., :-1], noise[None], noise.repeat(2, *[1] * (noise.ndim - 1))):
        with pytest.raises(ValueError, match=rf"the noise is \[.*\]; this run takes \[{drawn[0][0]}, "):
            sample(cond, noise=wrong)
    for wrong, words in ((noise.numpy(), "is ndarray"), (noise.int(), "dense"), (noise * torch.nan, "NaN")):
        with pytest.raises((TypeError, ValueError), match=words):
            sample(cond, noise=wrong)
    assert sim.stats().allocated_bytes == 0


def test_one_step_that_ends_at_pure_noise_is_refused(tiny_folders: Folders) -> None:
    """Stock divides zero by zero there: it draws nothing, or fails. One that ends lower is drawn as stock does."""
    size: dict[str, Any] = {"width": SIDE, "height": SIDE}
    for name in ("qwenimage", "ltx"):
        folder = tiny_folders(name)
        pipe = ballast.open_pipeline(folder, device="cpu")
        cond, given = pipe.encode("a cat", ""), {**size, "frames": FRAMES if pipe.is_video else None}
        with pytest.raises(ValueError, match=r"^steps is 1; the scheduler of .* takes at least 2\.$"):
            pipe.sample(cond, steps=1, **given)
        assert pipe.sample(cond, steps=2, **given).isfinite().all()
        whole = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        whole.set_progress_bar_config(disable=True)
        frames = {"num_frames": FRAMES} if pipe.is_video else {}
        with contextlib.suppress(IndexError):  # LTX looks its time up, which is not a number
            made = whole("a cat", num_inference_steps=1, **size, **frames, output_type="latent")[0]
            assert made.isnan().all()
    cond = (pipe := ballast.open_pipeline(tiny_folders("qwenimage"), device="cpu")).encode("a cat")
    with pytest.raises(ValueError, match=r"^sigmas end with 1; the scheduler of .* needs a lower end\.$"):
        pipe.sample(cond, steps=1, sigmas=[1.0], **size)
    whole = DiffusionPipeline.from_pretrained(tiny_folders("qwenimage"), local_files_only=True)
    generator = torch.Generator("cpu").manual_seed(0)
    expected = whole("a cat", sigmas=[0.9], **size, generator=generator, output_type="np").images
    made = pipe.decode(pipe.sample(cond, steps=1, sigmas=[0.9], **size))
    torch.testing.assert_close(made, torch.as_tensor(expected), atol=1e-5, rtol=0)


def test_a_schedule_says_how_many_steps_there_are(tiny_folders: Folders) -> None:
    """Stock code follows the list and passes over the number of steps: another one is refused."""
    pipe = ballast.open_pipeline(tiny_folders("qwenimage"), device="cpu")
    cond, size, sigmas, seen = pipe.encode("a cat"), {"width": SIDE, "height": SIDE}, [1.0, 0.6, 0.2], []
    for given in (sigmas, np.array(sigmas)):
        for call in (pipe.plan, functools.partial(pipe.sample, cond)):
            with pytest.raises(ValueError, match=r"^steps is 2, but sigmas has 3 values\. Leave steps out, or give"):
                call(steps=2, sigmas=given, **size)
    made = pipe.decode(
        pipe.sample(cond, sigmas=sigmas, **size, on_step=lambda step, steps, _: seen.append((step, steps)))
    )
    assert seen[-1] == (3, 3)
    whole = DiffusionPipeline.from_pretrained(tiny_folders("qwenimage"), local_files_only=True)
    generator = torch.Generator("cpu").manual_seed(0)
    expected = whole("a cat", sigmas=sigmas, **size, generator=generator, output_type="np").images
    torch.testing.assert_close(made, torch.as_tensor(expected), atol=1e-5, rtol=0)


def test_guidance_without_a_negative_prompt_is_told(tiny_folders: Folders) -> None:
    """Qwen-Image guides only where it is given a negative prompt, as its own call does; an empty one counts."""
    pipe = ballast.open_pipeline(tiny_folders("qwenimage"), device="cpu")
    none, empty = pipe.encode("a cat"), pipe.encode("a cat", "")
    words = ["Guidance has no effect without a negative prompt. Encode one; it may be empty."]
    assert pipe.sampling_notes(none, 4.0) == words
    assert pipe.sampling_notes(none) == pipe.sampling_notes(none, 1.0) == pipe.sampling_notes(empty, 4.0) == []
    assert torch.equal(pipe.sample(none, steps=2, guidance=4.0), pipe.sample(none, steps=2, guidance=1.0))
    assert not torch.equal(pipe.sample(empty, steps=2, guidance=4.0), pipe.sample(none, steps=2))


def test_what_no_stage_runs_is_told(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("qwenimage"), device="cpu")
    pipe.model.left_out = ("audio_vae", "vocoder")
    (note,) = pipe.sampling_notes(pipe.encode("a cat"))
    assert note.endswith(
        "runs without audio_vae, vocoder: what these make beside pictures, such as sound, is left out."
    )
