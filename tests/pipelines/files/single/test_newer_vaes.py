"""VAEs since 2025 from one file, with the names of the original release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from ballast.pipelines.files.components import read_components
from ballast.pipelines.files.single.given import GivenFiles
from ballast.pipelines.files.single.vaes import of_class
from safetensors.torch import save_file
from single_files.newer_models import NEWER
from single_files.original_names import _renamed

State = dict[str, torch.Tensor]


def _middle(state: State, proj: str) -> State:
    names = {
        "mid_block.resnets.0": "mid.block_1", "mid_block.resnets.1": "mid.block_2",
        "mid_block.attentions.0.to_": "mid.attn_1.", f"mid_block.attentions.0.{proj}": "mid.attn_1.proj_out",
        "mid_block.attentions.0": "mid.attn_1",
    }  # fmt: skip
    return _renamed(state, names)


def hunyuan_image(state: State, blocks: int = 1) -> State:
    """Stages, each with its blocks and what comes after them; in the decoder one block more."""
    made = {}
    for name, tensor in _middle(state, "proj.").items():
        side, kind, *rest = name.replace("attn_1.proj_out", "attn_1.proj_out.").replace("..", ".").split(".")
        if kind in ("down_blocks", "up_blocks"):
            count = blocks + (kind == "up_blocks")
            stage, at = divmod(int(rest[0]), count + 1)
            inner = f"block.{at}" if at < count else f"{kind.removesuffix('_blocks')}sample"
            rest = [str(stage), *inner.split("."), *rest[1:]]
            kind = kind.removesuffix("_blocks")
        made[".".join([side, kind, *rest]).replace("conv_shortcut", "nin_shortcut")] = tensor
    return made


def hunyuan_video15(state: State) -> State:
    return _renamed(
        _middle(state, "proj_out"),
        {
            "down_blocks.": "down.", "up_blocks.": "up.", ".resnets.": ".block.", ".downsamplers.0.": ".downsample.",
            ".upsamplers.0.": ".upsample.",
        },
    )  # fmt: skip


def ltx2(state: State) -> State:
    """Blocks and what comes between them in one row."""
    made = {}
    for name, tensor in state.items():
        side, kind, *rest = [*name.split("."), ""] if "." not in name else name.split(".")
        if kind == "mid_block":
            made[".".join([side, "up_blocks.0" if side == "decoder" else "down_blocks.8", *rest])] = tensor
        elif kind in ("down_blocks", "up_blocks"):
            between = rest[1].endswith("samplers")
            first = 0 if kind == "down_blocks" else 1
            at = 2 * int(rest[0]) + (between if first == 0 else not between) + first
            made[".".join([side, kind, str(at), *(rest[3:] if between else rest[1:])])] = tensor
        else:
            made[name] = tensor
    names = {"resnets": "res_blocks", "latents_mean": "per_channel_statistics.mean-of-means"}
    return _renamed(made, names | {"latents_std": "per_channel_statistics.std-of-means"})


_SMALL = {"in_channels": 3, "out_channels": 3}
CASES: list[tuple[str, dict[str, Any], Callable[[State], State], State]] = [
    (
        "AutoencoderKLHunyuanImage",
        {
            **_SMALL,
            "latent_channels": 8,
            "block_out_channels": (32, 32, 32),
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "sample_size": 32,
        },  # fmt: skip
        hunyuan_image,
        {},
    ),
    (
        "AutoencoderKLHunyuanVideo15",
        {
            **_SMALL,
            "latent_channels": 4,
            "block_out_channels": (8, 8, 8),
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 2,
        },  # fmt: skip
        hunyuan_video15,
        {},
    ),
    (
        "AutoencoderKLLTX2Video",
        {
            **_SMALL,
            "latent_channels": 8,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_block_out_channels": (8, 8, 8),
            "decoder_layers_per_block": (1, 1, 1, 1),
        },  # fmt: skip
        ltx2,
        {"per_channel_statistics.channel": torch.zeros(8), "per_channel_statistics.mean-of-stds": torch.zeros(8)},
    ),
]
PUBLISHED = {
    "AutoencoderKLHunyuanImage": {
        **_SMALL, "latent_channels": 64, "block_out_channels": (128, 256, 512, 512, 1024, 1024), "layers_per_block": 2,
        "spatial_compression_ratio": 32, "sample_size": 384,
    },
}  # fmt: skip


def found(base: Path, cls: str, path: Path) -> Any:
    """The VAE that is given beside a transformer."""
    save_file(NEWER["longcat"].build().state_dict(), transformer := base / "transformer.safetensors")
    index = {"vae": ["diffusers", cls]}
    return read_components(base, index, None, None, GivenFiles(transformer, vae=path).components(index))["vae"]


@pytest.mark.parametrize("prefix", ["", pytest.param("vae.", marks=pytest.mark.long)], ids=["plain", "prefixed"])
@pytest.mark.parametrize(("cls", "config", "original", "beside"), CASES, ids=[case[0] for case in CASES])
def test_the_original_file_gives_the_weights_of_the_folder(
    cls: str, config: dict[str, Any], original: Callable[[State], State], beside: State, prefix: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = getattr(diffusers, cls)(**config)
    state = {name: torch.randn_like(tensor) for name, tensor in made.state_dict().items()}
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": cls, **config}), "utf-8")
    for names in (original, dict):
        tensors = names(state) | (beside if names is original else {})
        save_file(
            {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path := tmp_path / "v.safetensors"
        )
        (unit := found(tmp_path, cls, path).unit("")).load()
        got = unit.module.state_dict()
        assert got.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in got.items())


@pytest.mark.parametrize(("cls", "config", "original", "beside"), CASES, ids=[case[0] for case in CASES])
def test_published_widths(cls: str, config: dict[str, Any], original: Callable[[State], State], beside: State) -> None:
    """Every name and shape, on `meta`."""
    with torch.device("meta"):
        made = getattr(diffusers, cls)(**PUBLISHED.get(cls, {}))
        state = made.state_dict()
        tensors = hunyuan_image(state, 2) if original is hunyuan_image else original(state)
    (layout, *_) = of_class(cls)
    assert layout.is_original(tensors)
    back = layout.convert(dict(tensors), made.config)
    assert {name: tuple(value.shape) for name, value in back.items()} == {k: tuple(v.shape) for k, v in state.items()}
