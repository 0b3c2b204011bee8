"""One way of reading weights, measured in a process of its own: its seconds, and how high its RAM rose."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from ..memory import ManagedModel
from ..memory.weights.stored import stored_tensors
from .rss import peak_rss_bytes

_LAYERS, _WORDS = 24, 32128  # of T5-XXL
_SQUARES = 11.5 * _LAYERS  # of the width, that the products of all layers make up


def width_of(nbytes: float) -> int:
    """Return the width with which the weights take about so many bytes."""
    half = _WORDS / _SQUARES / 2
    return max(16, 16 * round(((nbytes / 2 / _SQUARES + half**2) ** 0.5 - half) / 16))


def config_of(width: int) -> T5Config:
    """Return the config of a text encoder as T5-XXL is, of another width."""
    return T5Config(
        vocab_size=_WORDS, d_model=width, d_kv=16, d_ff=width * 5 // 2, num_layers=_LAYERS, num_heads=width // 16,
        feed_forward_proj="gated-gelu", architectures=["T5EncoderModel"],
    )  # fmt: skip


def _skeleton(width: int) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = T5EncoderModel(config_of(width))
    return module.to(torch.bfloat16).requires_grad_(False)


def names_of(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, in the order in which a file has them."""
    return {name: tuple(tensor.shape) for name, tensor in sorted(_skeleton(width).named_parameters())}


def _by_ballast(path: Path, width: int) -> nn.Module:
    def never() -> nn.Module:
        raise RuntimeError("not read straight from the file")

    unit = ManagedModel("load", "transformer", lambda: _skeleton(width), never, stored=lambda: stored_tensors([path]))
    unit.load()
    return unit.module


def _by_stock(path: Path, width: int) -> nn.Module:
    return T5EncoderModel.from_pretrained(path.parent, dtype=torch.bfloat16)


def _by_stock_copied(path: Path, width: int) -> nn.Module:
    module = _by_stock(path, width)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


OURS = "ballast"
STOCK_COPIED = "from_pretrained, copied"  # to anonymous memory, as ours lies; else it maps the file
WAYS: dict[str, Callable[[Path, int], nn.Module]] = {
    OURS: _by_ballast,
    "from_pretrained": _by_stock,
    STOCK_COPIED: _by_stock_copied,
}


def main(argv: Sequence[str]) -> None:
    """Measure what a request (JSON) asks for, and write what was found to a file."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    answer.write_text(json.dumps(measure(Path(request["path"]), request["way"])), "utf-8")


def measure(path: Path, way: str) -> dict[str, float]:
    """Seconds until each page of the weights was looked at, since what is mapped is only read then. RAM in bytes."""
    width = stored_tensors([path])["encoder.final_layer_norm.weight"].shape[0]
    _skeleton(width)
    before = _start_peak()
    start = time.perf_counter()
    module = WAYS[way](path, width)
    for parameter in module.parameters():
        parameter.reshape(-1)[:: 4096 // parameter.itemsize].sum()
    seconds = time.perf_counter() - start
    peak_bytes = peak_rss_bytes() - before
    values = list(module.state_dict().values())
    total = sum(int(value.view(torch.int16).sum(dtype=torch.int64)) for value in values)
    return {"seconds": seconds, "peak_bytes": peak_bytes, "sum": total, "bytes": sum(value.nbytes for value in values)}


def _start_peak() -> int:
    """Start the peak anew, where the system can do that. Return the RAM of the process now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return psutil.Process().memory_info().rss
