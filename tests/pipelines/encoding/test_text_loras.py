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
    assert set(pipe._loras[0].adapters) == {"transformer"}
    plain = encode()
    pipe.set_loras([])
    assert equal(encode(), plain) and not equal(plain, cond)


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
