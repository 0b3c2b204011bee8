"""NewBie as people meet it: loader nodes, options, image to image, the command line, and the help pages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast.commands.main
import folder_paths
import newbie_folders
import pytest
import torch
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.load_newbie import LoadNewbie, offered
from ballast.nodes.options import SamplerOptions
from ballast.nodes.plan import VramPlan
from ballast.nodes.sample import Sampler
from host import run_node
from places import ROOT
from tiny_parts import tokenizer

FOLDER = "NewBie-image-Exp0.1"
RUN = {"width": 64, "height": 48, "steps": 2}


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, str]]:
    """The official folder and the four split files in ComfyUI's models folders; the latter by the loader's inputs."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    models = Path(folder_paths.models_dir)
    source = newbie_folders.official(root / FOLDER)
    split = newbie_folders.split_files(models, source)
    yield {("diffusion_model" if part == "transformer" else part): file.name for part, file in split.items()}
    shutil.rmtree(root / FOLDER)
    for file in split.values():
        file.unlink()


def picture(reference: Any, **sampling: Any) -> torch.Tensor:
    cond = run_node(TextEncode, pipeline=reference, prompt="a red boat", negative_prompt="blurry").result[0]
    latent = run_node(Sampler, pipeline=reference, conditioning=cond, **RUN | sampling).result[0]
    return run_node(VaeDecode, pipeline=reference, latent=latent).result[0]


def test_both_loaders_give_the_same_picture(files: dict[str, str], sim: ModuleType) -> None:
    folder = run_node(LoadPipeline, pipeline=FOLDER, device="sim").result[0]
    split = run_node(LoadNewbie, **files, device="sim").result[0]
    split.open().model._tokenizers = {
        "gemma": tokenizer(),
        "jina": tokenizer(),
    }  # those in files have tests of their own
    expected = picture(folder)
    assert expected.shape == (1, 48, 64, 3)
    torch.testing.assert_close(picture(split), expected, atol=1e-5, rtol=0)
    sim.enable(total="4GB", tflops=1.0)
    assert "for 28." in run_node(VramPlan, pipeline=folder, width=64, height=48, vram_gb="64MB").result[1]
    split.open().manager.free()


def test_a_changed_file_is_another_pipeline(files: dict[str, str]) -> None:
    before = LoadNewbie.fingerprint_inputs(**files)
    assert before == LoadNewbie.fingerprint_inputs(**files)
    path = Path(folder_paths.get_full_path("vae", files["vae"]))
    stat = path.stat()
    path.touch()
    assert LoadNewbie.fingerprint_inputs(**files) != before or path.stat().st_mtime_ns == stat.st_mtime_ns


def test_the_wrong_file_is_named(files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"has no .*it is another model than its place says"):
        run_node(LoadNewbie, **files | {"gemma": files["jina"]}, device="cpu")


def test_each_file_is_taken_by_its_name() -> None:
    encoders = ["clip_l.safetensors", "gemma_2_2b_fp16.safetensors", "gemma_3_4b_it_bf16.safetensors",
                "jina_clip_v2_bf16.safetensors", "t5xxl_fp16.safetensors"]  # fmt: skip
    assert offered("gemma", encoders)[0] == "gemma_3_4b_it_bf16.safetensors"
    assert offered("jina", encoders)[0] == "jina_clip_v2_bf16.safetensors"
    vaes = ["flux2-vae.safetensors", "sd_vae_ft.safetensors", "taesd_decoder.safetensors", "FLUX1/ae.safetensors"]
    assert offered("vae", vaes)[0] == "FLUX1/ae.safetensors"
    models = ["a_first_model.safetensors", "NewBie-Image-Exp0.1-bf16.safetensors"]
    assert offered("diffusion_model", models)[0] == models[1]
    for name, files in (("gemma", encoders), ("jina", encoders), ("vae", vaes), ("diffusion_model", models)):
        assert sorted(offered(name, files)) == sorted(files), "each once, and nothing else"


