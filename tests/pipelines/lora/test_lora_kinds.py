"""Every kind of change that a LoRA file may have, beside every kind of layer: what merging it exactly would make."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from adapters import lora_files, lora_kinds
from adapters.lora_files import read_lora
from ballast.memory.weights.branches import Adapter, attach, detach, set_strengths
from ballast.memory.weights.changes import LAYERS, takes_changes
from peft import LoHaConfig, LoKrConfig, get_peft_model_state_dict, inject_adapter_in_model
from pipeline_classes import odd_pipelines
from single_files.original_names import ORIGINALS, converted, original
from single_files.original_unets import published_names
from torch import nn

Tensors = dict[str, torch.Tensor]
STRENGTH = 0.7


class Layers(nn.Module):
    """A layer of each kind that a change may be for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.point, self.norm = nn.Linear(12, 18), nn.Conv2d(12, 18, 1), nn.LayerNorm(12)
        self.conv1, self.conv2 = nn.Conv1d(12, 18, 3, stride=2, padding=1), nn.Conv2d(12, 18, 3, padding=1, bias=False)
        self.conv3, self.group, self.rms = nn.Conv3d(12, 18, (1, 3, 2), padding=1), nn.GroupNorm(4, 12), nn.RMSNorm(12)


def inputs(layer: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = {"Conv1d": (7,), "Conv2d": (5, 6), "Conv3d": (2, 5, 4), "GroupNorm": (5, 5)}.get(type(layer).__name__, ())
    weight = layer._parameters["weight"]
    assert weight is not None
    into = weight.shape[0] if weight.ndim == 1 else weight.shape[1]
    if type(layer).__name__ == "MoEGate":  # HiDream's, which takes [batch, tokens, channels]
        return torch.randn(2, 5, into, generator=generator)
    return torch.randn(2, into, *size, generator=generator)


def merged(layer: nn.Module, weight: torch.Tensor | None, bias: torch.Tensor | None, x: torch.Tensor) -> Any:
    """What a layer makes with its weights changed."""
    changed = {name: value.clone() for name, value in layer.named_parameters()}
    for name, change in (("weight", weight), ("bias", bias)):
        if change is not None:
            changed[name] = changed[name] + STRENGTH * change
    return torch.func.functional_call(layer, changed, (x,))


def read(path: Path, modules: dict[str, nn.Module], cls: Any = None) -> dict[str, Adapter]:
    return {name: Adapter(name, parts) for name, parts in read_lora(path, cls, modules).items()}


EVERYWHERE = [(kind, layer) for kind in lora_kinds.KINDS for layer in ("linear", "point", "conv1", "conv2", "conv3")]
KERNELS = [(kind, layer) for kind in lora_kinds.TUCKER for layer in ("conv1", "conv2", "conv3")]


@pytest.mark.parametrize(("kind", "layer"), EVERYWHERE + KERNELS)
@torch.no_grad()
def test_a_layer_is_as_if_merged(kind: str, layer: str, tmp_path: Path) -> None:
    module, plain = Layers(), getattr(Layers(), layer)
    make = (lora_kinds.KINDS | lora_kinds.TUCKER)[kind]
    tensors, weight = make(layer, tuple(plain.weight.shape), torch.Generator().manual_seed(2))
    bias = torch.linspace(-1, 1, 18) if plain.bias is not None else None
    tensors |= {} if bias is None else {f"{layer}.diff_b": bias}
    path = lora_files.write(tmp_path / "change.safetensors", tensors)
    attach(module, [(read(path, {"transformer": module})["transformer"], STRENGTH)])
    x = inputs(plain)
    torch.testing.assert_close(getattr(module, layer)(x), merged(plain, weight, bias, x), atol=1e-5, rtol=1e-5)


DELTAS = [(layer, names) for layer in ("norm", "group", "rms") for names in (("diff", "diff_b"), ("w_norm", "b_norm"))]


@pytest.mark.parametrize(("layer", "names"), [*DELTAS, ("norm", ("", "diff_b")), ("group", ("", "diff_b"))])
@torch.no_grad()
def test_norms_take_deltas(layer: str, names: tuple[str, str], tmp_path: Path) -> None:
    module, plain = Layers(), getattr(Layers(), layer)
    plain.weight.uniform_()
    getattr(module, layer).load_state_dict(plain.state_dict())
    has_bias = getattr(plain, "bias", None) is not None
    weight = torch.linspace(-1, 2, 12) if names[0] else None
    bias = torch.linspace(3, -1, 12) if has_bias else None
    named = {names[0]: weight, names[1]: bias}
    tensors = {f"{layer}.{name}": value for name, value in named.items() if value is not None}
    path = lora_files.write(tmp_path / "change.safetensors", tensors)
    attach(module, [(read(path, {"transformer": module})["transformer"], STRENGTH)])
    x = inputs(plain)
    torch.testing.assert_close(getattr(module, layer)(x), merged(plain, weight, bias, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [LoHaConfig, LoKrConfig])
@pytest.mark.parametrize("effective", [False, True])
@torch.no_grad()
def test_the_numbers_are_pefts(config: Any, effective: bool, tmp_path: Path) -> None:
    theirs, ours = Layers(), Layers()
    chosen = ["linear", "point", "conv1", "conv2"]
    more: dict[str, Any] = {"decompose_both": True} if config is LoKrConfig else {}
    inject_adapter_in_model(
        config(r=2, alpha=3, target_modules=chosen, init_weights=False, use_effective_conv2d=effective, **more), theirs
    )
    state = get_peft_model_state_dict(theirs)
    state |= {f"base_model.model.{layer}.alpha": torch.tensor(3.0) for layer in chosen}
    path = lora_files.write(tmp_path / "peft.safetensors", state)
    attach(ours, [(read(path, {"transformer": ours})["transformer"], 1.0)])
    for layer in chosen:
        x = inputs(getattr(Layers(), layer))
        found, expected = getattr(ours, layer)(x), getattr(theirs, layer)(x)
        assert (found - getattr(Layers(), layer)(x)).abs().max() > 1e-4
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.soak
@torch.no_grad()
def test_every_kind_compiles_whole(tmp_path: Path) -> None:
    """Without a break of the graph, and a change of strength is followed."""
    for kind, make in (lora_kinds.KINDS | lora_kinds.TUCKER).items():
        layer = "conv2" if kind in lora_kinds.TUCKER else "linear"
        module, plain = Layers(), getattr(Layers(), layer)
        tensors, weight = make(layer, tuple(plain.weight.shape), torch.Generator().manual_seed(2))
        path = lora_files.write(tmp_path / "change.safetensors", tensors)
        adapter, x = read(path, {"transformer": module})["transformer"], inputs(plain)
        attach(module, [(adapter, 0.1)])
        torch._dynamo.reset()
        fast = torch.compile(getattr(module, layer), backend="eager", fullgraph=True)
        fast(x)
        set_strengths(module, [(adapter, STRENGTH)])
        torch.testing.assert_close(fast(x), merged(plain, weight, None, x), atol=1e-5, rtol=1e-5, msg=kind)
    torch._dynamo.reset()


# In the names of the files that models are published in


@functools.cache
def unet() -> nn.Module:
    return odd_pipelines.sdxl().unet


MODULES: dict[str, tuple[Any, nn.Module]] = {}


def of_family(name: str) -> tuple[Any, nn.Module]:
    if name not in MODULES:
        pipe = tiny.FAMILIES[name].build()
        MODULES[name] = type(pipe), pipe.transformer
    return MODULES[name]


def whole(name: str, module: nn.Module, kinds: list[str], part: int) -> tuple[Tensors, Tensors]:
    """Changes of each second layer of a model's original files, by their names, and the change of each parameter."""
    state = original(name, module.state_dict())
    inner = {path for path, each in module.named_modules() if takes_changes(each) and getattr(each, "groups", 1) == 1}
    takes = converted(name, {key: torch.full_like(value, float(i)) for i, (key, value) in enumerate(state.items())})
    fit = {int(value.flatten()[0]) for key, value in takes.items() if key.rpartition(".")[0] in inner}
    others = {path for path in inner if not isinstance(module.get_submodule(path), LAYERS)}  # norms, HiDream's gates
    bare = {int(value.flatten()[0]) for key, value in takes.items() if key.rpartition(".")[0] in others}
    generator, tensors, dense = torch.Generator().manual_seed(3), {}, {}
    for i, (key, value) in enumerate(state.items()):
        dense[key] = torch.zeros_like(value)
        layer, _, what = key.rpartition(".")
        if i not in fit or i % 2 != part or what not in ("weight", "bias") or ("embed" in layer and value.ndim > 2):
            continue
        if what == "bias" or value.ndim == 1 or i in bare:
            dense[key] = 0.1 * torch.randn(value.shape, generator=generator)
            tensors[f"{layer}.{'diff_b' if what == 'bias' else 'diff'}"] = dense[key]
            continue
        made, dense[key] = lora_kinds.KINDS[kinds[i // 2 % len(kinds)]](layer, tuple(value.shape), generator)
        tensors |= made
    return tensors, converted(name, dense)


def styled(style: str, name: str) -> str:
    layer, what = re.fullmatch(r"(.+?)\.(lora_.+|hada_.+|lokr_.+|diff|diff_b|alpha)", name).groups()  # type: ignore[union-attr]
    return f"{style.format(layer if '.' in style else layer.replace('.', '_'))}.{what}"


@pytest.mark.parametrize("name", ORIGINALS)
@torch.no_grad()
def test_rows_go_where_the_weights_of_a_file_do(name: str, tmp_path: Path) -> None:
    """Of every kind: joined projections come apart, halves that are swapped are swapped; and with underscores too."""
    cls, module = of_family(name)
    for part, style in ((0, "diffusion_model.{}"), (1, "diffusion_model.{}"), (1, "lycoris_{}")):
        tensors, expected = whole(name, module, list(lora_kinds.KINDS), part)
        tensors = {styled(style, key): value for key, value in tensors.items()}
        path = lora_files.write(tmp_path / f"{part}.safetensors", tensors)
        found = read_lora(path, cls, {"transformer": module})["transformer"]
        changed = {key.rpartition(".")[0] for key, value in expected.items() if value.any()}
        assert found.keys() == changed and len(found) > 4
        wanted = {}
        for target in found:
            layer = module.get_submodule(target)
            bias = expected.get(f"{target}.bias")
            wanted[target] = merged(layer, expected[f"{target}.weight"], bias, inputs(layer))
        attach(module, [(Adapter("any", found), STRENGTH)])
        for target, result in wanted.items():
            layer = module.get_submodule(target)
            torch.testing.assert_close(
                layer(inputs(layer)), result, atol=1e-4, rtol=1e-4, msg=f"{target}, not as merged"
            )
        detach(module)


@pytest.mark.parametrize("style", ["lora_unet_{}", "diffusion_model.{}", "lycoris_{}"])
@pytest.mark.parametrize("part", [slice(None), slice(0, None, 2), slice(1, None, 2), slice(-1, None)])
def test_a_unet_is_the_same_by_the_names_of_its_files(style: str, part: slice, tmp_path: Path) -> None:
    """Of every kind, all layers, each second one, and one alone."""
    module = unet()
    layers = {path: getattr(module.get_submodule(path), "weight", None) for path in published_names(module)}
    weights = {path: weight for path, weight in layers.items() if weight is not None and weight.ndim > 1}
    generator, ours, theirs = torch.Generator().manual_seed(4), {}, {}
    for i, path in enumerate(list(weights)[part]):
        make = lora_kinds.KINDS[list(lora_kinds.KINDS)[i % len(lora_kinds.KINDS)]]
        tensors, _ = make(path, tuple(weights[path].shape), generator)
        ours |= tensors
        theirs |= {name.replace(path, published_names(module)[path], 1): value for name, value in tensors.items()}
    made = []
    for i, tensors in enumerate((ours, {styled(style, name): value for name, value in theirs.items()})):
        path = lora_files.write(tmp_path / f"{i}.safetensors", tensors)
        made.append(read_lora(path, None, {"unet": module})["unet"])
    assert made[0].keys() == made[1].keys() == set(list(weights)[part])
    for path, (change,) in made[0].items():
        (other,) = made[1][path]
        assert type(other) is type(change) and other.scaling(1.0) == change.scaling(1.0), path
        assert all(torch.equal(value, other.tensors()[name]) for name, value in change.tensors().items()), path
