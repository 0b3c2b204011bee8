"""The weights of ComfyUI's own MODEL: bytes by type and by module, and the LoRAs on them. Nothing is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...memory.sizes import format_bytes
from .at_use import expected_bytes, merge_type, merging_bytes, unexpected_bytes, workspace_bytes
from .placing import Part, in_order


@dataclass(frozen=True)
class Weights:
    """Bytes in all, by type as they are stored, and the modules that have some, in the order that the host loads them.

    `patched` weights have patches, such as LoRAs, whose tensors take `patch_bytes`.
    """

    total_bytes: int
    by_type: tuple[tuple[str, int], ...]
    parts: tuple[Part, ...]
    patched: int
    patch_bytes: int

    def describe(self) -> str:
        """One line: all, each type, the patches."""
        types = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_type)
        patches = f"; patches (LoRA) on {self.patched} weights, {format_bytes(self.patch_bytes)}"
        return f"Weights: {format_bytes(self.total_bytes)}: {types}{patches if self.patched else ''}."


def weights_of(patcher: Any) -> Weights:
    """Return the weights of a patcher's module, each counted once."""
    types: Counter[str] = Counter()
    parts, seen = [], set()
    for name, module in patcher.model.named_modules():
        own = [t for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if id(t) not in seen]
        seen |= {id(tensor) for tensor in own}
        for tensor in own:
            types[_kind(tensor)] += tensor.nbytes
        if own:
            parts.append(Part(name, sum(tensor.nbytes for tensor in own), **_besides(patcher, name, module)))
    patches = {id(t): t.nbytes for entries in patcher.patches.values() for t in _tensors(entries)}
    return Weights(
        total_bytes=sum(part.bytes for part in parts),
        by_type=tuple(types.most_common()),
        parts=in_order(parts),
        patched=len(patcher.patches),
        patch_bytes=sum(patches.values()),
    )


def _besides(patcher: Any, name: str, module: nn.Module) -> dict[str, int]:
    """Return what a module takes at its use from RAM besides its own bytes, see `Part`."""
    casts_to = getattr(patcher.model, "manual_cast_dtype", None)
    on, beside, unexpected, at_use, kept, merging = torch.device(patcher.load_device), 0, 0, 0, 0, 0
    for key in ("weight", "bias"):
        tensor = getattr(module, key, None)
        if not hasattr(module, "comfy_cast_weights") or not isinstance(tensor, torch.Tensor):
            continue
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        computes_in = casts_to or tensor.dtype
        cast = 0 if plain and tensor.dtype == computes_in else tensor.numel() * computes_in.itemsize
        if f"{name}.{key}" in patcher.patches and not getattr(tensor, "patches", None):  # which GGUF applies itself
            merges_in = merge_type(on)
            merging = max(merging, merging_bytes(tensor.numel(), merges_in))
            beside += expected_bytes(tensor.numel(), computes_in)
            unexpected = max(unexpected, unexpected_bytes(tensor.numel(), on, computes_in))
            at_use = max(at_use, kept + cast + workspace_bytes(tensor.numel(), merges_in, computes_in))
            kept += cast if merges_in == computes_in else tensor.numel() * computes_in.itemsize
        elif casts_to:
            beside, kept = beside + cast, kept + cast
    at_use = max(at_use, kept)
    return {"beside": beside, "unexpected": unexpected, "at_use": at_use, "kept": kept, "merging": merging}


def _kind(tensor: torch.Tensor) -> str:
    """Return how a weight is stored: its dtype, or how it is quantized."""
    if (ggml := getattr(tensor, "tensor_type", None)) is not None:  # of packs that load GGUF
        return f"GGUF {getattr(ggml, 'name', ggml)}"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        layout = getattr(tensor, "_layout_cls", None) or getattr(tensor, "layout_type", None) or type(tensor)
        name = str(getattr(layout, "__name__", layout))
        return f"quantized {name.removeprefix('TensorCore').removesuffix('Layout')}"
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "weights"):  # an adapter of the host's
        yield from _tensors(value.weights)
