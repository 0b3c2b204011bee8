"""LoRAs of text encoders: the latents of stock diffusers with peft, and embeddings kept for that file and strength."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from peft import LoraConfig, inject_adapter_in_model

Folders = Callable[[str], Path]
STRENGTHS = (0.8, -0.3)


def file(folder: Path, to: Path, names: tuple[str, ...], seed: int, with_transformer: bool = True) -> Path:
    """A LoRA for encoders, named as diffusers does, and for the transformer."""
    tensors = lora_files.weights(lora_files.transformer_of(folder), 4, seed) if with_transformer else {}
    generator = torch.Generator().manual_seed(seed)
    pipe = tiny.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    for name in names:
        for path, inner in getattr(pipe, name).named_modules():
            if path.endswith((".q_proj", ".v_proj", ".fc1")):
                out, into = inner.weight.shape
                key = f"{name}.{path if path.startswith('text_model.') else f'text_model.{path}'}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(4, into, generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
    return lora_files.write(to / f"text{seed}.safetensors", tensors)


@pytest.mark.parametrize(
    ("name", "encoders"), [("flux", ("text_encoder",)), ("sd3", ("text_encoder", "text_encoder_2"))]
)
def test_equal_to_stock(
    name: str, encoders: tuple[str, ...], tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    folder = tiny_folders(name)
    loras = [(file(folder, tmp_path, encoders, seed), strength) for seed, strength in enumerate(STRENGTHS)]
    expected = lora_files.stock(folder, loras)
    pipe, encode, sample, _ = tiny.stages(name, folder, "sim", cache_dir=tmp_path, loras=loras)
    sim.reset_stats()
    cond = encode()
    record = manager("sim").timeline.stages[-1]
    assert record.name == "encode"
    assert record.peak_bytes <= record.planned.peak_vram_bytes <= 1.05 * record.peak_bytes
    torch.testing.assert_close(sample(cond), expected, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    only = {"transformer": STRENGTHS[0]}
    pipe.set_loras([(loras[0][0], only)])
    assert set(pipe.runner.loras[0].adapters) == {"transformer"}
    plain = encode()
    pipe.set_loras([])
    assert equal(encode(), plain) and not equal(plain, cond)


LAYERS = (".q", ".v", ".wo", ".q_proj", ".v_proj", ".down_proj")


def injected(
    folder: Path, component: str, strength: float, style: str = "{component}.{path}"
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A LoRA for an encoder that no pipeline of diffusers loads one for, and the stock latents with it, by peft."""
    tensors: dict[str, torch.Tensor] = {}

    def inject(pipe: Any) -> None:
        encoder = getattr(pipe, component)
        chosen = [path for path, _ in encoder.named_modules() if path.endswith(LAYERS) and "visual" not in path]
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=chosen), encoder)
        generator = torch.Generator().manual_seed(6)
        for path in chosen:
            layer = encoder.get_submodule(path)
            named = style.format(component=component, path=path, flat=path.replace(".", "_"))
            for part in ("lora_A", "lora_B"):
                weight = getattr(layer, part)["default"].weight
                weight.data = torch.randn(weight.shape, generator=generator)
                tensors[f"{named}.{part}.weight"] = weight.data.clone()
            layer.set_scale("default", strength)

    expected = lora_files.changed(folder, inject)
    return tensors, expected


@pytest.mark.parametrize(
    ("name", "component", "style"),
    [
        ("sd3", "text_encoder_3", "text_encoders.t5xxl.transformer.{path}"),
        pytest.param("flux", "text_encoder_2", "lora_te3_{flat}", marks=pytest.mark.soak),
        pytest.param("qwenimage", "text_encoder", "{component}.{path}", marks=pytest.mark.soak),
        pytest.param("hidream", "text_encoder_4", "text_encoders.llama.transformer.{path}", marks=pytest.mark.soak),
    ],
)
def test_other_encoders_than_diffusers_loads_for(
    name: str, component: str, style: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """T5, Qwen and Llama: as peft has them in place, whatever names the file has for them."""
    folder = tiny_folders(name)
    tensors, expected = injected(folder, component, 0.7, style)
    path = lora_files.write(tmp_path / "text.safetensors", tensors)
    pipe, encode, sample, _ = tiny.stages(name, folder, "sim", cache_dir=tmp_path)
    plain = encode()
    pipe.set_loras([(path, 0.7)])
    cond = encode()
    assert not equal(cond, plain)
    torch.testing.assert_close(sample(cond), expected, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    pipe.set_loras([(path, {component: 0.0})])
    assert equal(encode(), plain)


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_cached_for_the_same_file_and_strength(tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    """And a LoRA of the transformer alone changes nothing for the encoders."""
    folder = tiny_folders("flux")
    path = file(folder, tmp_path, ("text_encoder",), 3)
    alone = lora_files.write(tmp_path / "alone.safetensors", lora_files.weights(lora_files.transformer_of(folder), 4))
    pipe, encode, _, _ = tiny.stages("flux", folder, "sim", cache_dir=tmp_path)

    def encodes(*loras: tuple[Path, float]) -> bool:
        """Whether the encoders run."""
        pipe.set_loras(loras)
        before = len(manager("sim").timeline.events)
        encode()
        return len(manager("sim").timeline.events) > before

    assert encodes()
    assert not encodes()
    assert encodes((path, 0.8))
    assert not encodes((path, 0.8))
    assert not encodes((path, 0.8), (alone, 1.0))
    assert not encodes((alone, 1.0))
    assert not encodes((path, 0.0))
    assert encodes((path, 0.7))
    other = file(folder, tmp_path, ("text_encoder",), 4)
    assert encodes((other, 0.8))
    assert not encodes((path, 0.8))


def test_kohyas_names_of_text_encoders(tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    folder = tiny_folders("sd3")
    path = file(folder, tmp_path, ("text_encoder", "text_encoder_2"), 5, with_transformer=False)
    from safetensors.torch import load_file

    renamed = {}
    for name, value in load_file(path).items():
        encoder, _, rest = name.partition(".")
        layer, _, kind = rest.partition(".lora_")
        number = "2" if encoder.endswith("2") else "1"
        renamed[f"lora_te{number}_{layer.replace('.', '_')}.lora_{'down' if kind[0] == 'A' else 'up'}.weight"] = value
    kohya = lora_files.write(tmp_path / "kohya.safetensors", renamed)
    pipe, encode, _, _ = tiny.stages("sd3", folder, "sim", cache_dir=tmp_path, loras=[(path, 0.8)])
    expected = encode()
    pipe.set_loras([(kohya, 0.8)])
    assert equal(encode(), expected)
    pipe.set_loras([])
    assert not equal(encode(), expected)
