"""One way of reading weights, measured in a process of its own: its seconds, and how high its RAM rose."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from ..memory import ManagedModel
from ..memory.units import hostbuffer
from ..memory.units.weights import stored_tensors
from .rss import peak_rss_bytes

_WOKEN_BYTES = 64 * 2**20
_BLOCKS, _SQUARES = 24, 12  # and how many squares of the width the products of a block make up


class _Block(nn.Module):
    """As large as a block of a transformer, with its small tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(_BLOCKS))


def width_of(nbytes: float) -> int:
    """Return the width with which the weights take about so many bytes."""
    return max(16, 16 * round((nbytes / 2 / _BLOCKS / _SQUARES) ** 0.5 / 16))


def _skeleton(width: int) -> nn.Module:
    with torch.device("meta"):
        return _Model(width).to(torch.bfloat16).requires_grad_(False)


def names_of(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, in the order in which a file has them."""
    return {name: tuple(tensor.shape) for name, tensor in sorted(_skeleton(width).state_dict().items())}


def _by_ballast(path: Path, width: int) -> nn.Module:
    def never() -> nn.Module:
        raise RuntimeError("not read straight from the file")

    unit = ManagedModel("load", "transformer", lambda: _skeleton(width), never, stored=lambda: stored_tensors([path]))
    unit.load()
    return unit.module


def _assigned(path: Path, width: int) -> nn.Module:
    module = _skeleton(width)
    module.load_state_dict(load_file(path), assign=True)
    return module


def _copied(path: Path, width: int) -> nn.Module:
    module = _skeleton(width).to_empty(device="cpu")
    module.load_state_dict(load_file(path))
    return module


WAYS: dict[str, Callable[[Path, int], nn.Module]] = {
    "ballast": _by_ballast,
    "load_file, assign=True": _assigned,
    "load_file, copied": _copied,
}


def main(argv: Sequence[str]) -> None:
    """Measure what a request (JSON) asks for, and write what was found to a file."""
    request, answer = json.loads(argv[0]), Path(argv[1])
    answer.write_text(json.dumps(measure(Path(request["path"]), request["way"])), "utf-8")


def measure(path: Path, way: str) -> dict[str, float]:
    """Seconds until each page of the weights was looked at, since what is mapped is only read then. RAM in bytes."""
    width = stored_tensors([path])["blocks.0.q.bias"].shape[0]
    _skeleton(width)
    _wake_memory(path.stat().st_size)
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


def _wake_memory(nbytes: int) -> None:
    """Write to as much memory as will be wanted, and free it: all ways are to find what they would on bare metal.

    A virtual machine may give pages that are free for some seconds back to its host, the huge ones first. To have them
    again takes longer than to read a disk, and which way pays for it is chance.
    """
    held = [hostbuffer.allocate(_WOKEN_BYTES).fill_(1) for _ in range(-(-nbytes // _WOKEN_BYTES) + 1)]
    held.clear()


def _start_peak() -> int:
    """Start the peak anew, where the system can do that. Return the RAM of the process now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return psutil.Process().memory_info().rss
