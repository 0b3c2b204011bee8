"""Pyramid-Flow as people meet it: nodes, the command line, docs/models.md and the published sizes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import ballast.commands.main
import folder_paths
import pyramid_folders
import pytest
import thumbnails
import torch
from ballast.bench.downloads import full_size
from ballast.memory.planning.runplan import seconds
from ballast.memory.rates import ASSUMED
from ballast.memory.sizes import format_bytes
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.encode_image import VaeEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.options import SamplerOptions
from ballast.nodes.sample import Sampler
from comfy.cli_args import LatentPreviewMethod, args
from host import page, run_node
from PIL import Image
from places import ROOT

FOLDER = "pyramid-flow-miniflux"
RUN = {"width": 128, "height": 64, "frames": 9, "steps": 1}
GIB = 2**30


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    yield pyramid_folders.save("flux", root / FOLDER, ("384p", "768p"))
    shutil.rmtree(root / FOLDER)


def test_graph_makes_a_video_and_goes_on_from_a_picture(folder: Path, sim: ModuleType) -> None:
    reference = run_node(LoadPipeline, pipeline=FOLDER, device="sim", variant="384p").result[0]
    cond = run_node(TextEncode, pipeline=reference, prompt="a red boat", negative_prompt="").result[0]
    options = run_node(SamplerOptions, first_frame_steps="1,1,2", video_steps="1,1,1").result[0]
    assert options == {"first_frame_steps": "1,1,2", "video_steps": "1,1,1"}
    run = {"pipeline": reference, "conditioning": cond, "options": options}
    with page() as shown:
        latent = run_node(Sampler, **run, **RUN).result[0]
    assert shown.progress[-1][:2] == (7, 7)
    video, film, _ = run_node(VaeDecode, pipeline=reference, latent=latent).result
    assert video.shape == (9, 64, 128, 3)
    assert film.get_components().frame_rate == 24 and torch.equal(film.get_components().images, video)
    start = run_node(VaeEncode, pipeline=reference, image=video[:1]).result[0]
    size = {key: value for key, value in RUN.items() if key not in ("width", "height")}
    going_on = run_node(Sampler, **run, **size, latent=start).result[0]["samples"]
    torch.testing.assert_close(going_on[:, :, :1], start["samples"], atol=1e-4, rtol=0)
    reference.open().manager.free()
    assert sim.stats().allocated_bytes == 0


def test_newest_frame_is_previewed(folder: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In false colours: ComfyUI knows none for this VAE. Not where previews are off."""
    reference = run_node(LoadPipeline, pipeline=FOLDER, device="sim", variant="384p").result[0]
    cond = run_node(TextEncode, pipeline=reference, prompt="a red boat", negative_prompt="").result[0]
    run = {"pipeline": reference, "conditioning": cond, **RUN}
    for method, previews in ((LatentPreviewMethod.Auto, True), (LatentPreviewMethod.NoPreviews, False)):
        monkeypatch.setattr(args, "preview_method", method)
        with page() as shown:
            run_node(Sampler, **run)
        assert bool(shown.progress[-1][2]) == previews
        if previews:
            kind, picture, _ = shown.progress[-1][2]
            assert kind == "JPEG" and picture.size == (512, 256) and len(picture.getcolors(1 << 20)) > 8
    reference.open().manager.free()


