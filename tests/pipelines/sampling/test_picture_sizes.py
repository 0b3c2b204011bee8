"""One check of the size, in runs and plans alike: what it accepts runs, and what it refuses is told in one line."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.pipelines.sampling.picture_sizes import PictureSizes, most_tokens, multiple_of
from diffusers.models.embeddings import CogView3PlusPatchEmbed
from diffusers.models.transformers import transformer_sana_video
from diffusers.models.transformers.transformer_bria_fibo2 import BriaFibo2Transformer2DModel
from diffusers.models.transformers.transformer_cosmos import CosmosLearnablePositionalEmbed, CosmosRotaryPosEmbed
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5RoPE3D, Kandinsky5Transformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from places import ROOT

Folders = Callable[[str], Path]
DEMO = ROOT / "demo" / "shapes"
# Multiple, and the largest width and height.
KNOWN = {
    "flux": (16, None),
    "chroma": (16, None),
    "qwenimage": (16, None),
    "pixart_sigma": (16, None),
    "hunyuan_video": (16, None),
    "cogvideox": (16, None),
    "sana": (32, None),
    "ltx": (32, None),
    "sd3": (16, 256),
    "lumina2": (16, 256),
    "zimage": (16, 512),
    "wan": (16, 512),
    "auraflow": (16, 128),
    "hidream": (16, None),
}


def opened(name: str, folder: Path) -> tuple[Any, Callable[..., torch.Tensor]]:
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(folder, device="cpu", keep=True)
    cond = pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs)

    def sample(width: int, height: int, steps: int = 2) -> torch.Tensor:
        more = {"frames": family.frames, **family.call_kwargs}
        return pipe.sample(cond, width=width, height=height, steps=steps, guidance=1.0, **more)

    return pipe, sample


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", KNOWN)
def test_accepted_sizes_run_at_their_size(name: str, tiny_folders: Folders) -> None:
    """Every multiple: the least, odd ones, unequal ones, the largest. A size that is rounded would be another."""
    pipe, sample = opened(name, tiny_folders(name))
    multiple, most = KNOWN[name]
    assert (pipe.model.sizes.multiple, pipe.model.sizes.most) == (multiple, most and (most, most))
    top = (most or 8 * multiple) // multiple
    draw = random.Random(name)
    sizes = {(1, 1), (2, 3), (top, 1), (1, top)}
    if os.environ.get("BALLAST_SOAK"):
        sizes |= {(draw.randint(1, min(top, 12)), draw.randint(1, min(top, 12))) for _ in range(3)}
        sizes |= {(3, 1), (top - 1, 2)}
    latent = {"ltx": 32, "ltx_timestep": 32}.get(name, 8)
    steps = 2 if name in ("ltx", "qwenimage") else 1  # one alone would end at pure noise there
    for across, down in sorted(sizes):
        latents = sample(across * multiple, down * multiple, steps)
        expected = (down * multiple // latent, across * multiple // latent)
        assert latents.shape[-2:] == expected, (across, down)


@pytest.mark.parametrize("name", [name for name, (_, most) in KNOWN.items() if most])
def test_the_next_larger_size_is_refused_by_run_and_plan(name: str, tiny_folders: Folders) -> None:
    pipe, sample = opened(name, tiny_folders(name))
    multiple, most = KNOWN[name]
    assert most
    beyond = most + multiple
    expected = f"takes multiples of {multiple} up to {most}, such as {most}."
    for width, height, side in ((beyond, multiple, "width"), (multiple, beyond, "height"), (beyond, beyond, "width")):
        message = refusal(sample, width, height)
        assert message == f"{side} is {beyond}; {name} {expected}"
        frames = tiny.FAMILIES[name].frames
        assert refusal(pipe.plan, width=width, height=height, vram="1GB", frames=frames) == message


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("sd3", (480, 832), "832 wide and 480 high: scale it, or set width and height. (width is 832; sd3 takes"),
        ("sd3", (512, 16), "16 wide and 512 high: scale it, or set width and height. (height is 512; sd3 takes"),
        ("flux", (8, 8), "8 wide and 8 high: scale it, or set width and height. (width is 0; flux takes"),
        ("zimage", (480, 832), "832 wide and 480 high: scale it. (width is 832; zimage takes"),
        ("zimage", (8, 24), "24 wide and 8 high: scale it. (height is 0; zimage takes"),
    ],
)
def test_a_picture_whose_size_cannot_be_drawn_is_named(
    name: str, size: tuple[int, int], says: str, tiny_folders: Folders
) -> None:
    """No width and height were asked for; Z-Image draws the size of its picture, whatever is asked for."""
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    cond = pipe.encode("a red boat", **tiny.FAMILIES[name].encode_kwargs)
    assert f"the picture is {says}" in refusal(pipe.sample, cond, image=torch.rand(1, *size, 3), strength=0.5, steps=2)


@pytest.mark.parametrize("name", ["flux", "sana", "lumina2"])
def test_what_is_no_multiple_is_told_one_that_is_taken(name: str, tiny_folders: Folders) -> None:
    pipe, sample = opened(name, tiny_folders(name))
    multiple, _ = KNOWN[name]
    for size in (1, 8, 31, 65, 72, 100):
        if size % multiple:
            near = int(refusal(sample, size, 64).rpartition("such as ")[2].rstrip("."))
            assert sample(near, 64).shape[-1] > 0


def test_the_demo_says_its_true_sizes() -> None:
    pipe = ballast.open_pipeline(DEMO, device="cpu", keep=True)
    cond = pipe.encode("a red circle")
    for size in (65, 72):
        message = refusal(pipe.sample, cond, width=size, height=64)
        assert message == f"width is {size}; Shapes demo takes multiples of 16 up to 512, such as 64."
    assert "up to 512, such as 512" in refusal(pipe.sample, cond, width=1008, height=1008, steps=1)
    assert pipe.sample(cond, width=512, height=512, steps=1).shape[-2:] == (64, 64)
    assert pipe.sample(cond, width=176, height=48, steps=1).shape[-2:] == (6, 22)


def test_hidream_takes_any_square_and_a_limited_area_otherwise(tiny_folders: Folders) -> None:
    _, sample = opened("hidream", tiny_folders("hidream"))
    assert sample(144, 144).shape[-2:] == (18, 18)
    assert sample(256, 64).shape[-2:] == (8, 32)
    assert "where the sides differ hidream takes up to 16384" in refusal(sample, 144, 128)


def test_sizes_near_the_bounds() -> None:
    sizes = PictureSizes(16, (100, 200))  # a table that ends within a multiple
    sizes.check("m", 192, 96)
    sizes.check("m", None, None)
    assert refusal(sizes.check, "m", 208, 96) == "width is 208; m takes multiples of 16 up to 192, such as 192."
    assert refusal(sizes.check, "m", 192, 112) == "height is 112; m takes multiples of 16 up to 96, such as 96."
    assert refusal(sizes.check, "m", 0, 16) == "width is 0; m takes multiples of 16 up to 192, such as 16."


def test_a_check_without_sizes_asks_for_no_more() -> None:
    class Careless:
        def check_inputs(self, prompt: str) -> None:
            raise TypeError("no prompt")

    class Strict:
        def check_inputs(self, prompt: str, height: int, width: int, steps: int = 0) -> None:
            if height % 48:
                raise ValueError("height must be divisible by 48")

    class Rounding:
        image_processor = SimpleNamespace(config={"vae_scale_factor": 16})

    assert multiple_of(Rounding(), 8) == 16, "it would round 24 down to 16, in silence"
    assert multiple_of(Rounding(), 24) == 48
    assert multiple_of(Careless(), 8) == 8
    assert multiple_of(object(), 24) == 24
    assert multiple_of(Strict(), 8) == 48
    assert multiple_of(Strict(), 36) == 144


# Tables of models that are too large to make here: the class that holds the table, asked for its last place.


def places(kind: type, **config: Any) -> tuple[int, int]:
    found = most_tokens(kind, config)
    assert found
    return found


def test_table_of_cosmos() -> None:
    config = {"max_size": (4, 24, 40), "patch_size": (1, 2, 2)}
    rows, columns = places(diffusers.CosmosTransformer3DModel, extra_pos_embed_type=None, **config)
    assert rows == columns == 20
    table = CosmosRotaryPosEmbed(hidden_size=12, **config)
    assert table(torch.empty(1, 1, 1, 2 * rows, 2 * columns))[0].shape[0] == rows * columns
    with pytest.raises(RuntimeError):
        table(torch.empty(1, 1, 1, 2 * rows + 2, 2))
    rows, columns = places(diffusers.CosmosTransformer3DModel, extra_pos_embed_type="learnable", **config)
    learned = CosmosLearnablePositionalEmbed(hidden_size=12, **config)
    assert learned(torch.empty(1, 1, 1, 2 * rows, 2 * columns)).shape[1] == rows * columns
    with pytest.raises(RuntimeError):
        learned(torch.empty(1, 1, 1, 2 * rows + 2, 2 * columns))


def test_table_of_kandinsky() -> None:
    rows, columns = places(Kandinsky5Transformer3DModel)
    table = Kandinsky5RoPE3D((4, 4, 4))
    first = torch.arange(1)
    table((1, 1, rows, columns), (first, torch.arange(rows), torch.arange(columns)))
    with pytest.raises(IndexError):
        table((1, 1, rows + 1, 1), (first, torch.arange(rows + 1), first))


def test_table_of_cogview3() -> None:
    rows, columns = places(diffusers.CogView3PlusTransformer2DModel, pos_embed_max_size=6)
    embed = CogView3PlusPatchEmbed(1, 8, 2, 8, pos_embed_max_size=6)
    text = torch.zeros(1, 1, 8)
    assert embed(torch.zeros(1, 1, 2 * rows, 2 * columns), text).shape[1] == 1 + rows * columns
    with pytest.raises(RuntimeError):
        embed(torch.zeros(1, 1, 2 * rows + 2, 2), text)


@pytest.mark.parametrize(
    ("kind", "embed"),
    [
        ("SkyReelsV2Transformer3DModel", WanRotaryPosEmbed),
        ("WanVACETransformer3DModel", WanRotaryPosEmbed),
        ("SanaVideoTransformer3DModel", transformer_sana_video.WanRotaryPosEmbed),
    ],
)
def test_table_of_wan_and_its_kin(kind: str, embed: type) -> None:
    rows, columns = places(getattr(diffusers, kind), rope_max_seq_len=8)
    table = embed(12, (1, 2, 2), 8)
    table(torch.empty(1, 1, 1, 2 * rows, 2 * columns))
    with pytest.raises(RuntimeError):
        table(torch.empty(1, 1, 1, 2, 2 * columns + 2))


def test_a_config_of_nonsense_sets_no_limit() -> None:
    assert most_tokens(diffusers.Lumina2Transformer2DModel, {"axes_lens": "many"}) is None
    assert most_tokens(diffusers.SD3Transformer2DModel, {"pos_embed_max_size": [3]}) is None
    assert most_tokens(diffusers.FluxTransformer2DModel, {}) is None
    assert most_tokens(diffusers.SD3Transformer2DModel, {}) == (96, 96), "what the class has where a config is silent"
    assert most_tokens(BriaFibo2Transformer2DModel, {}) == (512, 512)
