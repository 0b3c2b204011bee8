"""Pipeline classes that no line of Ballast names: made-up ones, and popular ones that diffusers' tests do not build."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import torch
from ballast.pipelines.stock.obstacles import obstacle
from ballast.pipelines.stock.signatures import encoding_methods
from pictured.pictures import picture, pil
from pipeline_classes import made_up_classes
from pipeline_classes.judging import judge
from pipeline_classes.own_testers import own_testers

PROMPT, NEGATIVE = "a red boat", "blurry"


@pytest.fixture
def made_up(
    monkeypatch: pytest.MonkeyPatch, tiny_folders: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Path]:
    """Return a folder whose index names a made-up class, as if diffusers had it."""

    def folder(name: str, parts: str = "pixart_sigma") -> Path:
        monkeypatch.setattr(diffusers, name, getattr(made_up_classes, name), raising=False)
        made = shutil.copytree(tiny_folders(parts), tmp_path / name)
        index = json.loads((made / "model_index.json").read_text("utf-8"))
        (made / "model_index.json").write_text(json.dumps(index | {"_class_name": name}), "utf-8")
        return made

    return folder


def stock(folder: Path, **arguments: Any) -> torch.Tensor:
    """The class's own call on the CPU: pictures [B,H,W,3]."""
    cls = getattr(made_up_classes, folder.name)
    pipe = cls.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(**arguments, generator=torch.Generator("cpu").manual_seed(0), output_type="pt")
    return made.images.movedim(1, -1)


@pytest.mark.parametrize("guidance", [None, 5.0])
def test_a_new_class_opens(guidance: float | None, made_up: Callable[[str], Path], sim: ModuleType) -> None:
    """Its own arguments and defaults count, and no byte is left."""
    folder = made_up("MadeUpPipeline")
    given: dict[str, Any] = {"width": 48, "height": 32, "contrast": 1.5}
    scale = {} if guidance is None else {"guidance_scale": guidance}
    expected = stock(folder, prompt=PROMPT, negative_prompt=NEGATIVE, **given, **scale)
    pipe = ballast.open_pipeline(folder, device="sim")
    assert pipe.default_steps == 3
    latents = pipe.sample(pipe.encode(PROMPT, NEGATIVE), guidance=guidance, strategy="leafwise", **given)
    torch.testing.assert_close(pipe.decode(latents), expected, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0


def test_a_new_class_that_edits_opens(made_up: Callable[[str], Path], sim: ModuleType) -> None:
    folder, shown = made_up("MadeUpEditPipeline"), picture(48, 32)
    expected = stock(folder, prompt=PROMPT, image=pil(shown))
    pipe = ballast.open_pipeline(folder, device="sim")
    cond = pipe.encode(PROMPT)
    torch.testing.assert_close(pipe.decode(pipe.sample(cond, image=shown)), expected, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    with pytest.raises(ValueError, match="takes no noise: its call draws its own"):
        pipe.sample(cond, image=shown, noise=torch.zeros(1, 4, 4, 6))


def test_a_second_section_is_refused_before_the_first_is_drawn(made_up: Callable[..., Path], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(made_up("MadeUpSectionsPipeline", "wan"), device="sim")
    cond, size, seen = pipe.encode(PROMPT, NEGATIVE), {"width": 48, "height": 32, "steps": 2}, []
    assert pipe.sample(cond, **size, frames=5).shape[2] == 2
    for run in (pipe.plan, functools.partial(pipe.sample, on_step=lambda *step: seen.append(step))):
        with pytest.raises(ValueError, match="^frames is 13; .* draws so many in sections.* give at most 5"):
            run(cond=cond, **size, frames=13)
    assert not seen and sim.stats().allocated_bytes == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", own_testers())
def test_popular_classes_are_as_the_table_says(name: str, sim: ModuleType, tmp_path: Path) -> None:
    testers = own_testers()
    verdict = judge(getattr(diffusers, name), testers, tmp_path, sim)
    recorded = json.loads((Path(__file__).parents[2] / "data" / "pipeline_classes.json").read_text("utf-8"))[name]
    assert (verdict.word, verdict.reason) == (recorded["verdict"], recorded["reason"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WanAnimatePipeline", "draws a video in sections"),
        ("Cosmos2_5_TransferPipeline", "draws a video in sections"),
        ("GlmImagePipeline", "its vision_language_encoder writes tokens one by one"),
        ("Ideogram4Pipeline", "for one size of picture"),
        ("ZImageControlNetPipeline", "its ControlNet calls parts of its transformer"),
        ("FluxPipeline", ""),
    ],
)
def test_what_stands_against_stages_is_told(name: str, reason: str) -> None:
    found = obstacle(getattr(diffusers, name))
    assert reason in found and bool(reason) is bool(found)


def test_private_methods_count_where_there_are_no_others() -> None:
    assert encoding_methods(diffusers.StableDiffusionInstructPix2PixPipeline) == ["_encode_prompt"]
    assert encoding_methods(diffusers.ZImagePipeline) == ["encode_prompt"]
