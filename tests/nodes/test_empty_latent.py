"""Empty latents of ComfyUI's own nodes in the sampler: a size, never a picture to start from."""

from __future__ import annotations

from typing import Any

import comfy.latent_formats
import pytest
import torch
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.empty_latent import is_empty, size_of
from node_runner import page, run_node
from test_picture_inputs import encode, load, models  # noqa: F401

NOTHING = {"width": 0, "height": 0, "frames": 0, "batch": 1}


def latent(*shape: int, ratio: int = 0) -> dict[str, Any]:
    return {"samples": torch.zeros(shape), **({"downscale_ratio_spacial": ratio} if ratio else {})}


def draw(reference: Any, cond: Any, **more: Any) -> torch.Tensor:
    given = {"width": 0, "height": 0, "steps": 2, "guidance": 0.0, "seed": 0, **more}
    return run_node(Sampler, pipeline=reference, conditioning=cond, **given).result[0]["samples"]


def test_it_gives_size_and_batch(models: Any, sim: Any) -> None:  # noqa: F811
    reference = load("flux")
    cond = encode(reference)
    wanted = draw(reference, cond, width=48, height=32, batch=2)
    for shape, ratio in (((2, 4, 4, 6), 8), ((2, 16, 4, 6), 8), ((2, 16, 4, 6), 0), ((2, 128, 2, 3), 16)):
        with page() as seen:
            assert torch.equal(draw(reference, cond, latent=latent(*shape, ratio=ratio)), wanted), (shape, ratio)
        told = [text for _, text in seen.texts]
        assert any(text.startswith("The empty latent gives the size: 48 x 32.") for text in told), told


def test_widgets_that_say_another_size_are_refused(models: Any, sim: Any) -> None:  # noqa: F811
    reference = load("flux")
    cond = encode(reference)
    for asked, told in (
        ({"width": 64}, "width is 64, but the empty latent says 48. Set it to 0, or disconnect latent."),
        ({"batch": 3}, "batch is 3, but the empty latent says 2. Set it to 1, or disconnect latent."),
    ):
        with pytest.raises(ValueError, match=told):
            draw(reference, cond, latent=latent(2, 16, 4, 6, ratio=8), **asked)
    draw(reference, cond, latent=latent(2, 16, 4, 6, ratio=8), width=48, batch=2)


def test_a_picture_is_no_size(models: Any, sim: Any) -> None:  # noqa: F811
    reference = load("flux")
    cond = encode(reference)
    with pytest.raises(ValueError, match="starts from noise only. Disconnect latent."):
        draw(reference, cond, latent={"samples": torch.full((1, 16, 4, 6), 1e-6)})


@pytest.mark.parametrize(
    "shape, form, size",
    [
        ((1, 16, 3, 60, 104), "Wan21", (832, 480, 9)),
        ((1, 16, 1, 60, 104), "Wan21", (832, 480, 0)),
        ((1, 48, 21, 44, 80), "Wan22", (1280, 704, 81)),
        ((1, 128, 13, 16, 24), "LTXV", (768, 512, 97)),
        ((3, 128, 16, 16), "Flux2", (256, 256, 0)),
    ],
)
def test_videos_and_other_formats(shape: tuple[int, ...], form: str, size: tuple[int, int, int]) -> None:
    kind = getattr(comfy.latent_formats, form)
    width, height, frames = size
    told = size_of({"samples": torch.zeros(shape)}, kind(), NOTHING)
    expected = {"width": width, "height": height, "batch": shape[0]} | ({"frames": frames} if frames else {})
    assert told == expected


def test_a_latent_of_no_known_format_is_refused() -> None:
    with pytest.raises(ValueError, match="has 7 channels, which say no size here"):
        size_of({"samples": torch.zeros(1, 7, 4, 4)}, None, NOTHING)


@pytest.mark.parametrize("thing", [None, {}, {"samples": None}, {"samples": torch.zeros(2, 3)}, {"samples": [0]},
                         {"samples": torch.zeros(1, 4, 0, 2)}, {"samples": torch.ones(1, 4, 2, 2)}],
                         ids=["nothing", "no samples", "none", "flat", "list", "of no rows", "picture"])  # fmt: skip
def test_what_is_no_empty_latent(thing: Any) -> None:
    assert not is_empty(thing)


def test_the_demo_takes_it(sim: Any) -> None:
    reference = run_node(LoadPipeline, pipeline="demo: shapes", device="sim").result[0]
    cond = encode(reference)
    assert draw(reference, cond, latent=latent(1, 16, 8, 8, ratio=8)).shape[-2:] == (8, 8)
