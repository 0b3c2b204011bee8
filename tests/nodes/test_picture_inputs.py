"""Pictures in graphs: to start from, to paint into, to edit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import folder_paths
import pytest
import torch
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.load_files import LoadModelFiles
from ballast.nodes.plan import VramPlan
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.running import in_widgets
from ballast.pipelines.sampling.latents import WrongLatentsError
from node_runner import page, run_node
from pictured import pipelines as tiny_pictured
from pictured.pictures import mask, picture

WIDTH, HEIGHT = 48, 32
ONE, MASK = picture(WIDTH, HEIGHT), mask(WIDTH, HEIGHT)
OPAQUE = torch.cat([ONE, torch.ones(1, HEIGHT, WIDTH, 1)], dim=3)  # as of a loader that keeps alpha
SIZE = {"width": WIDTH, "height": HEIGHT}


@pytest.fixture
def models(tmp_path: Path, tiny_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/diffusers with Flux and Flux Kontext in it."""
    (tmp_path / "flux").symlink_to(tiny_folders("flux"), target_is_directory=True)
    tiny_pictured.save("kontext", tmp_path / "kontext")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusers", ([str(tmp_path)], {"folder"}))
    return tmp_path


def load(name: str) -> Any:
    return run_node(LoadPipeline, pipeline=name, device="sim").result[0]


def encode(reference: Any, **more: Any) -> Any:
    return run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="", **more).result[0]


def sample(reference: Any, conditioning: Any, **more: Any) -> torch.Tensor:
    given = {
        "pipeline": reference,
        "conditioning": conditioning,
        **SIZE,
        "steps": 4,
        "guidance": 0.0,
        "seed": 0,
        **more,
    }
    return run_node(Sampler, **given).result[0]["samples"]


