"""Decoding by one kernel, where the device has Triton: `kernels` has them.

[Note: Fused decoding]
An eager decoder is 2 to 25 kernels for each chunk of a weight. On a fast card launching them takes longer than running
them: with 12 billion weights in Q4_K, seconds a step. A fused kernel is one launch for a weight, and its intermediates
stay in registers. Before a kind of weight is first decoded on a device, both decode a sample of random bytes. A kernel
that cannot be built, or that gives other bits, is not used: the eager decoder is the reference.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .codec import Codec
from .exact12 import Exact12
from .four_bit import FourBit
from .gguf import Gguf, block_type
from .microscaled import Microscaled, Nvfp4
from .scaled import Scaled

_log = logging.getLogger("ballast")
_proved: dict[tuple[Codec, torch.device], bool] = {}
_lock = threading.Lock()
_VALUES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_LANES = 1024  # as in `kernels`


def has_kernels(device: torch.device) -> bool:
    """Return whether weights on a device may be decoded by fused kernels."""
    return device.type == "cuda" and _is_installed()


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return find_spec("triton") is not None


def decode(codec: Codec, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Decode a weight as `Codec.decode` does, with the same bits: by one kernel where that can be."""
    if not has_kernels(out.device) or not codec.count or not is_proved(codec, out.device):
        codec.decode(parts, out)
    else:
        launch(codec, *codec.flattened(parts, out))


def is_proved(codec: Codec, device: torch.device) -> bool:
    """Return whether the fused kernel of a codec gives the bits of its eager decoder on a device."""
    if (sample := _sample(codec)) is None:
        return False
    with _lock:  # passes in lockstep decode in threads of their own
        if (sample, device) not in _proved:
            _proved[sample, device] = _gives_same_bits(sample, device)
        return _proved[sample, device]


def built() -> int:
    """Return how many kinds of kernels were built and proved in this process."""
    return len(_proved)


def has_kernel(codec: Codec) -> bool:
    """Return whether there is a fused kernel for a codec."""
    return _sample(codec) is not None


def launch(codec: Codec, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Queue the fused kernel of a codec on the current stream."""
    kernels: Any = import_module(f"{__package__}.kernels")
    count, by_lanes = codec.count, (-(-codec.count // _LANES),)
    exactly = {"enable_fp_fusion": False}
    with torch.cuda.device_of(out):
        if isinstance(codec, Gguf):
            block, value = block_type(codec.kind), getattr(kernels, codec.kind.lower())
            kernels.gguf[by_lanes](parts[0], out, count, value, block.weights, block.nbytes, **exactly)
        elif isinstance(codec, Exact12):
            even, bits = codec.count // 2 * 2, out.view(torch.int16)
            kernels.exact12[(-(-even // _LANES),)](*parts[:3], bits, even)
            if codec.apart:
                kernels.put[(-(-codec.apart // _LANES),)](parts[4], parts[3], bits, codec.apart)
        elif isinstance(codec, Scaled):
            columns = count // codec.rows
            values, kind = parts[0].view(torch.uint8), _VALUES[codec.stored]
            by_rows = (codec.rows, -(-columns // _LANES))
            kernels.scaled[by_rows](values, parts[1], out, columns, kind, codec.scales > 1, **exactly)
        elif isinstance(codec, Microscaled):
            rows, columns = codec.shape
            tiles = codec.scales // (-(-codec.padded[0] // 128) * 512)
            is_fp4, bytes_ = isinstance(codec, Nvfp4), [part.view(torch.uint8) for part in parts[:2]]
            whole = parts[2] if is_fp4 else parts[1]
            sizes = columns, codec.padded[1], tiles, codec.block, is_fp4
            kernels.microscaled[(rows, -(-columns // _LANES))](*bytes_, whole, out, *sizes, **exactly)
        elif isinstance(codec, FourBit):
            given = *parts[:3], *(parts[3:] or parts[1:3])
            nested = codec.offset is not None
            kernels.four_bit[by_lanes](*given, out, count, codec.offset or 0.0, codec.block, nested, **exactly)


def _sample(codec: Codec) -> Codec | None:
    """Return a small codec that the same kernel decodes; None where there is no kernel."""
    if isinstance(codec, Gguf):
        return replace(codec, shape=(5, 256))
    if isinstance(codec, Exact12):
        return replace(codec, shape=(2052,), apart=7)
    if isinstance(codec, Scaled) and type(codec)._decode is Scaled._decode and codec.stored in _VALUES:
        return replace(codec, shape=(3, 1100), scales=3 if codec.scales > 1 else 1)
    if isinstance(codec, Microscaled):
        return replace(codec, shape=(131, 1104))
    if isinstance(codec, FourBit):
        return replace(codec, shape=(3, 4100), offset=None if codec.offset is None else 0.125)
    return None


def _gives_same_bits(sample: Codec, device: torch.device) -> bool:
    """Return whether the fused kernel of a sample can be built, and gives the bits of the eager decoder."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 256, (part.nbytes,), dtype=torch.uint8, generator=generator) for part in sample.parts]
    given = [raw.view(part.dtype) for raw, part in zip(parts, sample.parts, strict=True)]
    if isinstance(sample, Exact12):
        given[3] = torch.arange(0, sample.count, sample.count // sample.apart, dtype=torch.int32)[: sample.apart]
    try:
        with torch.inference_mode(False), torch.no_grad():
            there = [part.to(device) for part in given]
            eager, fused = (torch.empty(sample.count, dtype=sample.dtype, device=device) for _ in range(2))
            sample._decode(there, eager)
            launch(sample, there, fused)
            same = (eager == fused) & (eager.signbit() == fused.signbit()) | (eager.isnan() & fused.isnan())
            if bool(same.all()):
                return True
            why = f"gives other bits for {int((~same).sum())} of {sample.count} weights"
    except Exception as error:  # such as a missing C compiler, by which Triton builds what launches kernels
        why = f"cannot be built: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    _log.info("Weights in %s are decoded step by step on %s: the fused kernel %s.", sample.name, device, why)
    return False
