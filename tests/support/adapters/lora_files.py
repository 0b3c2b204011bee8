"""LoRA files for tiny pipelines, and what stock diffusers makes of them with peft."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import tiny
import torch
from ballast.pipelines.lora.build import Branches, build
from ballast.pipelines.lora.file import LoraFile
from diffusers import DiffusionPipeline
from safetensors.torch import load_file as load_file
from safetensors.torch import save_file
from torch import nn

TARGETS = (
    "to_q", "to_k", "to_v", "to_out.0", "proj", "linear", "ff", "net", "proj_out", "x_embedder", "w1", "w2", "mod.1",
)  # fmt: skip


def targets(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model that LoRAs are mostly made for."""
    found = {name: inner for name, inner in module.named_modules() if isinstance(inner, nn.Linear)}
    return {name: inner for name, inner in found.items() if any(part in name for part in TARGETS)}


def weights(module: nn.Module, rank: int, seed: int = 0, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    """A LoRA with random A and B, named as diffusers and peft do."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, inner in targets(module).items():
        out, into = inner.weight.shape
        found[f"{prefix}{name}.lora_A.weight"] = torch.randn(rank, into, generator=generator) / into**0.5
        found[f"{prefix}{name}.lora_B.weight"] = 0.5 * torch.randn(out, rank, generator=generator) / rank**0.5
    return found


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """A LoRA file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, dict(metadata or {}))
    return path


def read_lora(path: Path, pipeline_class: Any, modules: Mapping[str, nn.Module], **more: Any) -> Branches:
    """The changes that a file makes to the modules of a pipeline."""
    return build(LoraFile.open(path), pipeline_class, modules, **more)


def transformer_of(folder: Path) -> nn.Module:
    """The transformer of a pipeline's folder, with its weights."""
    name = json.loads((folder / "model_index.json").read_text("utf-8"))["transformer"][1]
    return getattr(diffusers, name).from_pretrained(folder / "transformer", local_files_only=True)


def stock(folder: Path, loras: Sequence[tuple[Path, float]], **more: Any) -> torch.Tensor:
    """The latents of the stock pipeline, with these files loaded by peft."""

    def load(pipe: Any) -> None:
        names = [f"lora{i}" for i, _ in enumerate(loras)]
        for name, (path, _) in zip(names, loras, strict=True):
            pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
        pipe.set_adapters(names, [strength for _, strength in loras])

    return changed(folder, load, **more)


def changed(folder: Path, change: Callable[[Any], None], **more: Any) -> torch.Tensor:
    """The latents of the stock pipeline, once something of it was changed."""
    plain = DiffusionPipeline.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> DiffusionPipeline:
        pipe = plain(*args, **kwargs)
        change(pipe)
        return pipe

    with mock.patch.object(DiffusionPipeline, "from_pretrained", loaded):  # which puts the class method back as it was
        return tiny.stock(folder, **more)[0].float()


def two(folder: Path, to: Path) -> list[tuple[Path, float]]:
    """LoRAs of rank 4 and 32 for a pipeline's transformer."""
    module = transformer_of(folder)
    made = [write(to / f"rank{rank}.safetensors", weights(module, rank, rank)) for rank in (4, 32)]
    return list(zip(made, (0.8, -0.3), strict=True))
