"""Classes that read pictures in ways of their own: by a hook, by a part of an encoder, or into several layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import ballast
import diffusers
import pytest
import torch
from ballast.memory import manager
from ballast.pipelines.planning.plans import SEEING
from diffusers import DiffusionPipeline
from diffusers.pipelines.joyimage import image_processor
from pictured import pipelines as tiny_pictured
from pictured.pictures import picture, pil
from pipeline_classes.quirks import small
from transformers import SiglipImageProcessorPil

Folders = Callable[[str], Path]
ONE, OTHER = picture(48, 32), picture(32, 48, 1)
STEPS, SEED = 2, 3
pytestmark = pytest.mark.long
EDITS = {"qwen_layered": "true_cfg_scale", "joy": "guidance_scale", "joy_plus": "guidance_scale"}


@pytest.fixture(autouse=True, scope="module")
def _tiny() -> Iterator[None]:
    """Pictures of a few pixels, where these classes draw a million; on any device, as torchvision takes them."""
    read = SiglipImageProcessorPil.process_image
    with (
        mock.patch.object(
            SiglipImageProcessorPil,
            "process_image",
            lambda self, image, *args, **more: read(self, image.cpu(), *args, **more),
        ),
        tiny_pictured.without_videos(),
        small(diffusers.QwenImageLayeredPipeline),
        mock.patch.object(image_processor, "find_best_bucket", return_value=(32, 48)),
    ):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    return tiny_pictured.folders_in(tmp_path_factory.mktemp("edits"), tiny_folders)


def stock(folder: Path, **given: Any) -> torch.Tensor:
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(SEED)
    torch.manual_seed(SEED)  # JoyImage draws from what its VAE encodes without the generator
    with torch.inference_mode():
        made = pipe(num_inference_steps=STEPS, generator=generator, output_type="pt", return_dict=False, **given)[0]
    return (torch.cat(made) if isinstance(made, list) else made).float().movedim(-3, -1)


def edited(pipe: Any, prompt: str = "a boat", guidance: float = 3.0, **more: Any) -> torch.Tensor:
    cond = pipe.encode(prompt, "blurry", images=[ONE])
    return pipe.decode(pipe.sample(cond, steps=STEPS, seed=SEED, guidance=guidance, **more))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_equals_stock(name: str, folders: Folders, sim: ModuleType) -> None:
    """With guidance and without; the prompt and the picture count."""
    image = {"images": [pil(ONE)]} if name == "joy_plus" else {"image": pil(ONE)}
    pipe = ballast.open_pipeline(folders(name), device="sim")
    for scale in (3.0, 1.0):
        given = {"prompt": "a boat", "negative_prompt": "blurry", EDITS[name]: scale, **image}
        expected = stock(folders(name), **given)
        made = edited(pipe, guidance=scale, strategy="streamed" if scale == 1.0 else "auto")
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0
    assert not torch.equal(edited(pipe, "two cats"), edited(pipe))


def test_a_picture_is_read_with_the_prompt(folders: Folders) -> None:
    """JoyImage is not encoded without the picture, and then sampled with one."""
    pipe = ballast.open_pipeline(folders("joy"), device="cpu")
    with pytest.raises(ValueError, match=r"^[^\n]* reads a picture with its prompt. Give images.$"):
        pipe.encode("a boat")


def test_several_prompts_of_a_list_of_pictures_are_refused(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """JoyImage-Plus takes a list for each prompt, and decodes a picture for each, where a stage ends at the first."""
    pipe: Any = ballast.open_pipeline(folders("joy_plus"), device="cpu")
    with pytest.raises(ValueError, match=r"^[^\n]* edits pictures by one prompt at a time. Encode one.$"):
        pipe.encode(["a boat", "a cat"], images=[ONE])

    def decodes_first(*args: Any) -> torch.Tensor:
        return torch.zeros(1, 16, 1, 4, 6)

    cond = pipe.encode("a boat", images=[ONE])
    monkeypatch.setattr(pipe.model, "_call_stock", decodes_first)
    assert pipe.model.denoise(cond, {}, None, torch.device("cpu"), {}).shape[0] == 1
    cond.info["prompts"] = "2"
    with pytest.raises(ValueError, match=r"^[^\n]* draws one prompt at a time. Encode one.$"):
        pipe.model.denoise(cond, {}, None, torch.device("cpu"), {})


def test_a_part_of_an_encoder_sees_the_first_frame(folders: Folders, sim: ModuleType) -> None:
    """The encoder comes for it in a stage of its own, which is planned."""
    sizes = {"width": 48, "height": 32}
    given = {"prompt": "a boat", "negative_prompt": "blurry", "image": pil(ONE), "num_frames": 9, **sizes}
    expected = stock(folders("motif_i2v"), **given)
    pipe = ballast.open_pipeline(folders("motif_i2v"), device="sim")
    run = {"steps": STEPS, "frames": 9, **sizes}
    cond = pipe.encode("a boat", "blurry")
    made = pipe.decode(pipe.sample(cond, seed=SEED, image=ONE, **run))
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    own = (SEEING, {"text_encoder"})
    assert [(stage.name, set(stage.units)) for stage in manager("sim").timeline.stages].count(own) == 1
    plan = pipe.plan(cond=cond, image=ONE, **run)
    assert [(stage.name, {unit.unit for unit in stage.units}) for stage in plan.stages].count(own) == 1
    other = pipe.sample(cond, seed=SEED, image=ONE.flip(2), **run)
    assert not torch.equal(other, pipe.sample(cond, seed=SEED, image=ONE, **run))
