"""One LoRA in each naming style: the same branches, and the latents of stock diffusers with peft."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from adapters import lora_files
from adapters.lora_files import read_lora
from diffusers import DiffusionPipeline
from pipeline_classes import odd_pipelines
from single_files.original_names import original
from single_files.original_unets import published_names
from torch import nn

Tensors = dict[str, torch.Tensor]
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # A and B, by layer
Folders = Callable[[str], Path]
RANK = 4


def published(name: str, module: nn.Module) -> tuple[Pairs, Pairs]:
    """A LoRA by the names of a family's modules, and by those of its original files; joined layers share their A."""
    weights = {path: each.weight for path, each in lora_files.targets(module).items()}
    rows = {key: len(value) if value.ndim else 1 for key, value in module.state_dict().items()}
    paths, groups = list(rows), {}
    numbered = {key: torch.full((count, 1), float(i)) for i, (key, count) in enumerate(rows.items())}
    for key, value in original(name, numbered).items():
        layers = [paths[int(i)].removesuffix(".weight") for i in value.unique()]
        if key.endswith(".weight") and all(layer in weights for layer in layers):
            groups[key] = layers
    generator, ours = torch.Generator().manual_seed(0), {}
    for layers in groups.values():
        down = torch.randn(RANK, weights[layers[0]].shape[1], generator=generator) / 4
        for layer in layers:
            ours[layer] = down, torch.randn(weights[layer].shape[0], RANK, generator=generator) / 4
    ups = {key: torch.zeros(count, RANK) for key, count in rows.items()}
    joined = original(name, ups | {f"{layer}.weight": up for layer, (_, up) in ours.items()})
    theirs = {key.removesuffix(".weight"): (ours[layers[0]][0], joined[key]) for key, layers in groups.items()}
    return ours, theirs


def written(pairs: Pairs, style: str, alpha: float | None = None) -> Tensors:
    """The tensors in a style: names as peft has them, or as kohya with an alpha."""
    found: Tensors = {}
    for layer, (down, up) in pairs.items():
        key = style.format(layer, flat=layer.replace(".", "_"))
        if alpha is None:
            found |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        else:
            scaled = {"lora_down.weight": down, "lora_up.weight": up * RANK / alpha, "alpha": torch.tensor(alpha)}
            found |= {f"{key}.{part}": value for part, value in scaled.items()}
    return {name: value.clone() for name, value in found.items()}


XLABS = {"img_attn.qkv": "qkv_lora1", "txt_attn.qkv": "qkv_lora2"}
XLABS |= {"img_attn.proj": "proj_lora1", "txt_attn.proj": "proj_lora2"}


def xlabs(pairs: Pairs) -> Tensors:
    """Of attention alone, which is all that those have."""
    found: Tensors = {}
    for layer, (down, up) in pairs.items():
        words = layer.split(".")
        start = f"{'.'.join(words[:2])}.processor.{XLABS['.'.join(words[2:])]}"
        found |= {f"{start}.down.weight": down.clone(), f"{start}.up.weight": up.clone()}
    return found


def styles(name: str, ours: Pairs, theirs: Pairs) -> dict[str, Tensors]:
    """The same in each style that there is for a family."""
    plain = written(ours, "transformer.{}")
    return {
        "diffusers": plain,
        "peft": written(ours, "base_model.model.{}"),
        "peft, by the adapter's name": {re.sub("(lora_[AB])", r"\1.my-style_0", k): v for k, v in plain.items()},
        "comfyui, diffusers' names": written(ours, "diffusion_model.{}", 2.0),
        "kohya, diffusers' names": written(ours, "lora_unet_{flat}", 8.0),
        "lycoris, diffusers' names": written(ours, "lycoris_{flat}", 8.0),
        "original": written(theirs, "{}"),
        "comfyui": written(theirs, "diffusion_model.{}", 8.0),
        "checkpoint": written(theirs, "model.diffusion_model.{}", 8.0),
        "fal": written(theirs, "base_model.model.{}"),
        "kohya and musubi": written(theirs, "lora_unet_{flat}", 2.0),
        "lycoris": written(theirs, "lycoris_{flat}", 2.0),
        "videox-fun": written(theirs, "lora_unet__{flat}", 2.0),
        "diffsynth": written(theirs, "pipe.dit.{}"),
        "mochi": {key.removesuffix(".weight"): tensor for key, tensor in written(theirs, "{}").items()},
        "of older trainers": written(ours, "unet.{}", 2.0),
    }


@functools.cache
def model(name: str) -> tuple[Any, nn.Module]:
    pipe = tiny.FAMILIES[name].build()
    return type(pipe), pipe.transformer


def changes(file: Path, cls: Any, modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """What a file adds to each weight."""
    found = read_lora(file, cls, modules)
    return {
        f"{component}.{path}": part.scaling(1.0) * (part.up.flatten(1) @ part.down.flatten(1))
        for component, parts in found.items()
        for path, (part,) in parts.items()
    }


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], style: str) -> None:
    assert found.keys() == expected.keys(), style
    for path, change in found.items():
        torch.testing.assert_close(change, expected[path], atol=1e-5, rtol=1e-5, msg=f"{path} differs in {style}")


ATTENTION = re.compile(r"^transformer_blocks.*attn\.(to_q|to_k|to_v|to_out|add_|to_add_out)")
FAST = ["flux", "wan", "qwenimage", "zimage"]
NAMES = ["flux", "sd3", "wan", "qwenimage", "zimage", "lumina2", "ltx", "hidream", "hunyuan_video", "chroma", "sana"]


