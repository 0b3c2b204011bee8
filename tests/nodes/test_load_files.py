"""Load Model Files: a pipeline by the files of its parts, in the folders that ComfyUI has for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import comfy.utils
import folder_paths
import pytest
import tiny
import torch
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.load_files import LoadModelFiles
from ballast.nodes.sample import Sampler
from ballast.nodes.shared import folders
from ballast.pipelines.files.single import published
from host import page, run_node
from pictured import pipelines as tiny_pictured
from pictured.pictures import picture
from places import clear
from safetensors.torch import save_file
from single_files import base_of, state_of
from single_files.comfy_folders import write_gguf
from single_files.original_names import original, original_vae
from single_files.published_facts import facts_of, files_of

CHOSEN = {
    "transformer": "flux/flux1-dev-F32.gguf",
    "text_encoder": "t5xxl.safetensors",
    "text_encoder_2": "clip_l.safetensors",
    "vae": "ae.sft",
    "base": "FLUX.1-dev",
}


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[Path]:
    """ComfyUI's models, with a tiny Flux in files, and its folder, which has none of their weights."""
    root = Path(folder_paths.models_dir)
    unet, clips, texts, vaes = (root / name for name in ("unet/flux", "clip", "text_encoders", "vae"))
    made = (unet, clips, texts, vaes, root / "diffusion_models", root / "diffusers")
    for folder in made:
        folder.mkdir(parents=True, exist_ok=True)
    flux = tiny_folders("flux")
    write_gguf(unet / "flux1-dev-F32.gguf", original("flux", state_of(flux)))
    save_file(state_of(flux, "text_encoder_2"), texts / "t5xxl.safetensors")
    save_file(state_of(flux, "text_encoder"), clips / "clip_l.safetensors")
    save_file(original_vae(state_of(flux, "vae")), vaes / "ae.sft")
    base_of(flux, root / "diffusers" / "FLUX.1-dev", "text_encoder", "text_encoder_2", "vae")
    (unet / "notes.txt").write_text("no model")
    yield root
    for folder in {root / "unet", *made} - {unet}:
        clear(folder)


def load(**more: Any) -> Any:
    return run_node(LoadModelFiles, **{**CHOSEN, "device": "sim", **more}).result[0]


def drawn(name: str, reference: Any, negative: str = "blurry, grey") -> tuple[torch.Tensor, torch.Tensor]:
    family = tiny.FAMILIES[name]
    given = {"pipeline": reference, "prompt": "a red boat", "negative_prompt": negative}
    conditioning = run_node(TextEncode, **given).result[0]
    width, height = family.size
    size = {"width": width, "height": height, "frames": family.frames or 0, "steps": 2, "guidance": family.guidance}
    latent = run_node(Sampler, pipeline=reference, conditioning=conditioning, **size).result[0]
    return latent["samples"], run_node(VaeDecode, pipeline=reference, latent=latent).result[0]


