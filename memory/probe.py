"""Measure how fast a device of this machine is, once, and only when asked."""

from __future__ import annotations

import functools
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.nn import functional

from . import simulated, speeds
from .accelerator import Accelerator
from .codecs import fused
from .errors import is_out_of_memory
from .rates import ASSUMED, Rates
from .simulated import card as simulated_card
from .weights import hostbuffer

log = logging.getLogger("ballast")

COPY_BYTES = 256 * 2**20  # bytes of each copy that is timed
_TOKENS, _WIDTH, _INNER = 4096, 3072, 12288  # sizes of the product in a transformer's feed-forward layer
_MUCH_FASTER = 1.5  # factor by which paged copies must beat pinned ones to be preferred: they overlap with nothing
_HEAD = 128  # channels of an attention head; tokens and width are those of the product
_CHANNELS, _SIDE = 512, 128  # channels and pixels a side of a VAE's map
_KEYS = ("pinned", "paged", "operations", "memory", "float32", "float16", "attention", "kernel")

_LAUNCHES = 1000

_lock = threading.Lock()


def rates(device: torch.device, disk: int | None = None) -> Rates:
    """Return the rates of a device: copies to it, reads from the disk with the device number `disk`, and computing.

    The first call for a kind of CUDA, ROCm or XPU device takes up to 2 s and 500 MB of its memory. If paged memory
    turns out to be at least 1.5 times as fast as pinned memory, nothing is pinned from then on. Devices that cannot be
    measured get `ASSUMED`.
    """
    if device.type == simulated.DEVICE_TYPE:
        card = simulated_card.card
        h2d = card._rates["h2d"]
        from_disk = card.disk or ASSUMED.disk_bytes_per_second
        flops = card.flops or math.inf  # the same in any type; a card without FLOPS computes in no time
        attention = card.attention_flops or 0.0
        return Rates(h2d, h2d, from_disk, flops, "simulated", math.inf, 0.0, float32=flops, attention=attention)
    if device.type not in ("cuda", "xpu"):
        return replace(ASSUMED, disk_bytes_per_second=speeds.disk_rate(disk))
    key = card_of(device)
    with _lock:
        found = speeds.remembered(key, _KEYS) or _try_to_measure(device)
        if not found:
            return replace(ASSUMED, disk_bytes_per_second=speeds.disk_rate(disk))
        speeds.note(key, found, file="pinned" in found)  # if pinning was refused now, it may succeed the next time
    if "pinned" in found and found["paged"] >= _MUCH_FASTER * found["pinned"]:
        hostbuffer.leave_paged(device)
    return _rates(found, disk, device)


def card_of(device: torch.device) -> str:
    """Return the key of a device's measurements: this machine, the device's identity, and the version of torch."""
    name = Accelerator(device).identity
    if device.type == simulated.DEVICE_TYPE:
        card = simulated_card.card
        name += f" of {card.flops:g} FLOPS" if card.flops else ""
        name += f", {card.attention_flops:g} in attention" if card.attention_flops else ""
    return f"{platform.node()}, {name}, torch {torch.__version__}"


def known_rates(device: torch.device, disk: int | None = None) -> Rates:
    """Return the rates of a device as far as they were measured before, else `ASSUMED`. Measures nothing."""
    if device.type == simulated.DEVICE_TYPE:
        return rates(device)
    found = speeds.remembered(card_of(device), [key for key in _KEYS if key != "pinned"])
    if device.type not in ("cuda", "xpu") or not found:
        return replace(ASSUMED, disk_bytes_per_second=speeds.disk_rate(disk))
    return _rates(found, disk, device)


def _rates(found: Mapping[str, float], disk: int | None, device: torch.device) -> Rates:
    return Rates(
        found.get("pinned", found["paged"]),
        found["paged"],
        speeds.disk_rate(disk),
        found["operations"],
        "measured",
        found["memory"],
        found["kernel"],
        float32=found["float32"],
        float16=found["float16"],
        attention=found["attention"],
        fused=fused.has_kernels(device),
    )


# Measuring


def _try_to_measure(device: torch.device) -> dict[str, float] | None:
    """Return the rates by name; None if measuring failed, which is logged unless memory ran out."""
    try:
        with torch.inference_mode():
            return _measure(device)
    except Exception as error:  # a probe must not cost the run; the next call tries again
        if not is_out_of_memory(error):
            log.warning("Ballast: cannot measure how fast %s is (%s)", device, error)
        return None
    finally:
        Accelerator(device).empty_cache()


def _measure(device: torch.device) -> dict[str, float]:
    """Return the rates of a device by name: bytes or operations per second. Without "pinned" if pinning was refused."""
    accelerator = Accelerator(device)
    host, source = hostbuffer.allocate(COPY_BYTES).fill_(1), hostbuffer.window(COPY_BYTES, device).fill_(1)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def copy(of: torch.Tensor) -> None:
        target.copy_(of, non_blocking=True)

    found = {"paged": COPY_BYTES / _seconds(lambda: copy(host), accelerator)}
    if not hostbuffer.wants_pinned(device):
        found["pinned"] = found["paged"]  # nothing is pinned for it
    elif hostbuffer.pin(source, device):
        found["pinned"] = COPY_BYTES / _seconds(lambda: copy(source), accelerator)
        hostbuffer.unpin(source)
    first, second = target.chunk(2)
    found["memory"] = COPY_BYTES / _seconds(lambda: first.copy_(second), accelerator)  # half is read, half written
    few = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            few.add_(1)

    found["kernel"] = _seconds(launch, accelerator) / _LAUNCHES  # by the host, if that takes longer than the device
    # Random values: with equal ones a card computes faster, since fewer of its wires switch.
    random = torch.Generator().manual_seed(0)

    def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random).sub_(0.5).to(device, dtype)

    for name, dtype in (("operations", torch.bfloat16), ("float16", torch.float16)):
        product = functools.partial(functional.linear, values(dtype, _TOKENS, _WIDTH), values(dtype, _INNER, _WIDTH))
        found[name] = 2 * _TOKENS * _WIDTH * _INNER / _seconds(product, accelerator)
    heads = values(torch.bfloat16, 1, _WIDTH // _HEAD, _TOKENS, _HEAD)
    found["attention"] = found["operations"]
    if accelerator.fuses is None or accelerator.fuses(heads, heads, heads):  # else it is made of products
        attend = functools.partial(functional.scaled_dot_product_attention, heads, heads, heads)
        found["attention"] = 4 * _TOKENS**2 * _WIDTH / _seconds(attend, accelerator)
    maps, kernel = values(torch.float32, 1, _CHANNELS, _SIDE, _SIDE), values(torch.float32, _CHANNELS, _CHANNELS, 3, 3)
    seconds = _seconds(lambda: functional.conv2d(maps, kernel, padding=1), accelerator)
    return found | {"float32": 2 * 9 * (_CHANNELS * _SIDE) ** 2 / seconds}


def _seconds(work: Callable[[], object], accelerator: Accelerator) -> float:
    """Return the seconds of `work`: the least of three runs, after one to warm up."""
    best = math.inf
    for attempt in range(4):
        accelerator.synchronize()
        start = time.perf_counter()
        work()
        accelerator.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best