@pytest.mark.parametrize(
    "name", FAST + [pytest.param(name, marks=pytest.mark.soak) for name in NAMES if name not in FAST]
)
def test_each_style_is_the_same(name: str, tmp_path: Path) -> None:
    cls, module = model(name)
    ours, theirs = published(name, module)
    expected = {f"transformer.{layer}": up @ down for layer, (down, up) in ours.items()}
    assert len(expected) > 6
    for style, tensors in styles(name, ours, theirs).items():
        path = lora_files.write(tmp_path / "lora.safetensors", tensors)
        equal(changes(path, cls, {"transformer": module}), expected, style)


def test_xlabs_is_the_same(tmp_path: Path) -> None:
    cls, module = model("flux")
    ours, theirs = published("flux", module)
    theirs = {layer: pair for layer, pair in theirs.items() if "double" in layer and "_attn." in layer}
    path = lora_files.write(tmp_path / "xlabs.safetensors", xlabs(theirs))
    expected = {f"transformer.{layer}": up @ down for layer, (down, up) in ours.items() if ATTENTION.search(layer)}
    equal(changes(path, cls, {"transformer": module}), expected, "xlabs")


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_latents_are_stock(name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    folder = tiny_folders(name)
    ours, theirs = published(name, lora_files.transformer_of(folder))
    made = {
        style: lora_files.write(tmp_path / f"{i}.safetensors", tensors)
        for i, (style, tensors) in enumerate(styles(name, ours, theirs).items())
        if style in ("diffusers", "comfyui", "kohya and musubi")
    }
    expected = lora_files.stock(folder, [(made["diffusers"], 0.8)])
    pipe, encode, sample, _ = tiny.stages(name, folder, "sim", cache_dir=tmp_path)
    cond = encode()
    assert (sample(cond) - expected).abs().max() > 0.01
    for style, path in made.items():
        pipe.set_loras([(path, 0.8)])
        torch.testing.assert_close(
            sample(cond), expected, atol=1e-5, rtol=1e-5, msg=lambda said, style=style: f"{style}: {said}"
        )


# UNets


def of_sdxl(pipe: Any) -> tuple[Tensors, Tensors]:
    """A LoRA for the UNet and both encoders, as diffusers names it and as kohya does, after the original files.

    Of attention in encoders there is none: stock diffusers drops kohya's with transformers 5.
    """
    generator, ours, theirs = torch.Generator().manual_seed(0), {}, {}
    for component, number in (("unet", "unet"), ("text_encoder", "te1"), ("text_encoder_2", "te2")):
        module = getattr(pipe, component)
        named = published_names(module)
        for path, inner in module.named_modules():
            is_text = path.endswith((".fc1", ".fc2"))
            if not (is_text or path.endswith((".to_q", ".to_v", ".conv1", ".time_emb_proj", ".proj_in", "net.2"))):
                continue
            (out, into, *kernel), called = inner.weight.shape, path
            if is_text and not path.startswith("text_model."):
                called = f"text_model.{path}"
            down = torch.randn(RANK, into, *kernel, generator=generator) / 4
            up = torch.randn(out, RANK, *(1 for _ in kernel), generator=generator) / 32
            ours |= {f"{component}.{called}.lora_A.weight": down, f"{component}.{called}.lora_B.weight": up}
            flat = f"lora_{number}_{named.get(path, called).replace('.', '_')}"
            theirs |= {f"{flat}.lora_down.weight": down.clone(), f"{flat}.lora_up.weight": up / 2}
            theirs[f"{flat}.alpha"] = torch.tensor(2.0 * RANK)
    return ours, theirs


def test_sdxl_is_stock_in_both(tmp_path: Path, sim: ModuleType) -> None:
    folder = odd_pipelines.save("sdxl", tmp_path / "sdxl")
    stock = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    stock.set_progress_bar_config(disable=True)
    ours, theirs = of_sdxl(stock)
    assert {name.split("_")[2] for name in theirs if "_unet_" in name} >= {"input", "middle", "output"}
    paths = [lora_files.write(tmp_path / f"{i}.safetensors", each) for i, each in enumerate((ours, theirs))]
    stock.load_lora_weights(str(tmp_path), weight_name=paths[1].name, adapter_name="kohya")
    stock.set_adapters(["kohya"], [0.8])
    run: dict[str, Any] = {"width": 32, "height": 32}
    generator = torch.Generator().manual_seed(0)
    expected = stock("a cat", num_inference_steps=2, output_type="latent", generator=generator, **run).images
    pipe = ballast.open_pipeline(folder, device="sim", cache_dir=tmp_path)
    scale = pipe.decoder_config["scaling_factor"]
    plain = pipe.sample(pipe.encode("a cat"), steps=2, **run)
    assert (plain * scale - expected).abs().max() > 0.01
    for path in paths:
        pipe.set_loras([(path, 0.8)])
        for strategy in ("resident", "streamed"):
            found = pipe.sample(pipe.encode("a cat"), steps=2, strategy=strategy, **run)
            # The latents reach 4, and how the CPU rounds decides the last bits.
            torch.testing.assert_close(found * scale, expected.float(), atol=1e-4, rtol=1e-5)
    assert sim.stats().allocated_bytes == 0