def test_a_file_that_no_name_tells_is_asked_for(files: dict[str, str]) -> None:
    others = ["clip_l.safetensors", "t5xxl_fp16.safetensors"]
    first, *rest = offered("gemma", others)
    assert rest == others
    with pytest.raises(ValueError, match="gemma is not chosen.*gemma_3_4b_it_bf16.*Put it there") as caught:
        LoadNewbie.execute(**files | {"gemma": first}, vram_gb=0.0)
    assert "\n" not in str(caught.value)


def test_options_change_nothing_by_default() -> None:
    assert run_node(SamplerOptions).result[0] == {}
    chosen = {
        "compile": True,
        "attention": "sage",
        "sampler": "midpoint",
        "shift": 3.0,
        "cfg_trunc": 0.25,
        "renorm_cfg": 1.0,
    }
    assert run_node(SamplerOptions, **chosen).result[0] == chosen


def test_options_reach_the_sampler(files: dict[str, str], sim: ModuleType) -> None:
    reference = run_node(LoadPipeline, pipeline=FOLDER, device="sim").result[0]
    plain = picture(reference)
    for chosen in ({"sampler": "midpoint"}, {"shift": 2.0}, {"cfg_trunc": 0.01}, {"renorm_cfg": 0.5}):
        options = run_node(SamplerOptions, **chosen).result[0]
        assert not torch.allclose(picture(reference, options=options), plain, atol=1e-4), chosen
    native = run_node(SamplerOptions, attention="native").result[0]
    torch.testing.assert_close(picture(reference, options=native), plain, atol=1e-5, rtol=0)
    with pytest.raises((ValueError, ImportError), match="attention 'sage'|unknown attention"):
        picture(reference, options=run_node(SamplerOptions, attention="sage").result[0])
    reference.open().manager.free()


def test_image_to_image(files: dict[str, str], sim: ModuleType) -> None:
    reference = run_node(LoadPipeline, pipeline=FOLDER, device="sim").result[0]
    cond = run_node(TextEncode, pipeline=reference, prompt="a red boat", negative_prompt="").result[0]
    run = {"pipeline": reference, "conditioning": cond, "steps": 2}
    first = run_node(Sampler, **run, width=64, height=48).result[0]
    near, far = (
        run_node(Sampler, **run, latent=first, denoise=denoise, seed=9).result[0]["samples"] for denoise in (0.1, 1.0)
    )
    assert near.shape == first["samples"].shape
    assert (near - first["samples"]).abs().mean() < 0.5 * (far - first["samples"]).abs().mean()
    with pytest.raises(ValueError, match=r"denoise is 0\.5, but no latent is connected"):
        run_node(Sampler, **run, denoise=0.5)
    reference.open().manager.free()


def test_families_without_it_say_so(files: dict[str, str], tiny_folders: Any) -> None:
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    (root / "lumina").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    reference = run_node(LoadPipeline, pipeline="lumina", device="cpu").result[0]
    cond = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]
    with pytest.raises(ValueError, match=r"lumina starts from noise only\. Disconnect latent\."):
        run_node(Sampler, pipeline=reference, conditioning=cond, **RUN, latent={"samples": torch.ones(1, 16, 6, 8)})
    (root / "lumina").unlink()


def test_command_line(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / FOLDER
    out = tmp_path / "boat.png"
    run = ["generate", "--model", str(folder), "--prompt", "a boat", "--width", "64", "--height", "48", "--steps", "2"]
    assert ballast.commands.main.main([*run, "--device", "cpu", "--out", str(out)]) == 0
    assert out.is_file()
    capsys.readouterr()
    transformer = folder_paths.get_full_path("diffusion_models", files["diffusion_model"])
    assert ballast.commands.main.main(["plan", str(transformer), "--vram", "64MB"]) == 1
    assert "is the transformer alone. Name the files of its gemma, jina, vae as well" in capsys.readouterr().err


@pytest.mark.parametrize("node", [LoadNewbie, SamplerOptions])
def test_help_page_has_every_input(node: Any) -> None:
    schema = node.define_schema()
    text = (ROOT / "web" / "docs" / f"{schema.node_id}.md").read_text("utf-8")
    for slot in schema.inputs:
        assert re.search(rf"^\| {slot.id} \|", text, re.MULTILINE), slot.id
