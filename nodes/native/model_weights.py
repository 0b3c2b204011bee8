"""The weights of ComfyUI's own MODEL: bytes by type, and the patches on them. Nothing is loaded."""

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
    """Bytes by type as they are stored, largest first.

    `patched` weights have patches, such as LoRAs, whose tensors take `patch_bytes`.
    """

    by_type: tuple[tuple[str, int], ...]
    patched: int
    patch_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.by_type)

    def describe(self) -> str:
        """Return one line: the sum, each type, the patches."""
        types = ", ".join(f"{format_bytes(nbytes)} {kind}" for kind, nbytes in self.by_type)
        patches = f"; patches (LoRA) on {self.patched} weights, {format_bytes(self.patch_bytes)}"
        return f"Weights: {format_bytes(self.total_bytes)}: {types}{patches if self.patched else ''}."


def weights_of(patcher: Any) -> Weights:
    """Return the weights of a patcher's module, each counted once."""
    types: Counter[str] = Counter()
    for tensor in (*patcher.model.parameters(), *patcher.model.buffers()):
        types[_kind(tensor)] += tensor.nbytes
    patches = {id(t): t.nbytes for entries in patcher.patches.values() for t in _tensors(entries)}
    return Weights(tuple(types.most_common()), len(patcher.patches), sum(patches.values()))


def _kind(tensor: torch.Tensor) -> str:
    """Return how a weight is stored: its dtype, or how it is quantized."""
    if (ggml := getattr(tensor, "tensor_type", None)) is not None:  # as packs that load GGUF have it
        return f"GGUF {getattr(ggml, 'name', ggml)}"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        layout = getattr(tensor, "_layout_cls", None) or getattr(tensor, "layout_type", None) or type(tensor)
        name = str(getattr(layout, "__name__", layout))
        return f"quantized {name.removeprefix('TensorCore').removesuffix('Layout')}"
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a list of patches."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "weights"):  # an adapter of the host's
        yield from _tensors(value.weights)