def test_command_line_writes_a_film(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = ["generate", "--model", str(folder), "--prompt", "a boat", "--frames", "9", "--steps", "1", "--device", "cpu"]
    out = tmp_path / "boat.webp"
    assert ballast.commands.main.main([*run, "--width", "128", "--height", "64", "--out", str(out)]) == 0
    assert Image.open(out).n_frames == 9  # type: ignore[attr-defined]
    picture = tmp_path / "first.png"
    Image.new("RGB", (128, 64), "red").save(picture)
    film = tmp_path / "boat.mp4"
    status = ballast.commands.main.main([*run, "--image", str(picture), "--out", str(film)])
    if importlib.util.find_spec("av") is None:
        assert status == 1 and re.search(r'needs PyAV: ".+" -m pip install av', capsys.readouterr().err)
    else:
        assert status == 0 and film.stat().st_size > 0


def test_pictures_to_start_from_are_refused_where_none_are_taken(
    tiny_folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    picture = tmp_path / "first.png"
    Image.new("RGB", (64, 64)).save(picture)
    run = ["generate", "--model", str(tiny_folders("lumina2")), "--prompt", "a boat", "--device", "cpu"]
    assert ballast.commands.main.main([*run, "--image", str(picture), "--out", str(tmp_path / "x.png")]) == 1
    assert (
        "lumina2 takes no image: diffusers has no pipeline of its parts that does. Leave it out."
        in capsys.readouterr().err
    )


def test_help_page_has_every_input() -> None:
    text = (ROOT / "web" / "docs" / "BallastVAEEncode.md").read_text("utf-8")
    for slot in VaeEncode.define_schema().inputs:
        assert re.search(rf"^\| {slot.id} \|", text, re.MULTILINE), slot.id


# At the published sizes


def test_repackaged_single_files_are_the_same(tmp_path: Path) -> None:
    """The transformer and the VAE as files, without configs: each weight is found, in its published size."""
    made = full_size.build_pyramid(tmp_path / FOLDER)
    names = {"vae": "causal_video_vae", "transformer": "diffusion_transformer_768p"}
    files = {part: made / name / "diffusion_pytorch_model.safetensors" for part, name in names.items()}
    shutil.move(files["transformer"], tmp_path / "pyramid_flow_miniflux_bf16_v2.safetensors")
    pipe: Any = ballast.open_pipeline(
        tmp_path / "pyramid_flow_miniflux_bf16_v2.safetensors", device="cpu", vae=files["vae"], text=made
    )
    assert (pipe.model.layout.kind, pipe.model.layout.variant) == ("flux", "768p")
    assert all(unit.source() is not None for unit in (*pipe.denoisers, pipe.decoder))
    assert sum(p.numel() for p in pipe.denoisers[0].module.parameters()) == pytest.approx(1.972e9, rel=1e-3)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Plans of miniFlux, with 64 GB of RAM, at assumed rates."""
    if not os.environ.get("BALLAST_SOAK"):
        pytest.skip("takes two minutes: in make check")
    root = tmp_path_factory.mktemp("full")
    made = full_size.build_pyramid(root / FOLDER)
    pipe = ballast.open_pipeline(made, device="cpu", cache_dir=root / "cache")

    def plan(width: int, height: int, frames: int, gigabytes: int) -> Any:
        asked = {"width": width, "height": height, "frames": frames, "ram": "64GB", "rates": ASSUMED}
        return pipe.plan(vram=f"{gigabytes}GB", **asked)

    return plan


def test_5_seconds_of_768p_run_in_8_gb(planned: Callable[..., Any]) -> None:
    """The whole run, the transformer resident. Users have seen it fill 24 GB."""
    plan = planned(1280, 768, 121, 8)
    assert plan.fits and plan.peak_vram_bytes <= 8 * GIB
    assert plan.placement == "resident" and plan.steps == 60 + 15 * 30
    assert plan.stages[1].peak_vram_bytes <= 5 * GIB
    assert planned(1280, 768, 121, 4).fits


@pytest.mark.parametrize(("frames", "length"), [(121, 5), pytest.param(241, 10, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "size"), [("384p", (640, 384)), ("768p", (1280, 768))])
def test_docs_tell_what_the_planner_says(
    name: str, size: tuple[int, int], frames: int, length: int, planned: Callable[..., Any]
) -> None:
    models = (ROOT / "docs" / "models.md").read_text("utf-8")
    plans = [planned(*size, frames, gigabytes) for gigabytes in (4, 6, 8, 12, 16, 24)]
    cells = [f"{format_bytes(plan.peak_vram_bytes)}, {seconds(plan.step_seconds)}" for plan in plans]
    row = f"| Pyramid-Flow miniFlux {name}, {length} s | 10 a stage, 7 | 3.67 GB | {' | '.join(cells)} |"
    assert row in models, row
    assert all(plan.fits for plan in plans)


def test_the_thumbnails_show_what_the_planner_says(planned: Callable[..., Any]) -> None:
    plans = [planned(640, 384, 121, gigabytes) for gigabytes in (6, 12)]
    for name in ("5 Pyramid-Flow video", "6 Pyramid-Flow picture to video"):
        thumbnails.check(name, plans)
