"""Gemma 2 and 3 in single files, safetensors and GGUF, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import gguf
import pytest
import tiny
import torch
import transformers
from ballast.memory.weights.encoding import EncodedWeight
from safetensors.torch import save_file
from selection import few
from single_files import base_of, state_of, transformer_file
from single_files.comfy_folders import write_gguf
from tiny_parts import decoder_sizes

PROMPT = ("a red boat",)


def gemma3() -> transformers.PreTrainedModel:
    config = transformers.Gemma3TextConfig(**decoder_sizes(layers=3, head_dim=8, sliding_window=16))
    config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextModel(config)


@pytest.fixture(params=["gemma2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A pipeline that reads Gemma's states, whose norms are no longer all alike."""
    torch.manual_seed(0)
    pipe: Any = tiny.FAMILIES["lumina2"].build()
    if request.param == "gemma3":
        pipe.register_modules(text_encoder=gemma3().eval())
    with torch.no_grad():
        for name, parameter in pipe.text_encoder.named_parameters():
            parameter.normal_(std=0.5 if "norm" in name else 0.1)
    pipe.save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def in_gguf(state: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter writes it: by the names of the package `gguf`, 1 added to the norms."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 99)
    made = {}
    for name, tensor in state.items():
        full = f"model.{name.removeprefix('model.')}"
        made[str(names.get_name(full, (".weight",)))] = tensor + 1 if name.endswith("norm.weight") else tensor
    return made


def opened(folder: Path, encoder: Path, at: Path) -> Any:
    model = transformer_file("lumina2", folder, at / "model.safetensors")
    base = base_of(folder, at / "base", "text_encoder")
    return ballast.open_pipeline(model, device="sim", base=base, text_encoders=[encoder], cache_dir=at)


@pytest.mark.parametrize("kind", few(["plain", "prefixed", "gguf"], "prefixed", "gguf"))
def test_it_gives_the_states_of_transformers(kind: str, folder: Path, tmp_path: Path, sim: ModuleType) -> None:
    """The embeddings of the stock pipeline, and 0 bytes left."""
    state = state_of(folder, "text_encoder")
    path = tmp_path / f"gemma.{'gguf' if kind == 'gguf' else 'safetensors'}"
    if kind == "gguf":
        write_gguf(path, in_gguf(state, folder.name), folder.name)
    else:
        prefix = "model." if kind == "prefixed" else ""
        more = {"spiece_model": torch.zeros(9, dtype=torch.uint8), "vision_model.a": torch.zeros(2)} if prefix else {}
        save_file({f"{prefix}{name}": tensor for name, tensor in state.items()} | more, path)
    stock: Any = diffusers.Lumina2Pipeline.from_pretrained(folder)
    with torch.inference_mode():
        made = stock.encode_prompt(*PROMPT)
    expected = dict(zip(("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds"), made, strict=False))
    pipe = opened(folder, path, tmp_path)
    stored = pipe.model.components["text_encoder"].stored
    assert (kind == "gguf") == any(isinstance(source, EncodedWeight) for source in stored.values())
    found = pipe.encode(PROMPT[0]).tensors
    assert sim.stats().allocated_bytes == 0
    for key in ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds"):
        torch.testing.assert_close(found[key], expected[key], atol=1e-5, rtol=0)
