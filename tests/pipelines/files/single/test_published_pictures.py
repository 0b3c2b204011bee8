"""Files without a base, of models that start from pictures: filling, editing, image to video."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import gguf
import pytest
import tiny
import torch
from ballast.pipelines.files.single import published
from diffusers import DiffusionPipeline
from pictured import pipelines
from pictured.pictures import mask, picture, pil
from safetensors.torch import load_file, save_file
from single_files import state_of, transformer_file
from single_files.comfy_folders import write_gguf
from single_files.published_facts import facts_of, files_of

WIDTH, HEIGHT, STEPS, SEED = 48, 32, 2, 3
ONE, OTHER, MASK = picture(WIDTH, HEIGHT), picture(HEIGHT, WIDTH, 1), mask(WIDTH, HEIGHT)
FILM = {"image": ONE, "guidance": 3.0, "frames": 9}
STOCK_FILM = {"image": pil(ONE), "guidance_scale": 3.0, "num_frames": 9}
# What is given with the prompt, to the sampler, and to the stock pipeline.
TASKS: dict[str, tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]] = {
    "flux_fill": ([], {"image": ONE, "mask": MASK}, {"image": pil(ONE), "mask_image": pil(MASK)}),
    "qwen_edit": ([ONE], {"guidance": 3.0}, {"image": pil(ONE), "true_cfg_scale": 3.0}),
    "qwen_edit_plus": ([ONE, OTHER], {"guidance": 3.0}, {"image": [pil(ONE), pil(OTHER)], "true_cfg_scale": 3.0}),
    "wan_i2v": ([], FILM, STOCK_FILM),
    "wan_flf": ([], FILM | {"last_image": OTHER}, STOCK_FILM | {"last_image": pil(OTHER)}),
}
PLUS = partial(pipelines.qwen_edit, diffusers.QwenImageEditPlusPipeline)
SOON = ("flux_fill",)  # what the others have beside is tested below
MARKS = dict.fromkeys(("qwen_edit", "qwen_edit_plus", "wan_flf"), pytest.mark.soak)  # the longest
EACH = [name if name in SOON else pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in TASKS]
Given = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The folder of a tiny model, and its parts as files, of which the configs come with the pack."""

    def made(name: str) -> tuple[Path, dict[str, Any]]:
        build = PLUS if name == "qwen_edit_plus" else pipelines.BUILDERS[name]
        with pipelines.without_videos():
            tiny.seeded(build)().save_pretrained(folder := tmp_path / name)
        facts_of(name, folder, tmp_path / "facts")
        monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
        return folder, {"cache_dir": tmp_path / "cache", **files_of(name, folder, tmp_path)}

    return made


def stock(folder: Path, more: dict[str, Any]) -> torch.Tensor:
    with pipelines.without_videos():
        pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(SEED)
    run = {"width": WIDTH, "height": HEIGHT, "num_inference_steps": STEPS, "generator": generator, "output_type": "np"}
    made = pipe(prompt="a boat", **run, **more)
    return torch.as_tensor(made.images if hasattr(made, "images") else made.frames).float()


