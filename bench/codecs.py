"""`ballast bench codecs`: how fast weights are encoded and decoded, and that the device decodes them as the CPU does.

On CUDA decoding runs with torch's check for waits of the host, which ends it with an error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..memory.codecs import exact12, fp8, fused, int8, raw
from ..memory.codecs.codec import Codec
from ..memory.codecs.cost import cost_of
from ..memory.codecs.gguf import TYPES, codec_of
from ..memory.codecs.int8 import RotatedInt8
from ..memory.codecs.microscaled import Mxfp8, Nvfp4
from .harness import Run
from .measure import Meter

_COLUMNS = 3072  # as in FLUX.1
_ENCODERS: dict[str, Callable[[torch.Tensor], tuple[Codec, tuple[torch.Tensor, ...]]]] = {
    "raw": raw.encode,
    "exact12": exact12.encode,
    "exact12, two threads": lambda weight: exact12.encode(weight, threads=2),
    "int8": int8.encode,
    "fp8": fp8.encode,
}


def measure(to: Run) -> None:
    """Encode and decode a weight of so many million values as bf16 by each codec. ValueError for a number below 1."""
    megaweights, rounds = to.request["megaweights"], to.request["rounds"]
    if megaweights * 1e6 < _COLUMNS or rounds < 1:
        raise ValueError(f"--megaweights is {megaweights:g} and --rounds {rounds}; both take a number above 0.")
    meter = to.meter()
    shape = round(megaweights * 1e6 / _COLUMNS), _COLUMNS
    rows = [_row(meter, *sample, rounds) for sample in _samples(shape, rounds)]
    bandwidth = 2 * rows[0]["decoded_bytes"] / (rows[0]["seconds"] or math.inf)
    for row in rows:
        cost = row.pop("cost")
        row["counted"] = cost.seconds(bandwidth) if bandwidth else 0.0
    to.tell(size=f"{megaweights:g} million weights", copied_bytes_per_second=bandwidth)
    to.add(rows)


def _samples(
    shape: tuple[int, int], rounds: int
) -> Iterator[tuple[str, Codec, tuple[torch.Tensor, ...], float | None]]:
    """Each codec with parts, and seconds of encoding where it encodes: else the parts are any bytes."""
    weight = (torch.randn(shape) * 0.02).bfloat16()
    for name, encode in _ENCODERS.items():
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            codec, parts = encode(weight)
            seconds.append(time.perf_counter() - start)
        yield name, codec, parts, None if name == "raw" else statistics.median(seconds)
    found: dict[str, Codec] = {"int8 convrot": RotatedInt8(shape, torch.bfloat16, torch.int8, shape[0])}
    found |= {"mxfp8": Mxfp8(shape, torch.bfloat16), "nvfp4": Nvfp4(shape, torch.bfloat16)}
    found |= {kind.name: codec_of(kind, shape, torch.bfloat16) for kind in TYPES.values() if kind.decode}
    for name, codec in found.items():
        # Of no byte above 100 is there a float that is none.
        noise = [torch.randint(0, 100, (part.nbytes,), dtype=torch.uint8).view(part.dtype) for part in codec.parts]
        yield name, codec, tuple(noise), None


def _row(
    meter: Meter, name: str, codec: Codec, parts: tuple[torch.Tensor, ...], encoding: float | None, rounds: int
) -> dict[str, Any]:
    expected = torch.empty(codec.shape, dtype=codec.dtype)
    codec.decode(parts, expected)
    there, out = [part.to(meter.device) for part in parts], torch.empty_like(expected, device=meter.device)
    fused.decode(codec, there, out)  # which loads the kernels
    with _no_waits(meter.device):
        fused.decode(codec, there, out)
    is_same = torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
    seconds = meter.steady(lambda: fused.decode(codec, there, out), rounds, 1)
    cost = cost_of(codec, fused.has_kernels(meter.device))
    return {
        "name": name, "bits": codec.encoded_bytes * 8 / codec.count,
        "encoded_gbps": encoding and codec.decoded_bytes / encoding / 1e9,
        "decoded_gbps": codec.decoded_bytes / seconds / 1e9 if seconds else None, "seconds": seconds, "cost": cost,
        "launches_per_million": cost.launches / (codec.count / 1e6),
        "decoded_bytes": codec.decoded_bytes, "workspace_bytes": codec.workspace_bytes,
        "verdict": "same bits" if is_same else "OTHER BITS",
    }  # fmt: skip


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """On CUDA every wait of the host is an error."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)
