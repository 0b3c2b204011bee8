"""LoRAs on a weight in RAM, at each use of it: when they are as merged, and what they take beside the weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_runs: list[object] = []  # that have a budget


@contextmanager
def sampling() -> Iterator[None]:
    """Make LoRAs on weights in RAM give what they give in VRAM, until the block ends."""
    _runs.append(run := object())
    try:
        yield
    finally:
        _runs.remove(run)


def is_sampling() -> bool:
    """Return whether it is that time, in any thread."""
    return bool(_runs)


def merge_type(device: torch.device) -> torch.dtype:
    """In which the host merges LoRAs into the weights that stay on a device."""
    from comfy import model_management as mm

    chosen: Any = getattr(mm, "lora_compute_dtype", None)  # 0.8; float32 before
    return chosen(device) if chosen else torch.float32


def workspace_bytes(numel: int, merges_in: torch.dtype, computes_in: torch.dtype) -> int:
    """Return what they take at their most: the weight in another type, a LoRA, and that times its strength."""
    return merging_bytes(numel, merges_in) - (numel * merges_in.itemsize if merges_in == computes_in else 0)


def merging_bytes(numel: int, merges_in: torch.dtype) -> int:
    """Return the same for a weight that comes from RAM in that other type, as those do that are to stay in VRAM."""
    products = 2 * torch.float32.itemsize + (0 if merges_in == torch.float32 else merges_in.itemsize)
    return numel * (products + merges_in.itemsize)


def expected_bytes(numel: int, computes_in: torch.dtype) -> int:
    """Return what the host expects them to take."""
    from comfy import model_patcher

    return numel * computes_in.itemsize * getattr(model_patcher, "LOWVRAM_PATCH_ESTIMATE_MATH_FACTOR", 0)  # 0.8


def unexpected_bytes(numel: int, device: torch.device, computes_in: torch.dtype) -> int:
    """Return what they take beyond that."""
    return max(0, workspace_bytes(numel, merge_type(device), computes_in) - expected_bytes(numel, computes_in))
