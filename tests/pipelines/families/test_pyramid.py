"""Pyramid-Flow, staged: both kinds against the reference's own videos, in every placement, and nothing left."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pyramid_folders
import pytest
import torch
from ballast.memory import manager
from ballast.pipelines.encoding.conditioning import Conditioning
from ballast.pipelines.models.pyramid_flow.vae_decode import decode_bytes, from_vae
from ballast.pipelines.sampling.inputs import Inputs, Request
from pyramid_folders import DATA
from safetensors.torch import load_file
from selection import few

KINDS = ("flux", "mmdit")
RUN = {"width": 128, "height": 64, "frames": 17, "steps": 1, "first_frame_steps": "1,1,1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pyramid")
    return {kind: pyramid_folders.save(kind, root / f"pyramid-flow-{kind}", ("384p", "768p")) for kind in KINDS}


def relative(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours - golden).abs().max() / golden.abs().max())


class Recorded:
    """The noise that was drawn when the golden video was made."""

    def __init__(self, golden: dict[str, torch.Tensor]) -> None:
        self.golden, self.taken = golden, 0

    def initial(self, *shape: int) -> torch.Tensor:
        return self.golden["initial_noise"]

    def __call__(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.taken += 1
        return self.golden[f"block_noise_{self.taken - 1}"]


def embeddings(golden: dict[str, torch.Tensor]) -> Conditioning:
    return Conditioning({name: golden[name] for name in golden if "prompt" in name}, {})


@pytest.mark.parametrize("strategy", few(["resident", "streamed", "leafwise"], "streamed"))
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("flux", "generate"),
        ("mmdit", "generate_i2v"),
        pytest.param("flux", "generate_i2v", marks=pytest.mark.soak),
        pytest.param("mmdit", "generate", marks=pytest.mark.soak),
    ],
)
def test_videos_are_the_references(
    kind: str, mode: str, strategy: str, folders: dict[str, Path], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_file(DATA / f"{kind}.{mode}.safetensors")
    facts = json.loads((DATA / "generate.json").read_text("utf-8"))
    monkeypatch.setattr(
        "ballast.pipelines.models.pyramid_flow.pyramid_model.SeededNoise", lambda *_: Recorded(golden)
    )  # once more for the dry run
    pipe = ballast.open_pipeline(folders[kind], device="sim")
    run: dict[str, Any] = {"width": facts["width"], "height": facts["height"], "frames": 8 * (facts["temp"] - 1) + 1}
    run |= {"first_frame_steps": facts["num_inference_steps"], "video_steps": facts["video_num_inference_steps"]}
    run |= {"guidance": facts["guidance_scale"], "video_guidance": facts["video_guidance_scale"]}
    if mode == "generate_i2v":
        run |= {"init_latents": golden["image_latent_mean"], "video_guidance": 4.0}
    latents = pipe.sample(embeddings(golden), **run, strategy=strategy)
    assert relative(from_vae(latents, kind), golden["latents"]) <= 1e-4
    assert sim.stats().allocated_bytes == 0
    record = manager("sim").timeline.stages[-1]
    sits = "resident" if strategy == "resident" else "streamed"
    assert [unit.placement for unit in record.units.values()] == [sits]
    assert record.planned.peak_vram_bytes >= record.peak_bytes
    if mode == "generate" and strategy == "resident":
        video = pipe.decode(latents)
        assert video.shape == (1, run["frames"], 64, 128, 3)
        expected = (golden["decoded"] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
        assert relative(video, expected) <= 1e-4
        assert sim.stats().allocated_bytes == 0


@pytest.mark.long  # test_pyramid_surface.py has one of the nodes
@pytest.mark.parametrize("kind", few(KINDS, "mmdit"))
def test_text_to_video_and_picture_to_video(kind: str, folders: dict[str, Path], sim: ModuleType) -> None:
    """The whole of both, from words: nothing is left after any stage, and the video goes on from its picture."""
    pipe = ballast.open_pipeline(folders[kind], device="sim", variant="384p")
    cond = pipe.encode("a red boat", "blurry")
    assert sim.stats().allocated_bytes == 0
    run = RUN | {"frames": 9}
    video = pipe.decode(pipe.sample(cond, **run))
    assert video.shape == (1, 9, 64, 128, 3) and video.min() >= 0 and video.max() <= 1 and video.std() > 0
    picture = pipe.encode_image(video[0, :1])
    assert sim.stats().allocated_bytes == 0
    assert picture.shape == (1, 16, 1, 8, 16)
    del run["width"], run["height"]
    latents = pipe.sample(cond, **run, init_latents=picture)
    torch.testing.assert_close(latents[:, :, :1], picture, atol=1e-4, rtol=0)
    assert pipe.decode(latents).shape == video.shape
    assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize("kind", few(KINDS, "mmdit"))
def test_placements_agree_bit_for_bit(kind: str, folders: dict[str, Path], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(folders[kind], device="sim")
    cond = pipe.encode("a red boat", "blurry")
    run = RUN | {"frames": 9}
    expected = pipe.sample(cond, **run)
    for strategy in ("streamed", "leafwise", "cpu"):
        assert torch.equal(pipe.sample(cond, **run, strategy=strategy), expected), strategy


@pytest.mark.long
def test_videos_of_a_batch_are_those_made_alone(folders: dict[str, Path], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(folders["flux"], device="sim")
    prompts = ["a red boat", "a much longer prompt about a green boat"]
    alone = [pipe.sample(pipe.encode(prompt, "blurry"), **RUN, seed=4 + i) for i, prompt in enumerate(prompts)]
    both = pipe.sample(pipe.encode(prompts, "blurry"), **RUN, seed=4)
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=0)


def test_every_step_is_reported_with_the_newest_frame(folders: dict[str, Path]) -> None:
    pipe = ballast.open_pipeline(folders["flux"], device="cpu")
    seen: list[Any] = []
    pipe.sample(pipe.encode("a boat"), **RUN, on_step=lambda *report: seen.append(report))
    assert [report[:2] for report in seen] == [(step, 9) for step in range(1, 10)]
    assert [tuple(report[2].shape[-3:]) for report in seen[:3]] == [(1, 2, 4), (1, 4, 8), (1, 8, 16)]


def test_nothing_is_left_by_an_error_that_is_held(folders: dict[str, Path], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(folders["flux"], device="sim")
    cond = pipe.encode("a boat")

    def stop(step: int, steps: int, latents: torch.Tensor) -> None:
        if step == 5:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped") as caught:
        pipe.sample(cond, **RUN, on_step=stop)
    gc.collect()
    assert sim.stats().allocated_bytes == 0, caught


def test_variants(folders: dict[str, Path]) -> None:
    for variant, named in (("auto", "768p"), ("384p", "384p")):
        pipe: Any = ballast.open_pipeline(folders["flux"], device="cpu", variant=variant)
        assert pipe.model.layout.variant == named
        arguments = pipe.model.sample_arguments(Inputs(pipe.model), Request(steps=10))
        size = {"768p": (16, 16, 96, 160), "384p": (16, 16, 48, 80)}[named]
        assert arguments["shape"] == size and arguments["num_inference_steps"] == 60 + 15 * 30


def test_plan(folders: dict[str, Path]) -> None:
    pipe = ballast.open_pipeline(folders["flux"], device="cpu")
    plan = pipe.plan(width=128, height=64, frames=33, vram="64MB")
    assert plan.fits and [stage.name for stage in plan.stages] == ["encode", "sample", "decode"]


@pytest.mark.parametrize(
    "budget", [pytest.param("auto", marks=pytest.mark.soak), pytest.param("less", marks=pytest.mark.long)]
)
def test_decoding_keeps_its_budget(budget: str, folders: dict[str, Path], sim: ModuleType) -> None:
    """With less room in stripes, which change nothing."""
    pipe: Any = ballast.open_pipeline(folders["flux"], device="sim")
    latents = torch.randn(1, 16, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    whole = pipe.decode(latents)
    if budget == "less":
        pipe.runner = pipe.runner.set(
            vram_bytes=pipe.decoder.size_bytes + decode_bytes(pipe.decoder_config, 192, 192) - 1
        )
        sim.reset_stats()
        torch.testing.assert_close(pipe.decode(latents), whole, atol=1e-4, rtol=0)
        assert sim.stats().peak_bytes <= pipe.vram_bytes
    assert sim.stats().allocated_bytes == 0


# Bad input

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 100}, "width is 100; pyramid-flow-flux takes multiples of 64, such as 128."),
    "frames": ({"frames": 20}, "takes 1 more than a multiple of 8, such as 17."),
    "steps": ({"video_steps": "10,10"}, "it takes 3 numbers of at least 1"),
    "words": ({"first_frame_steps": "ten"}, "it takes three numbers, such as '20,20,20'"),
    "part of the steps": ({"end_step": 1}, "has no argument end_step. It takes: "),
    "latents of a loop": ({"latents": torch.zeros(1, 16, 1, 8, 8)}, "latents are given, but no start_step"),
    "unknown": ({"eta": 1.0}, "has no argument eta. It takes: first_frame_steps"),
    "picture": ({"init_latents": torch.zeros(1, 4, 8, 16)}, "the first frame is [1, 4, 8, 16]; it takes"),
    "its size": ({"init_latents": torch.zeros(1, 16, 1, 8, 8)}, "the first frame is of 64 x 64, not 128 x 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_one_clear_line(case: str, folders: dict[str, Path]) -> None:
    pipe = ballast.open_pipeline(folders["flux"], device="cpu")
    given, says = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        pipe.sample(pipe.encode("a boat"), **RUN | given)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert pipe.denoisers[0].tier == "disk"


def test_folders_that_are_not_there(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown variant '4k' of Pyramid-Flow"):
        ballast.open_pipeline(folders["flux"], device="cpu", variant="4k")
    with pytest.raises(FileNotFoundError, match="has no diffusion_transformer_image/, only 768p, 384p"):
        ballast.open_pipeline(folders["flux"], device="cpu", variant="image")
    copied = Path(shutil.copytree(folders["flux"], tmp_path / "model"))
    shutil.rmtree(copied / "text_encoder_2")
    with pytest.raises(FileNotFoundError, match="has no text_encoder_2/"):
        ballast.open_pipeline(copied, device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_single_files(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The transformer and the VAE as files, the text encoders in folders of their own."""
    files = {part: tmp_path / f"pyramid_flow_{part}_384p.safetensors" for part in ("transformer", "vae")}
    for part, folder in (("transformer", "diffusion_transformer_384p"), ("vae", "causal_video_vae")):
        shutil.copy(folders[kind] / folder / "diffusion_pytorch_model.safetensors", files[part])
    with pytest.raises(ValueError, match="is the transformer alone. Name its vae and text as well"):
        ballast.open_pipeline(files["transformer"], device="cpu")