def test_files_draw_what_the_stock_pipeline_does(tiny_folders: Callable[[str], Path], sim: ModuleType) -> None:
    """With encoders in an order of their own; the nodes after it work as behind Load Pipeline."""
    expected = tiny.stock(tiny_folders("flux"), max_sequence_length=512)
    reference = load(keep_loaded=False)
    assert reference.open().title == "flux1-dev-F32"
    latents, picture = drawn("flux", reference)
    torch.testing.assert_close(latents, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(picture, expected[1], atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    assert load(keep_loaded=False) == reference, "equal references share a pipeline"


def test_two_experts(models: Path, tmp_path: Path, sim: ModuleType) -> None:
    """Wan 2.2, whose second transformer is a file too."""
    folder = tmp_path / "wan22"
    pipe: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(folder)
    expected = tiny.stock(folder, max_sequence_length=512)
    for part, noise in (("transformer", "high"), ("transformer_2", "low")):
        save_file(original("wan", state_of(folder, part)), models / "diffusion_models" / f"wan2.2_{noise}.safetensors")
    base_of(folder, models / "diffusers" / "wan22", "transformer_2")
    chosen = {"transformer": "wan2.2_high.safetensors", "transformer_2": "wan2.2_low.safetensors", "base": "wan22"}
    reference = load(**dict.fromkeys(("text_encoder", "text_encoder_2", "vae"), "none"), **chosen)
    torch.testing.assert_close(drawn("wan", reference)[0], expected[0].float(), atol=1e-5, rtol=0)


def test_a_controlnet_beside_files(
    models: Path, tiny_folders: Callable[[str], Path], sim: ModuleType, tmp_path: Path
) -> None:
    """The latents of the model's folder with that ControlNet."""
    whole = tiny_pictured.save("flux_controlnet", tmp_path / "whole")
    shutil.copytree(whole / "controlnet", folder := models / "controlnet" / "canny")
    try:
        run: dict[str, Any] = {"steps": 2, "width": 48, "height": 32, "control": picture(48, 32)}
        made = []
        for pipe in (
            ballast.open_pipeline(tiny_folders("flux"), "sim", controlnet=folder, keep=False),
            load(controlnet="canny", keep_loaded=False).open(),
        ):
            made.append(pipe.sample(pipe.encode("a red boat"), **run))
        torch.testing.assert_close(*made, atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0
    finally:
        shutil.rmtree(folder)


def test_without_a_base(
    models: Path,
    tiny_folders: Callable[[str], Path],
    sim: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configs come with the pack, the tokenizers with ComfyUI; the node says which model it is taken for."""
    folder = tiny_folders("flux")
    expected = tiny.stock(folder, max_sequence_length=512)
    facts_of("flux", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    for name, part in (("sd1_tokenizer", "tokenizer"), ("text_encoders/t5_tokenizer", "tokenizer_2")):
        shutil.copytree(folder / part, tmp_path / "comfy" / name)
    monkeypatch.setattr(comfy.utils, "__file__", str(tmp_path / "comfy" / "utils.py"))
    with page() as shown:
        reference = load(base="none")
    assert [text for _, text in shown.texts][-1] == "configs of flux"
    torch.testing.assert_close(drawn("flux", reference)[0], expected[0].float(), atol=1e-5, rtol=0)
    shutil.rmtree(tmp_path / "comfy" / "sd1_tokenizer")
    with pytest.raises(ValueError, match="needs the tokenizer of CLIP"):
        load(base="none", dtype="float32")


def test_files_of_all_folders_are_offered(models: Path) -> None:
    inputs = {slot.id: slot for slot in LoadModelFiles.define_schema().inputs}
    (models / "diffusion_models" / "z.SAFETENSORS").touch()
    (models / "diffusion_models" / "old.ckpt").touch()
    options = {name: LoadModelFiles.INPUT_TYPES()["required"][name][1]["options"] for name in CHOSEN}
    assert options["transformer"][0] == "choose a file" == inputs["transformer"].default
    assert {CHOSEN["transformer"], "z.SAFETENSORS"} <= set(options["transformer"])
    assert not [name for name in options["transformer"] if name.endswith((".txt", ".ckpt"))]
    assert options["text_encoder"] == ["none", "clip_l.safetensors", "t5xxl.safetensors"]
    assert options["base"][:2] == ["none", "FLUX.1-dev"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transformer": "choose a file"}, "transformer is not chosen"),
        ({"text_encoder": "none"}, "text_encoder_2"),
        ({"base": "none"}, "Give base as well"),
        ({"vae": "none"}, "vae"),
        ({"text_encoder_3": "t5xxl.safetensors"}, "no other file is for"),
        ({"text_encoder_4": "t5xxl.safetensors"}, "no other file is for"),
        ({"transformer_2": CHOSEN["transformer"]}, "both transformers"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(change: dict[str, str], said: str, sim: ModuleType) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(**change)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_gone(models: Path) -> None:
    """Between the list on the page and the run."""
    given = {**CHOSEN, "vram_gb": 0.0}
    with pytest.raises(ValueError, match="vae: models/vae has no 'gone.safetensors' any more"):
        LoadModelFiles.execute.__wrapped__(LoadModelFiles, **given | {"vae": "gone.safetensors"})


def test_a_changed_file_is_another_pipeline(models: Path) -> None:
    before = LoadModelFiles.fingerprint_inputs(**CHOSEN, vram_gb=0.0)
    path = models / "clip" / "clip_l.safetensors"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**12))
    assert LoadModelFiles.fingerprint_inputs(**CHOSEN, vram_gb=0.0) != before


def test_wan_2_1_from_a_picture(models: Path, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose first frame an encoder sees, in a folder of its own."""
    tiny_pictured.save("wan_i2v", folder := tmp_path / "wan_i2v")
    facts_of("wan_i2v", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("wan_i2v", folder, tmp_path)
    shutil.copytree(folder / "tokenizer", tmp_path / "comfy" / "umt5")
    monkeypatch.setattr(folders, "_TOKENIZERS", {"umt5": "umt5"})
    monkeypatch.setattr(comfy.utils, "__file__", str(tmp_path / "comfy" / "utils.py"))
    put = {"transformer": "diffusion_models", "text_encoder": "text_encoders", "vae": "vae"}
    put |= {"image_encoder": "clip_vision"}
    given |= {"transformer": given["path"], "text_encoder": given["text_encoders"][0]}
    chosen = {part: f"wan_i2v_{part}.safetensors" for part in put}
    for part, kind in put.items():
        (models / kind).mkdir(exist_ok=True)
        shutil.copy(given[part], models / kind / chosen[part])
    try:
        chosen |= {"text_encoder_2": "none", "base": "none"}
        run: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "frames": 9, "image": picture(48, 32)}
        with page() as shown:
            pipes = [load(**chosen, keep_loaded=False).open(), ballast.open_pipeline(folder, "sim", keep=False)]
        assert [text for _, text in shown.texts][-1] == "configs of wan_i2v"
        made = [pipe.sample(pipe.encode("a boat", "blurry"), **run) for pipe in pipes]
        torch.testing.assert_close(*made, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="a file for its image_encoder"):
            load(**chosen | {"image_encoder": "none"})
        before = LoadModelFiles.fingerprint_inputs(**chosen)
        os.utime(models / "clip_vision" / chosen["image_encoder"], ns=(0, 10**18 * 3))
        assert LoadModelFiles.fingerprint_inputs(**chosen) != before
    finally:
        shutil.rmtree(models / "clip_vision")
        for part in ("transformer", "text_encoder", "vae"):
            (models / put[part] / chosen[part]).unlink()
