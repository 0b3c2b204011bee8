"""LoRA files: one LoRA in every naming style is the same, and what has no place is named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from adapters import lora_files
from adapters.lora_files import read_lora
from torch import nn

Tensors = dict[str, torch.Tensor]
ALPHA = 8.0
NAMES = ["flux", "zimage"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, nn.Module]]:
    """The pipeline's class of a family, and its transformer."""
    made: dict[str, tuple[Any, nn.Module]] = {}

    def model(name: str) -> tuple[Any, nn.Module]:
        if name not in made:
            pipe = tiny.FAMILIES[name].build()
            made[name] = type(pipe), pipe.transformer
        return made[name]

    return model


def changes(file: Path, cls: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    """What a file adds to each weight, by the module's path."""
    found = read_lora(file, cls, {"transformer": module})["transformer"]
    return {path: part.scaling(1.0) * (part.up.flatten(1) @ part.down.flatten(1)) for path, (part,) in found.items()}


def equal(file: Path, expected: Tensors, cls: Any, module: nn.Module) -> None:
    found = changes(file, cls, module)
    assert found.keys() == expected.keys()
    for path, change in found.items():
        torch.testing.assert_close(change, expected[path], atol=1e-5, rtol=1e-5)


def kohya(name: str) -> str:
    path, _, kind = name.removeprefix("transformer.").partition(".lora_")
    return f"lora_transformer_{path.replace('.', '_')}.lora_{'down' if kind[0] == 'A' else 'up'}.weight"


STYLES: dict[str, Callable[[str], str]] = {
    "diffusers": lambda name: name,
    "bare": lambda name: name.removeprefix("transformer."),
    "peft": lambda name: name.replace("transformer.", "base_model.model.", 1),
    "peft, an adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "comfyui": lambda name: name.replace("transformer.", "diffusion_model.", 1),
    "down and up": lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    "old diffusers": lambda name: name.replace("lora_A", "lora.down").replace("lora_B", "lora.up"),
    "kohya": kohya,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", STYLES)
def test_one_lora_in_every_style_is_the_same(
    name: str, style: str, models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path
) -> None:
    cls, module = models(name)
    plain = lora_files.weights(module, 4, 1)
    expected = changes(lora_files.write(tmp_path / "plain.safetensors", plain), cls, module)
    renamed = {STYLES[style](key): value for key, value in plain.items()}
    equal(lora_files.write(tmp_path / "other.safetensors", renamed), expected, cls, module)
    for key in [key for key in renamed if "lora_A" in key or "down" in key]:
        renamed[f"{key.rsplit('.lora', 1)[0]}.alpha"] = torch.tensor(ALPHA)
    halved = {path: ALPHA / 4 * change for path, change in expected.items()}
    equal(lora_files.write(tmp_path / "scaled.safetensors", renamed), halved, cls, module)


def test_settings_of_peft_in_the_header(models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path) -> None:
    """Alpha, rsLoRA and modules with numbers of their own, as diffusers notes them when it saves."""
    cls, module = models("flux")
    plain = lora_files.weights(module, 4, 1)
    expected = changes(lora_files.write(tmp_path / "plain.safetensors", plain), cls, module)
    own = "transformer_blocks.0.attn.to_q"

    def file(**settings: Any) -> Path:
        noted = {f"transformer.{key}": value for key, value in settings.items()}
        return lora_files.write(tmp_path / "noted.safetensors", plain, {"lora_adapter_metadata": json.dumps(noted)})

    equal(file(r=4, lora_alpha=8), {path: 2 * change for path, change in expected.items()}, cls, module)
    equal(file(r=4, lora_alpha=8, use_rslora=True), {p: 4 * change for p, change in expected.items()}, cls, module)
    one = {path: (3 if path == own else 2) * change for path, change in expected.items()}
    equal(file(r=4, lora_alpha=8, alpha_pattern={f"^{own}": 12}), one, cls, module)
    for settings, why in (
        ({"r": 8, "lora_alpha": 8}, "has rank 4 at .*, and 8 by its header"),
        ({"r": 4, "lora_alpha": 8, "use_dora": True}, "is a DoRA, by its header"),
        ({"r": 4, "lora_alpha": "x"}, "has lora_alpha 'x' in its header, which is no number"),
        ({"r": 4, "alpha_pattern": {"(a+)+$": 2}}, "has a alpha_pattern in its header that is no list"),
    ):
        with pytest.raises(ValueError, match=f"noted.safetensors {why}"):
            read_lora(file(**settings), cls, {"transformer": module})


def fused(width: int, prefix: str = "lora_unet_", rank: int = 4) -> Tensors:
    """Names of Flux's makers, as kohya's trainer writes them: q, k and v in one."""
    generator, found = torch.Generator().manual_seed(0), {}
    for side in ("img", "txt"):
        layer = f"{prefix}double_blocks_0_{side}_attn_qkv"
        found[f"{layer}.lora_down.weight"] = torch.randn(rank, width, generator=generator)
        found[f"{layer}.lora_up.weight"] = torch.randn(3 * width, rank, generator=generator)
        found[f"{layer}.alpha"] = torch.tensor(2.0)
    return found


def test_fused_layers_come_apart(models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path) -> None:
    cls, module = models("flux")
    width = module.transformer_blocks[0].attn.to_q.weight.shape[0]
    tensors = fused(width)
    found = changes(lora_files.write(tmp_path / "kohya.safetensors", tensors), cls, module)
    whole = 0.5 * tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"]
    whole = whole @ tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"]
    for part, name in zip(whole.chunk(3), ("to_q", "to_k", "to_v"), strict=True):
        torch.testing.assert_close(found[f"transformer_blocks.0.attn.{name}"], part, atol=1e-5, rtol=1e-5)
    assert len(found) == 6


# What is refused


def spoiled(tensors: Tensors, **more: torch.Tensor) -> Tensors:
    return tensors | {name.replace("__", "."): value for name, value in more.items()}


def test_what_has_no_place_is_named(models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path) -> None:
    """One line with the file's name, and nothing is left out in silence."""
    cls, module = models("flux")
    good = lora_files.weights(module, 4, 1)
    first = next(iter(good))
    width = module.transformer_blocks[0].attn.to_q.weight.shape[0]
    one = torch.ones(1)
    cases: dict[str, tuple[Tensors, str]] = {
        "stranger": (spoiled(good, transformer__nowhere__lora_A__weight=one), "no place for.*transformer.nowhere"),
        "kohya": (spoiled(fused(width), lora_unet_nowhere__lora_down__weight=one), "lora_unet_nowhere"),
        "half": ({k: v for k, v in good.items() if k != first}, "has no lora_A for transformer"),
        "shape": (good | {first: torch.ones(4, 7)}, r"does not fit this model: .* is \[4, 7\] where it must be \[4,"),
        "rank": (good | {first: torch.ones(5, good[first].shape[1])}, "does not fit this model"),
        "none": (good | {first: torch.ones(0, good[first].shape[1])}, "has no rank at"),
        "dora": (spoiled(good, x__dora_scale=one), r"is a DoRA \(x.dora_scale\)"),
        "loha": ({f"{first.split('.lora')[0]}.hada_w1_a": one}, "has no hada_w1_b for transformer"),
        "lokr": ({f"{first.split('.lora')[0]}.lokr_w1": one}, "has no lokr_w2_a|lokr_w2_b for transformer"),
        "vector": ({f"{first.split('.lora')[0]}.lokr_w{i}": torch.ones(i) for i in (1, 2)}, "which are no matrices"),
        "both": (good | {f"{first.split('.lora')[0]}.lokr_w1": one}, "has a LoRA and a LoKr for transformer"),
        "oft": ({f"{first.split('.lora')[0]}.oft_blocks": one}, "is an OFT"),
        "nan": (good | {first: torch.full_like(good[first], float("nan"))}, "holds numbers that are not finite, in"),
        "alpha": (good | {first.replace("lora_A.weight", "alpha"): torch.tensor(float("inf"))}, "not finite|alpha inf"),
        "twice": (good | {first.replace("lora_A", "lora_down"): good[first].clone()}, "beside another of its kind"),
        "checkpoint": ({"model.weight": one}, "holds no LoRA, but model.weight"),
        "empty": ({}, "holds no LoRA|has a damaged header"),
    }
    for name, (tensors, why) in cases.items():
        path = lora_files.write(tmp_path / f"{name}.safetensors", tensors)
        with pytest.raises(ValueError, match=why) as refused:
            read_lora(path, cls, {"transformer": module})
        assert str(path) in str(refused.value) and "\n" not in str(refused.value), refused.value


def test_files_of_other_families_are_named(models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path) -> None:
    for name, other in (("flux", "zimage"), ("zimage", "flux")):
        cls, module = models(name)
        path = lora_files.write(tmp_path / f"{other}.safetensors", lora_files.weights(models(other)[1], 4))
        with pytest.raises(ValueError, match=f"{other}.safetensors .*") as refused:
            read_lora(path, cls, {"transformer": module})
        assert "\n" not in str(refused.value)


def test_damaged_files_and_pickles(models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path) -> None:
    cls, module = models("flux")
    whole = lora_files.write(tmp_path / "whole.safetensors", lora_files.weights(module, 4))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    pickle, renamed = tmp_path / "lora.pt", tmp_path / "renamed.safetensors"
    torch.save(lora_files.weights(module, 4), pickle)
    renamed.write_bytes(pickle.read_bytes())
    for path, why in (
        (cut, "cut.safetensors is cut short"),
        (pickle, "lora.pt is a pickle"),
        (renamed, "renamed.safetensors is a pickle"),
        (tmp_path, "is no .safetensors or .sft file"),
    ):
        with pytest.raises(ValueError, match=why):
            read_lora(path, cls, {"transformer": module})
    with pytest.raises(FileNotFoundError, match="there is no file .*none.safetensors"):
        read_lora(tmp_path / "none.safetensors", cls, {"transformer": module})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int32])