@pytest.mark.parametrize("name", EACH)
def test_files_alone_draw_what_the_stock_pipeline_does(name: str, given: Given, sim: ModuleType) -> None:
    """Resident and streamed, and nothing is left on the device."""
    (folder, files), (images, sampling, stocking) = given(name), TASKS[name]
    negative = name.startswith(("qwen", "wan"))
    expected = stock(folder, stocking | ({"negative_prompt": "blurry"} if negative else {}))
    pipe = ballast.open_pipeline(device="sim", **files)
    cond = pipe.encode("a boat", "blurry" if negative else None, **({"images": images} if images else {}))
    for strategy in ("resident", "streamed"):
        latents = pipe.sample(cond, width=WIDTH, height=HEIGHT, steps=STEPS, seed=SEED, strategy=strategy, **sampling)
        assert sim.stats().allocated_bytes == 0
        torch.testing.assert_close(pipe.decode(latents), expected, atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0


def refusal(files: dict[str, Any], **change: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        ballast.open_pipeline(**{"device": "cpu", **files, **change})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_sees_the_first_frame(given: Given, tmp_path: Path, tiny_folders: Callable[[str], Path]) -> None:
    """Is asked for, may lie in a file with an encoder of texts, and is refused where it is another's."""
    _, files = given("wan_i2v")
    path = files["image_encoder"]
    assert "a file for its image_encoder (CLIPVisionModel) as well" in refusal(files, image_encoder=None)
    assert "there is no file" in refusal(files, image_encoder=tmp_path / "gone.safetensors")
    state = load_file(path)
    save_file(
        state | {"text_model.encoder.layers.0.mlp.fc1.bias": torch.ones(3)}, whole := tmp_path / "clip.safetensors"
    )
    opened = ballast.open_pipeline(**files | {"device": "cpu", "image_encoder": whole})
    unit = opened.model.components["image_encoder"].unit("")
    unit.load()
    found = unit.module.state_dict()
    assert found and all(torch.equal(state[f"vision_model.{name}"], tensor) for name, tensor in found.items())
    first = next(name for name in state if "fc1" in name)
    for change, said in (
        ({first: None}, f"lacks {first.removeprefix('vision_model.')}"),
        ({"other.weight": torch.ones(2)}, "has no place for, such as other.weight"),
        ({first: torch.ones(3)}, "as [3]"),
    ):
        left = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        save_file(left, bad := tmp_path / "bad.safetensors")
        assert said in refusal(files, image_encoder=bad) and str(bad) in refusal(files, image_encoder=bad)
    plain = transformer_file("wan", base := tiny_folders("wan"), tmp_path / "t2v.safetensors")
    assert "given as image_encoder, and the base has none" in refusal({}, path=plain, base=base, image_encoder=path)
    assert "takes no image_encoder" in refusal({}, path=tiny_folders("wan"), image_encoder=path)
    assert "takes no transformer_2" in refusal({}, path=tiny_folders("wan"), transformer_2=path)


def test_an_encoder_that_reads_text_alone(given: Given, tmp_path: Path) -> None:
    """Of the right model, in GGUF, which has no tower for pictures."""
    folder, files = given("qwen_edit")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2VL, 99)
    state = {name: tensor for name, tensor in state_of(folder, "text_encoder").items() if "visual" not in name}
    named = {
        str(names.get_name(name.replace("language_model.", ""), (".weight", ".bias"))): t for name, t in state.items()
    }
    write_gguf(path := tmp_path / "Qwen2.5-VL-7B-Instruct-F32.gguf", named, "qwen2vl")
    said = refusal(files, text_encoders=[path])
    assert "lacks visual." in said and "It reads text alone: get a safetensors file that has the tower" in said
    assert "reads text alone" not in refusal(files, text_encoders=[files["vae"]])


def test_a_tokenizer_without_a_word_for_pictures(given: Given, tiny_folders: Callable[[str], Path]) -> None:
    """Its prompts would have no place for them."""
    _, files = given("qwen_edit")
    files |= {"device": "cpu", "tokenizers": {"qwen": tiny_folders("qwenimage") / "tokenizer"}}
    with pytest.raises(ValueError, match=r"has no <\|image_pad\|>, which stands for a picture"):
        ballast.open_pipeline(**files).encode("a boat", images=[ONE])


def test_prompts_with_pictures_are_read_as_from_the_folder(given: Given, tmp_path: Path) -> None:
    """By a processor whose tokenizer and whose settings lie apart, and an encoder without a head."""
    folder, files = given("qwen_edit_plus")
    with pipelines.without_videos():
        expected = ballast.open_pipeline(folder, device="cpu").encode("a boat", "blurry", images=[ONE, OTHER]).tensors
    found = ballast.open_pipeline(device="cpu", **files).encode("a boat", "blurry", images=[ONE, OTHER]).tensors
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


def test_what_a_processor_is_made_of_counts(given: Given, tmp_path: Path) -> None:
    """Embeddings are kept for it: for its tokenizer, and for what it does with pictures."""
    _, files = given("qwen_edit")
    path = tmp_path / "facts" / "parts" / "seeing" / "preprocessor_config.json"
    found = [ballast.open_pipeline(device="cpu", **files).model.components["processor"].identity()]
    path.write_text(
        json.dumps(json.loads(path.read_text("utf-8")) | {"size": {"shortest_edge": 784, "longest_edge": 784}})
    )
    found.append(ballast.open_pipeline(device="cpu", **files).model.components["processor"].identity())
    vocabulary = files["tokenizers"]["qwen"] / "tokenizer_config.json"
    vocabulary.write_text(vocabulary.read_text("utf-8") + " ", "utf-8")
    found.append(ballast.open_pipeline(device="cpu", **files).model.components["processor"].identity())
    assert found[0] != found[1] != found[2] != found[0]
