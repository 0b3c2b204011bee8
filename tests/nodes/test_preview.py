"""Previews of each step: in the host's colours where it has them, else in false ones, none where none are wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import numpy as np
import pytest
import torch
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.folders import DEMO
from ballast.nodes.shared.preview import FalseColours, as_grid
from ballast.nodes.shared.progress import latent_format
from comfy.cli_args import LatentPreviewMethod, args
from host import page, run_node


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[None]:
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    root.mkdir(parents=True, exist_ok=True)
    for name in ("lumina2", "flux"):
        (root / name).symlink_to(tiny_folders(name), target_is_directory=True)
    yield
    shutil.rmtree(root)


def previews(name: str, size: int) -> list[Any]:
    """What the page gets while a model samples three steps."""
    reference = run_node(LoadPipeline, pipeline=name, device="sim").result[0]
    given = {"pipeline": reference, "prompt": "a red circle on a blue background, left", "negative_prompt": ""}
    conditioning = run_node(TextEncode, **given).result[0]
    with page() as shown:
        run_node(Sampler, pipeline=reference, conditioning=conditioning, width=size, height=size, steps=3)
    return [preview for _, total, preview in shown.progress if total == 3]  # the others are of what is read


@pytest.mark.parametrize(
    ("name", "size"), [(DEMO, 64), pytest.param("lumina2", 32, marks=pytest.mark.soak), ("flux", 32)]
)
def test_every_picture_model_shows_its_steps(
    name: str, size: int, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    shown = previews(name, size)
    assert all(preview is not None for preview in (shown[0], shown[-1]))
    kind, picture, most = shown[-1]
    assert kind == "JPEG" and picture.mode == "RGB" and max(picture.size) <= most
    assert np.asarray(picture).std(axis=(0, 1)).max() > 20, "something is drawn"
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.NoPreviews)
    assert set(previews(name, size)) == {None}


def test_shapes_show_in_false_colours() -> None:
    """A square of one kind on a ground of another, under noise."""
    noise = torch.Generator().manual_seed(0)
    square = torch.zeros(16, 16)
    square[4:12, 4:12] = 1
    kinds = torch.randn(2, 12, 1, 1, generator=noise)
    grid = kinds[0] * square + kinds[1] * (1 - square) + 0.1 * torch.randn(12, 16, 16, generator=noise)
    pixels = np.asarray(FalseColours()(grid).resize((16, 16)))[..., 0].astype(int)
    inside, outside = pixels[6:10, 6:10], pixels[:2]
    assert abs(inside.mean() - outside.mean()) > 150


def test_colours_stay_what_they_are_from_step_to_step() -> None:
    """The decomposition may turn an axis at any step: without a guide colours jump to their opposites."""
    noise = torch.Generator().manual_seed(1)
    grid = torch.randn(8, 12, 12, generator=noise)
    colours = FalseColours()
    before = np.asarray(colours(grid)).astype(int)
    for _ in range(20):
        grid = grid + 0.02 * torch.randn(8, 12, 12, generator=noise)
        after = np.asarray(colours(grid)).astype(int)
        assert abs(after - before).mean() < 40
        before = after


def test_tokens_are_laid_out_as_the_picture_is() -> None:
    tokens = torch.arange(24.0).reshape(1, 24, 1)
    assert torch.equal(as_grid(tokens, 96, 64), torch.arange(24.0).reshape(1, 4, 6))
    assert as_grid(tokens, 0, 0) is None, "no square"
    assert as_grid(torch.zeros(1, 16, 5), 0, 0).shape == (5, 4, 4)
    assert as_grid(torch.zeros(2, 4, 3, 5, 6), 48, 40).shape == (4, 5, 6), "the newest frame"
    assert as_grid(torch.zeros(7), 0, 0) is None


def test_two_channels_are_a_picture_too() -> None:
    assert FalseColours()(torch.randn(2, 4, 4)).mode == "RGB"


def test_the_host_knows_none_of_these() -> None:
    """Else the first test would show nothing of ours."""
    assert latent_format({"_class_name": "AutoencoderKL", "scaling_factor": 0.8803851332325603}) is None