def test_whole_numbers_are_no_lora(
    dtype: torch.dtype, models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path
) -> None:
    """Which they are times what, nothing tells; an alpha may be one."""
    cls, module = models("flux")
    plain = lora_files.weights(module, 4)
    name = next(iter(plain))
    path = lora_files.write(tmp_path / "whole.safetensors", plain | {name: (40 * plain[name]).to(dtype)})
    with pytest.raises(ValueError, match=f"whole.safetensors holds {name} as .*nothing tells") as why:
        read_lora(path, cls, {"transformer": module})
    assert "\n" not in str(why.value)
    alpha = {name.replace("lora_A.weight", "alpha"): torch.tensor(4)}
    read_lora(lora_files.write(tmp_path / "alpha.safetensors", plain | alpha), cls, {"transformer": module})


def test_what_diffusers_would_leave_out_is_named(
    models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its conversion is watched: weights that go into nothing are no part of what it gives."""
    _, module = models("flux")

    class Forgetful(diffusers.FluxPipeline):
        @classmethod
        def lora_state_dict(cls, tensors: Tensors, **_: Any) -> tuple[Tensors, None]:
            scaled = {f"transformer.{k}": 2 * v for k, v in tensors.items() if not k.startswith("odd")}
            return scaled, None

    good = {k.removeprefix("transformer."): v for k, v in lora_files.weights(module, 4).items()}
    path = lora_files.write(tmp_path / "odd.safetensors", good | {"odd.lora_A.weight": torch.ones(4, 4)})
    with pytest.raises(ValueError, match=r"has weights that Forgetful has no place for, such as odd.lora_A"):
        read_lora(path, Forgetful, {"transformer": module})


PARTS = ["lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_mid.weight", "alpha", "diff", "diff_b", "w_norm"]
PARTS += [f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")]
PARTS += [f"lokr_{part}" for part in ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2")]
PLACES = ["transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.norm_q"]
PLACES += ["double_blocks.0.img_attn.qkv", "lora_unet_double_blocks_0_img_attn_qkv"]
PLACES += ["lycoris_single_blocks_0_linear1", "final_layer.adaLN_modulation.1"]


def test_whatever_is_in_a_file_is_refused_in_one_line(
    models: Callable[[str], tuple[Any, nn.Module]], tmp_path: Path
) -> None:
    """Tensors of any shape under names that are known: each file is read, or refused by its name."""
    cls, module = models("flux")
    drawn, read = random.Random(0), 0
    for _ in range(150):
        tensors = {}
        for _ in range(drawn.randint(1, 5)):
            shape = [drawn.choice([0, 1, 4, 7, 32, 96]) for _ in range(drawn.choice([0, 1, 2, 2, 2, 3, 4]))]
            tensors[f"{drawn.choice(PLACES)}.{drawn.choice(PARTS)}"] = torch.rand(shape)
        path = lora_files.write(tmp_path / "any.safetensors", tensors)
        try:
            read_lora(path, cls, {"transformer": module})
            read += 1
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
    assert read < 150
