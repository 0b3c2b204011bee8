"""LoRAs at the widths of published models, on `meta`: each naming style is what the converter of the weights says."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from adapters import lora_files
from adapters.lora_files import read_lora
from diffusers.loaders import single_file_utils
from single_files.original_names import ORIGINALS, in_comfyui, original
from torch import nn

Tensors = dict[str, torch.Tensor]
RANK, ALPHA = 4, 2.0
FLUX = {"patch_size": 1, "in_channels": 64, "attention_head_dim": 128, "num_attention_heads": 24}
WAN = {"num_layers": 1, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 1536}
SD3 = {"num_layers": 2, "num_attention_heads": 24, "caption_projection_dim": 1536, "joint_attention_dim": 4096}
HIDREAM = {"num_layers": 1, "num_single_layers": 1, "patch_size": 2, "in_channels": 16, "attention_head_dim": 128}
HIDREAM |= {"num_attention_heads": 20, "text_emb_dim": 2048, "num_routed_experts": 2, "num_activated_experts": 1}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux": (
        "FluxPipeline",
        "FluxTransformer2DModel",
        {**FLUX, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 4096, "guidance_embeds": True},
    ),
    "chroma": (
        "ChromaPipeline",
        "ChromaTransformer2DModel",
        {**FLUX, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 4096},
    ),
    "zimage": ("ZImagePipeline", "ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1}),
    "wan": ("WanPipeline", "WanTransformer3DModel", WAN),
    "wan_i2v": ("WanImageToVideoPipeline", "WanTransformer3DModel", WAN | I2V),
    "qwenimage": ("QwenImagePipeline", "QwenImageTransformer2DModel", {"num_layers": 1}),
    "hunyuan_video": (
        "HunyuanVideoPipeline",
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    ),
    "ltx": ("LTXPipeline", "LTXVideoTransformer3DModel", {"num_layers": 1}),
    "sd3": (
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        {**SD3, "attention_head_dim": 64, "qk_norm": "rms_norm", "pos_embed_max_size": 8},
    ),
    "lumina2": ("Lumina2Pipeline", "Lumina2Transformer2DModel", {"num_layers": 1, "num_refiner_layers": 1}),
    "hidream": (
        "HiDreamImagePipeline",
        "HiDreamImageTransformer2DModel",
        {**HIDREAM, "caption_channels": [4096, 4096], "axes_dims_rope": [64, 32, 32], "llama_layers": [0, 1]},
    ),
    "auraflow": (
        "AuraFlowPipeline",
        "AuraFlowTransformer2DModel",
        {"num_mmdit_layers": 1, "num_single_dit_layers": 1},
    ),
    "sana": ("SanaPipeline", "SanaTransformer2DModel", {"num_layers": 1}),
}
# The names of a layer in a style, those of A and B, and whether there is an alpha.
Style = tuple[Callable[[str], str], str, str, bool]
AB, KOHYA = ("lora_A", "lora_B"), ("lora_down", "lora_up")
STYLES: dict[str, Style] = {
    "kohya": (lambda layer: f"lora_unet_{layer.replace('.', '_')}", *KOHYA, True),
    "kohya without alpha": (lambda layer: f"lora_unet_{layer.replace('.', '_')}", *KOHYA, False),
    "kohya with A and B": (lambda layer: f"lora_unet_{layer.replace('.', '_')}", *AB, True),
    "kohya, compiled": (lambda layer: f"lora_unet__orig_mod_{layer.replace('.', '_')}", *KOHYA, True),
    "lycoris": (lambda layer: f"lycoris_{layer.replace('.', '_')}", *KOHYA, True),
    "comfyui": (lambda layer: f"diffusion_model.{layer}", *AB, False),
    "comfyui with alpha": (lambda layer: f"diffusion_model.{layer}", *AB, True),
    "comfyui, down and up": (lambda layer: f"diffusion_model.{layer}", *KOHYA, True),
    "bare": (lambda layer: layer, *AB, False),
    "bare, down and up": (lambda layer: layer, *KOHYA, True),
    "transformer": (lambda layer: f"transformer.{layer}", *KOHYA, True),
    "peft, compiled": (lambda layer: f"base_model.model._orig_mod.{layer}", *AB, True),
}
OWN: dict[str, Style] = {
    "diffusers": (lambda layer: f"transformer.{layer}", *AB, True),
    "onetrainer": (lambda layer: f"lora_transformer_{layer.replace('.', '_')}", *KOHYA, True),
    "kohya": (lambda layer: f"lora_unet_{layer.replace('.', '_')}", *KOHYA, True),
    "ddp": (lambda layer: f"module.{layer}", *AB, True),
    "compiled inside": (lambda layer: f"transformer.{layer}".replace("blocks.0.", "blocks.0._orig_mod."), *AB, True),
}


@functools.cache
def model(name: str) -> tuple[Any, nn.Module, Tensors, Tensors]:
    """The class of a pipeline, its transformer, and B of each layer: as its files have it, and as its module has."""
    pipeline, transformer, config = MODELS[name]
    with torch.device("meta"):
        module = getattr(diffusers, transformer)(**config)
    family = name.removesuffix("_i2v")
    state, generator = original(family, module.state_dict()), torch.Generator().manual_seed(1)
    skipped = ("norm", "embed_tokens", "pos_embed", "y_embedding", "gate")
    theirs, given = {}, {}
    for key, value in state.items():
        given[key] = torch.zeros(value.shape[:1] if value.ndim < 2 else (len(value), RANK))
        if key.endswith(".weight") and value.ndim == 2 and not any(word in key for word in skipped):
            given[key] = theirs[key.removesuffix(".weight")] = torch.randn(len(value), RANK, generator=generator)
    converter = ORIGINALS[family][1]
    made = getattr(single_file_utils, converter)(dict(given), config=module.config) if converter else given
    ours = {key.removesuffix(".weight"): value for key, value in made.items() if value.ndim == 2 and value.any()}
    return getattr(diffusers, pipeline), module, theirs, ours


def written(path: Path, style: Style, ups: Tensors, width: Callable[[str], int]) -> Path:
    """A file with these B, each with an A of ones at its row, in a style."""
    called, down, up, has_alpha = style
    tensors: Tensors = {}
    for layer, b in ups.items():
        tensors[f"{called(layer)}.{down}.weight"] = torch.eye(RANK, width(layer))
        tensors[f"{called(layer)}.{up}.weight"] = b.clone()
        if has_alpha:
            tensors[f"{called(layer)}.alpha"] = torch.tensor(ALPHA)
    return lora_files.write(path, tensors)


def same(path: Path, cls: Any, module: nn.Module, expected: Tensors, scale: float) -> None:
    found = read_lora(path, cls, {"transformer": module})["transformer"]
    assert found.keys() == expected.keys()
    for target, (part,) in found.items():
        assert torch.equal(part.down, torch.eye(*part.down.shape)), target
        torch.testing.assert_close(part.scaling(1.0) * part.up, scale * expected[target], msg=target)


SOAK = bool(os.environ.get("BALLAST_SOAK"))
FAST = ("flux", "zimage", "wan_i2v")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_every_style_is_what_the_weights_say(name: str, tmp_path: Path) -> None:
    """Of all layers, and of each second one or one alone."""
    cls, module, theirs, ours = model(name)
    shapes = original(name.removesuffix("_i2v"), module.state_dict())
    parts = (list(theirs)[::2], list(theirs)[1::2], list(theirs)[-1:])
    for number, style in enumerate(STYLES.values()):
        scale = ALPHA / RANK if style[3] else 1.0
        for some in (list(theirs), *parts) if SOAK else ((list(theirs), *parts)[number % 4],):
            ups = {layer: theirs[layer] for layer in some}
            path = written(tmp_path / "lora.safetensors", style, ups, lambda key: shapes[f"{key}.weight"].shape[1])
            drawn = {row.tobytes() for up in ups.values() for row in up.numpy()}
            expected = {target: up for target, up in ours.items() if up[0].numpy().tobytes() in drawn}
            same(path, cls, module, expected, scale)
    for style in OWN.values():
        path = written(tmp_path / "own.safetensors", style, ours, lambda key: module.get_submodule(key).weight.shape[1])
        same(path, cls, module, ours, ALPHA / RANK)


@pytest.mark.parametrize("style", ["comfyui", "comfyui with alpha", "kohya", "bare"])
def test_names_that_comfyui_gives_layers(style: str, tmp_path: Path) -> None:
    """Of HunyuanVideo, in LoRAs that were trained or saved by its names."""
    cls, module, theirs, ours = model("hunyuan_video")
    shapes = original("hunyuan_video", module.state_dict())
    called, down, up, has_alpha = STYLES[style]
    renamed: Style = (lambda layer: called(in_comfyui(f"{layer}.").removesuffix(".")), down, up, has_alpha)
    assert sum(in_comfyui(f"{layer}.") != f"{layer}." for layer in theirs) > 0.5 * len(theirs)
    path = written(tmp_path / "lora.safetensors", renamed, theirs, lambda key: shapes[f"{key}.weight"].shape[1])
    same(path, cls, module, ours, ALPHA / RANK if has_alpha else 1.0)


def test_a_scale_that_nothing_takes_is_named(tmp_path: Path) -> None:
    cls, module, theirs, _ = model("flux")
    shapes = original("flux", module.state_dict())
    some = {"final_layer.linear": theirs["final_layer.linear"]}
    path = written(tmp_path / "one.safetensors", STYLES["kohya"], some, lambda key: shapes[f"{key}.weight"].shape[1])
    tensors = lora_files.load_file(path) | {"lora_unet_img_in.alpha": torch.tensor(2.0)}
    with pytest.raises(ValueError, match=r"no place for, such as lora_unet_img_in\.alpha"):
        read_lora(lora_files.write(path, tensors), cls, {"transformer": module})
    tensors["lora_unet_img_in.diff"] = torch.zeros(3072, 64)
    with pytest.raises(ValueError, match=r"has no lora_A for transformer\.x_embedder"):
        read_lora(lora_files.write(path, tensors), cls, {"transformer": module})


def test_what_only_diffusers_converts_keeps_its_scale(tmp_path: Path) -> None:
    """Whatever its conversion does with an alpha: it is given none."""
    _, module, _, ours = model("flux")

    class Dropping(diffusers.FluxPipeline):
        @classmethod
        def lora_state_dict(cls, tensors: Tensors, **_: Any) -> Tensors:
            return {f"transformer.{k.removeprefix('odd.')}": v for k, v in tensors.items() if "alpha" not in k}

    odd: Style = (lambda layer: f"odd.{layer}", *AB, True)
    width = functools.partial(lambda key: module.get_submodule(key).weight.shape[1])
    same(written(tmp_path / "odd.safetensors", odd, ours, width), Dropping, module, ours, ALPHA / RANK)
