"""The weights of ComfyUI's own MODEL: bytes by type and by module, and the LoRAs on them. Nothing is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...memory.sizes import format_bytes


@dataclass(frozen=True)
class Weights:
    """Bytes in all, by type as they are stored, and of each module that has some, largest first.

    `patched` weights have patches, such as LoRAs, whose tensors take `patch_bytes`.
    """

    total_bytes: int
    by_type: tuple[tuple[str, int], ...]
    modules: tuple[int, ...]
    patched: int
    patch_bytes: int

    def describe(self) -> str:
        """One line: all, each type, the patches."""
        types = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in self.by_type)
        patches = f"; patches (LoRA) on {self.patched} weights, {format_bytes(self.patch_bytes)}"
        return f"Weights: {format_bytes(self.total_bytes)}: {types}{patches if self.patched else ''}."


def weights_of(patcher: Any) -> Weights:
    """The weights of a patcher's module, each counted once."""
    types: Counter[str] = Counter()
    modules, seen = [], set()
    for module in patcher.model.modules():
        own = [t for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if id(t) not in seen]
        seen |= {id(tensor) for tensor in own}
        for tensor in own:
            types[_kind(tensor)] += tensor.nbytes
        if own:
            modules.append(sum(tensor.nbytes for tensor in own))
    patches = {id(t): t.nbytes for entries in patcher.patches.values() for t in _tensors(entries)}
    return Weights(
        total_bytes=sum(modules),
        by_type=tuple(types.most_common()),
        modules=tuple(sorted(modules, reverse=True)),
        patched=len(patcher.patches),
        patch_bytes=sum(patches.values()),
    )


def _kind(tensor: torch.Tensor) -> str:
    """How a weight is stored: its dtype, or how it is quantized."""
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
