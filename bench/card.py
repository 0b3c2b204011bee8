"""Facts of the card, and how fast it copies and computes, to read all other figures with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import conv2d, scaled_dot_product_attention

from .harness import Run
from .measure import Meter

_ASKED = "driver_version,pcie.link.gen.max,pcie.link.width.max"


@torch.inference_mode()
def measure(to: Run) -> None:
    """Add a row for each kind of copy and each kind of product."""
    meter = to.meter()
    to.tell(link=_link(to.dry))
    for name, nbytes, call in _copies(meter, 2**20 if to.dry else 2**29):
        to.attempt(name, 0, _row, to, meter, name, "GB/s", nbytes, call)
    for name, operations, call in _products(meter, 64 if to.dry else 4096):
        to.attempt(name, 0, _row, to, meter, name, "TFLOPS", operations / 1e3, call)


def _row(to: Run, meter: Meter, name: str, unit: str, amount: float, call: Callable[[], Any]) -> None:
    seconds = meter.steady(call, 2 if to.dry else 7)
    to.row(name=name, rate=amount / 1e9 / seconds if seconds else None, unit=unit, seconds=seconds)


def _copies(meter: Meter, nbytes: int) -> Sequence[tuple[str, int, Callable[[], Any]]]:
    device, paged = torch.empty(nbytes, dtype=torch.uint8, device=meter.device), torch.ones(nbytes, dtype=torch.uint8)
    pinned = paged.pin_memory()
    return [
        ("pinned to card", nbytes, lambda: device.copy_(pinned, non_blocking=True)),
        ("paged to card", nbytes, lambda: device.copy_(paged, non_blocking=True)),
        ("card to pinned", nbytes, lambda: pinned.copy_(device, non_blocking=True)),
    ]


def _products(meter: Meter, width: int) -> Sequence[tuple[str, float, Callable[[], Any]]]:
    """Products, attention and convolutions on random values: on equal ones a card takes less power, and runs faster."""

    def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape).to(meter.device, dtype)

    def square(one: torch.Tensor) -> Callable[[], Any]:
        return lambda: one @ one

    side = channels = width // 16
    heads = noise(1, 24, width, 64, dtype=torch.bfloat16)
    picture = noise(1, channels, side, side, dtype=torch.float32)
    kernel = noise(channels, channels, 3, 3, dtype=torch.float32)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return [
        *((f"{name} product", 2 * width**3, square(noise(width, width, dtype=kind))) for name, kind in kinds.items()),
        ("bf16 attention", 4 * 24 * width**2 * 64, lambda: scaled_dot_product_attention(heads, heads, heads)),
        ("fp32 convolution", 18 * channels**2 * side**2, lambda: conv2d(picture, kernel, padding=1)),
    ]


def _link(dry: bool) -> str | None:
    """Return the driver, and the PCIe generation and width that it tells of each card; None where it tells nothing."""
    if dry:
        return "simulated"
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(told.strip().splitlines())
