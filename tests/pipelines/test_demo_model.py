"""The bundled demo model draws what the prompt says, loaded by stock diffusers."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ballast
import numpy as np
import pytest
import thumbnails
import torch
from ballast.memory.rates import ASSUMED
from PIL import Image, ImageFilter
from places import ROOT
from shape_judge import Verdict, judge

if TYPE_CHECKING:
    from diffusers import Lumina2Pipeline

DEMO = ROOT / "demo"
MODEL = DEMO / "shapes"
PLAN = "2 VRAM Plan before a run"
GRID = 48
BATCH = 16


def _shapes_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_shapes_data", DEMO / "shapes_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = _shapes_data()
# A stride without common factors walks through all shapes, colours, backgrounds and places.
GRID_LABELS = [data.LABELS[(index * 67) % len(data.LABELS)] for index in range(GRID)]


def _expected(label: tuple[int, int, int, int]) -> tuple[str, str, str, str]:
    shape, colour, back, place = label
    return data.COLOUR_NAMES[colour], data.COLOUR_NAMES[back], data.PLACES[place], data.SHAPES[shape]


def _found(verdict: Verdict) -> tuple[str | None, str, str | None, str | None]:
    return verdict.colour, verdict.background, verdict.place, verdict.kind


def _pictures(batch: torch.Tensor) -> list[Image.Image]:
    bytes_ = ((batch + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array) for array in bytes_]


@pytest.fixture(scope="module")
def pipe() -> Lumina2Pipeline:
    from diffusers import Lumina2Pipeline

    pipeline = Lumina2Pipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _draw(pipe: Lumina2Pipeline, prompts: list[str], **options: Any) -> list[Image.Image]:
    images: list[Image.Image] = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        seeds = [torch.Generator().manual_seed(start + index) for index in range(len(part))]
        options = {"num_inference_steps": 20, "guidance_scale": 4.0, **options}
        images += pipe(prompt=part, generator=seeds, **options).images
    return images


# ------------------------------------------------------------------------------------------ the judge


def test_the_grid_covers_every_value() -> None:
    for index, count in enumerate((3, 6, 6, 3)):
        assert len({label[index] for label in GRID_LABELS}) == count
    assert len(set(GRID_LABELS)) == GRID


def test_the_judge_is_right_about_drawn_pictures() -> None:
    drawn = data.render(torch.tensor(data.LABELS), torch.Generator().manual_seed(1))
    for label, picture in zip(data.LABELS, _pictures(drawn), strict=True):
        verdict = judge(picture, data.COLOURS)
        assert _found(verdict) == _expected(label)
        assert verdict.fit > 0.9


def test_the_judge_bears_noise_and_blur() -> None:
    generator = torch.Generator().manual_seed(2)
    drawn = data.render(torch.tensor(data.LABELS), generator)
    noisy = drawn + 0.06 * torch.randn(drawn.shape, generator=generator)
    for label, picture in zip(data.LABELS, _pictures(noisy), strict=True):
        blurred = picture.filter(ImageFilter.GaussianBlur(0.8))
        assert _found(judge(blurred, data.COLOURS)) == _expected(label)


def test_the_judge_finds_nothing_in_a_plain_picture() -> None:
    verdict = judge(Image.new("RGB", (64, 64), data.COLOURS["blue"]), data.COLOURS)
    assert verdict == Verdict(None, "blue", None, None, 0.0)


# ------------------------------------------------------------------------------------------ the model


def test_the_folder_is_small_and_all_weights_are_safetensors() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 * 1000 * 1000
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert {path.parent.name for path in files if path.suffix == ".safetensors"} == {
        "text_encoder",
        "transformer",
        "vae",
    }


def test_the_index_names_public_classes() -> None:
    index = json.loads((MODEL / "model_index.json").read_text())
    assert index["_class_name"] == "Lumina2Pipeline"
    assert {name: value[1] for name, value in index.items() if isinstance(value, list)} == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Gemma2Model",
        "tokenizer": "PreTrainedTokenizerFast",
        "transformer": "Lumina2Transformer2DModel",
        "vae": "AutoencoderKL",
    }


def test_the_tokenizer_splits_words(pipe: Lumina2Pipeline) -> None:
    def words(text: str) -> list[str]:
        return pipe.tokenizer.convert_ids_to_tokens(pipe.tokenizer(text).input_ids)

    assert words("A Red circle,LEFT zebra") == ["<bos>", "a", "red", "circle", ",", "left", "<unk>"]
    assert words("") == ["<bos>"]
    assert "<unk>" not in words(pipe.system_prompt + " <Prompt Start> " + data.caption(data.LABELS[0]))
    for name in (*data.COLOUR_NAMES, *data.SHAPES, *data.PLACES, *data.MIDDLE_WORDS):
        assert words(name) == ["<bos>", name]


@pytest.mark.soak
def test_the_pictures_show_what_the_prompts_say(pipe: Lumina2Pipeline) -> None:
    images = _draw(pipe, [data.caption(label) for label in GRID_LABELS])
    assert {image.size for image in images} == {(data.SIZE, data.SIZE)}
    verdicts = [judge(image, data.COLOURS) for image in images]
    found = np.array([_found(verdict) for verdict in verdicts])
    right = found == np.array([_expected(label) for label in GRID_LABELS])
    rates = dict(zip(("colour", "background", "place", "kind"), right.mean(0).tolist(), strict=True))
    rates["fit"] = float(np.median([verdict.fit for verdict in verdicts]))
    print(rates)
    assert rates["colour"] >= 0.95, rates
    assert rates["background"] >= 0.95, rates
    assert rates["place"] >= 0.95, rates
    assert rates["kind"] >= 0.85, rates
    assert rates["fit"] >= 0.8, rates


def test_other_wordings_are_understood(pipe: Lumina2Pipeline) -> None:
    prompts = {
        "red circle, blue background, on the left": ("red", "blue", "left", "circle"),
        "A white background with a green triangle on the right.": ("green", "white", "right", "triangle"),
        "in the centre, a yellow square on a purple background": ("yellow", "purple", "center", "square"),
        "purple circle on white, middle": ("purple", "white", "center", "circle"),
        "a nice blue square on the right of a yellow background": ("blue", "yellow", "right", "square"),
        "White triangle, red background, left": ("white", "red", "left", "triangle"),
    }
    found = [_found(judge(image, data.COLOURS)) for image in _draw(pipe, list(prompts))]
    wrong = [(text, got) for (text, want), got in zip(prompts.items(), found, strict=True) if got != want]
    assert len(wrong) <= 1, wrong


def test_the_thumbnail_of_the_plan_shows_what_the_planner_says(sim: ModuleType) -> None:
    """At assumed rates: those of a simulated card are of no card."""
    workflow = json.loads((ROOT / "workflows" / f"{PLAN}.json").read_text("utf-8"))
    values = next(node["widgets_values"] for node in workflow["nodes"] if node["type"] == "BallastVRAMPlan")
    width, height, steps, guidance, budgets = values[:5]
    pipe = ballast.open_pipeline(ROOT / "demo" / "shapes", device="sim")
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "rates": ASSUMED}
    thumbnails.check(PLAN, [pipe.plan(vram=budget.strip(), **asked) for budget in budgets.split(",")])