def test_a_controlnet_is_chosen_beside_the_model(
    models: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From models/controlnet: the latents of the pipeline that has it in its folder. Other folders are not offered."""
    tiny_pictured.save("flux_controlnet", whole := models / "whole")
    reference = run_node(LoadPipeline, pipeline="whole", device="sim", keep_loaded=False).result[0]
    expected = sample(reference, encode(reference), control=ONE)
    (models / "controlnets").mkdir()
    shutil.copytree(whole / "controlnet", models / "controlnets" / "flux" / "canny")
    shutil.copytree(whole / "transformer", models / "controlnets" / "other")
    index = json.loads((whole / "model_index.json").read_text("utf-8"))
    del index["controlnet"]
    (whole / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}), "utf-8")
    with pytest.raises(ValueError, match="controlnet 'flux/canny' is not in models/controlnet any more"):
        LoadPipeline.execute.__wrapped__(LoadPipeline, pipeline="whole", vram_gb=0.0, controlnet="flux/canny")
    own = ([str(models / "controlnets")], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "controlnet", own)
    for node in (LoadPipeline, LoadModelFiles):
        assert node.INPUT_TYPES()["optional"]["controlnet"][1]["options"] == ["none", "flux/canny"]
    given = {"pipeline": "whole", "device": "sim", "keep_loaded": False}
    reference = run_node(LoadPipeline, **given, controlnet="flux/canny").result[0]
    assert torch.equal(sample(reference, encode(reference), control=ONE), expected)
    assert sim.stats().allocated_bytes == 0
    path, prints = models / "controlnets" / "flux" / "canny" / "config.json", []
    for _ in range(2):
        prints.append(LoadPipeline.fingerprint_inputs(pipeline="whole", controlnet="flux/canny"))
        path.write_text(path.read_text("utf-8") + " ", "utf-8")
    assert prints[0] != prints[1]


def test_a_picture_and_a_mask_reach_the_run(models: Path, sim: ModuleType) -> None:
    flux = load("flux")
    cond = encode(flux)
    pipe = ballast.open_pipeline(models / "flux", device="sim")
    run: dict[str, Any] = {**SIZE, "steps": 4, "image": ONE}
    assert torch.equal(sample(flux, cond, image=OPAQUE), pipe.sample(cond, **run))
    painted = sample(flux, cond, image=ONE, mask=MASK, strength=0.5)
    assert torch.equal(painted, pipe.sample(cond, **run, mask=MASK, strength=0.5))
    text = run_node(VramPlan, pipeline=flux, **SIZE, steps=4, guidance=0.0, vram_gb="1", image=ONE).result[1]
    assert "encode picture" in text


def test_pictures_to_edit_stay_with_the_prompt(models: Path, sim: ModuleType) -> None:
    kontext = load("kontext")
    plain, one = encode(kontext), encode(kontext, images=OPAQUE)
    two = encode(kontext, images=ONE, images_2=picture(32, 48, 1), images_3=picture(64, 48, 2))
    assert [len(cond.pictures) for cond in (plain, one, two)] == [0, 1, 3]
    assert torch.equal(one.pictures[0], ONE[0])
    options = {"options": {"_auto_resize": False}}
    assert not torch.equal(sample(kontext, plain), sample(kontext, one, **options))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strength": 0.5}, "strength is 0.5, but there is no picture to start from. Connect image, too."),
        ({"mask": MASK}, "there is a mask, but no picture to paint into."),
        ({"image": ONE, "last_image": ONE}, "flux takes no image, last_image: diffusers has no pipeline"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, Any], words: str, models: Path, sim: ModuleType) -> None:
    flux = load("flux")
    with pytest.raises(ValueError, match=f"^{words}"):
        sample(flux, encode(flux), **given)


def test_a_clip_takes_no_pictures() -> None:
    with pytest.raises(
        ValueError, match="^images are for Ballast's pipelines, but a CLIP is connected. Disconnect them.$"
    ):
        encode(object(), images=ONE)


def test_a_picture_of_another_shape_is_said_to_be_stretched(models: Path, sim: ModuleType) -> None:
    reference = load("flux")
    conditioning = encode(reference)
    wide, tall = picture(96, 32), picture(32, 96)
    for given, told in (
        ({"image": wide}, ["image, 96 x 32"]),
        ({"image": tall, "mask": mask(32, 96)}, ["image and mask, 32 x 96"]),
        ({"image": picture(2 * WIDTH, 2 * HEIGHT)}, []),
    ):
        pipe = reference.open()
        notes = pipe.picture_notes(conditioning, WIDTH, HEIGHT, **given)
        assert [note.split(": ")[1].split(". ")[0] for note in notes] == told
        assert all(note.startswith("Stretched to 48 x 32, which is another shape: ") for note in notes)
        assert pipe.picture_notes(conditioning, **given) == [], "drawn in its own size"
    with page() as seen:
        sample(reference, conditioning, image=wide)
    assert seen.texts[-1][1].startswith("Stretched to 48 x 32"), seen.texts


def test_prompt_weights_are_said_to_be_plain_text(models: Path, sim: ModuleType) -> None:
    pipe = load("demo: shapes").open()  # whose encoder is a language model
    for prompt, weights in (
        ("a (red:1.3) boat", "(red:1.3)"),
        ("a ((old) boat:0.8)", ""),
        ("(big red boat: .5)", "(big red boat: .5)"),
        ("a boat (16:9)", ""),
        ("a (red) boat, note: 1.3", ""),
    ):
        notes = [note for note in pipe.encode(prompt, "").notes if "weights" in note]
        assert notes == [f"Prompt weights are read as plain text here, as in {weights}. Remove them."] * bool(weights)


@pytest.mark.parametrize("half", ["\ud800", "\udfff"])
@pytest.mark.parametrize("where", ["prompt", "negative_prompt"])
def test_half_of_a_character_is_refused_in_one_line(half: str, where: str, models: Path, sim: ModuleType) -> None:
    given = {"prompt": "a boat", "negative_prompt": "", where: f"a{half} boat"}
    told = rf"^a prompt has half of a character in it, U\+{ord(half):04X}\. Write that place anew\.$"
    with pytest.raises(ValueError, match=told):
        run_node(TextEncode, pipeline=load("flux"), **given)


@pytest.mark.parametrize(
    "said, told",
    [
        ("no. Raise the ram budget to 20.2 MB.", "no. Raise ram_gb to 0.02."),
        (
            "no. Raise the vram budget to 6.01 GB, or choose a smaller size.",
            "no. Raise vram_gb to 6.01, or choose a smaller size.",
        ),
        ("no. Raise the vram budget to 1 KB, or x.", "no. Raise vram_gb to 0.001, or x."),
        (
            "NewBie starts from a latent: encode the picture first, and give it that.",
            "NewBie takes no image: connect it to FP32 VAE Encode, and that to latent.",
        ),
        (
            "flux takes no mask: diffusers has no pipeline of its parts that does. Leave it out.",
            "flux takes no mask: diffusers has no pipeline of its parts that does. Disconnect it, or set it to 0.",
        ),
        (
            "wan makes as many frames as it is given. Leave frames out.",
            "wan makes as many frames as it is given. Set frames to 0.",
        ),
        ("no. Leave it out; guidance is its own scale.", "no. Set true_cfg to 0: guidance is its own scale."),
        (
            "flux starts from more than text. Give it: image, mask.",
            "flux starts from more than text. Connect image, mask.",
        ),
        (
            "q reads its pictures with the prompt. Give them to encode, and none to sample.",
            "q reads its pictures with the prompt. Connect them to Staged Text Encode, and none here.",
        ),
        (
            "q draws one at a time. Encode one prompt, and leave batch out.",
            "q draws one at a time. Encode one prompt, and set batch to 1.",
        ),
    ],
)
def test_what_the_library_asks_for_is_said_in_widgets(said: str, told: str) -> None:
    assert in_widgets(said) == told


def test_wrong_latents_have_a_short_name() -> None:
    assert WrongLatentsError.__module__ == "ballast"
