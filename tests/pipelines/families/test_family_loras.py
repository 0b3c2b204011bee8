"""LoRAs of the families with loops of their own, in the names of their files: as if merged into these."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import newbie_folders
import pyramid_folders
import pytest
import torch
from adapters import lora_files
from safetensors.torch import load_file, save_file

SIZE = {"width": 64, "height": 48, "steps": 2}
STRENGTH = 0.7


def folder_of(name: str, root: Path) -> tuple[Path, Path]:
    """The folder of a family as it is published, and the file of its transformer."""
    folder = newbie_folders.official(root) if name == "newbie" else pyramid_folders.save("mmdit", root)
    files = [file for file in folder.rglob("*.safetensors") if "transformer" in file.parent.name]
    return folder, files[0]


def made_for(weights: dict[str, torch.Tensor], wanted: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A LoRA for the weights whose names match, by their names, and the weights with it merged into them."""
    generator, lora, merged = torch.Generator().manual_seed(0), {}, dict(weights)
    for name, weight in weights.items():
        if weight.ndim != 2 or not re.search(wanted, name):
            continue
        path, (out, into) = name.removesuffix(".weight"), weight.shape
        down = torch.randn(4, into, generator=generator) / into**0.5
        up = 0.3 * torch.randn(out, 4, generator=generator)
        lora |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
        merged[name] = weight + STRENGTH * (up @ down)
    assert len(lora) >= 16
    return lora, merged


def flat(key: str) -> str:
    """A name as kohya's trainers write it."""
    layer, part = key.split(".lora_")
    return f"{layer.replace('.', '_')}.lora_{part}"


NEWBIE = r"attention\.(qkv|out)|feed_forward|adaLN|time_text_embed\.1|clip_text_pooled_proj\.1|cap_embedder\.1"


@pytest.mark.parametrize(
    ("name", "wanted", "prefix"),
    [
        ("newbie", NEWBIE, "base_model.model."),
        pytest.param("newbie", NEWBIE, "diffusion_model.", marks=pytest.mark.soak),
        pytest.param("newbie", NEWBIE, "lora_unet_", marks=pytest.mark.soak),
        ("pyramid", "attn.*to_", ""),
        pytest.param("pyramid", "attn.*to_", "lora_unet_", marks=pytest.mark.long),
    ],
)
def test_official_names_are_as_if_merged(name: str, wanted: str, prefix: str, tmp_path: Path, sim: ModuleType) -> None:
    folder, file = folder_of(name, tmp_path / name)
    weights = load_file(file)
    lora, merged = made_for(weights, wanted)
    lora = {f"{prefix}{flat(key) if prefix.endswith('_') else key}": value for key, value in lora.items()}
    path = lora_files.write(tmp_path / "lora.safetensors", lora)
    run: dict[str, Any] = dict(SIZE) if name == "newbie" else {**SIZE, "height": 64, "frames": 1, "guidance": 2.0}
    pipe = ballast.open_pipeline(folder, device="sim", loras=[(path, STRENGTH)])
    cond = pipe.encode("a red boat", "blurry")
    found = {strategy: pipe.sample(cond, **run, strategy=strategy) for strategy in ("resident", "streamed", "cpu")}
    assert sim.stats().allocated_bytes == 0
    pipe.set_loras(())
    plain = pipe.sample(cond, **run)
    save_file(merged, file, {"format": "pt"})
    expected = ballast.open_pipeline(folder, device="sim").sample(cond, **run)
    assert (expected - plain).abs().max() > 0.01
    for strategy, latents in found.items():
        torch.testing.assert_close(latents, expected, atol=1e-4, rtol=1e-4, msg=strategy)


def test_a_layer_of_the_family_that_is_no_other_is_named(tmp_path: Path, sim: ModuleType) -> None:
    folder, file = folder_of("newbie", tmp_path / "newbie")
    lora, _ = made_for(load_file(file), r"attention\.(qkv|out)")
    lora |= {"layers.0.nowhere.lora_A.weight": torch.ones(4, 4), "layers.0.nowhere.lora_B.weight": torch.ones(4, 4)}
    path = lora_files.write(tmp_path / "lora.safetensors", lora)
    with pytest.raises(ValueError, match="lora.safetensors .* has no place for, such as layers.0.nowhere"):
        ballast.open_pipeline(folder, device="sim", loras=[(path, 1.0)])
