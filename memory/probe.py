"""Measures how fast a device of this machine is, once. Only when asked."""

from __future__ import annotations

import logging
import math
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from . import simulated, speeds
from .accelerator import Accelerator
from .errors import is_out_of_memory
from .rates import ASSUMED, Rates
from .simulated import card as simulated_card
from .units import hostbuffer

log = logging.getLogger("ballast")

COPY_BYTES = 256 * 2**20
_TOKENS, _WIDTH, _INNER = 4096, 3072, 12288  # a product of a transformer's feed-forward layer
_MUCH_FASTER = 1.5
_KEYS = ("pinned", "paged", "operations", "memory")

_lock = threading.Lock()


def rates(device: torch.device) -> Rates:
    """How fast weights come to a device, and how fast it computes.

    The first call for a kind of CUDA, ROCm or XPU device takes up to 2 s and 500 MB of its memory. Where pinned memory
    turns out to be no faster, nothing is pinned from then on.
    """
    if device.type == simulated.DEVICE_TYPE:
        card = simulated_card.card
        h2d = card._rates["h2d"]
        disk = card.disk or ASSUMED.disk_bytes_per_second
        return Rates(h2d, h2d, disk, card.flops or math.inf, "simulated", math.inf, 0.0)  # it times products only
    if device.type not in ("cuda", "xpu"):
        return replace(ASSUMED, disk_bytes_per_second=speeds.disk_rate())
    key = card_of(device)
    with _lock:
        found = speeds.remembered(key, _KEYS) or _try_to_measure(device)
        if not found:
            return replace(ASSUMED, disk_bytes_per_second=speeds.disk_rate())
        speeds.note(key, found, file="pinned" in found)  # refused pinning need not be so the next time
    pinned, paged = found.get("pinned", found["paged"]), found["paged"]
    # Clearly faster, since copies from paged memory overlap with nothing.
    if "pinned" in found and paged >= _MUCH_FASTER * pinned:
        hostbuffer.leave_paged(device)
    return Rates(pinned, paged, speeds.disk_rate(), found["operations"], "measured", found["memory"])


def card_of(device: torch.device) -> str:
    """What measurements of a device are kept under: this machine and the device's name."""
    name = Accelerator(device).name
    if device.type == simulated.DEVICE_TYPE:
        name += f" of {simulated_card.card.flops:g} FLOPS" if simulated_card.card.flops else ""
    return f"{platform.node()}, {name}"


def known_rates(device: torch.device) -> Rates:
    """What `rates` tells, without measuring: assumed where that was not done yet."""
    if device.type == simulated.DEVICE_TYPE:
        return rates(device)
    found = speeds.remembered(card_of(device), ("paged", "operations", "memory"))
    disk = speeds.disk_rate()
    if device.type not in ("cuda", "xpu") or not found:
        return replace(ASSUMED, disk_bytes_per_second=disk)
    pinned = found.get("pinned", found["paged"])
    return Rates(pinned, found["paged"], disk, found["operations"], "measured", found["memory"])


# Measuring


def _try_to_measure(device: torch.device) -> dict[str, float] | None:
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
    accelerator = Accelerator(device)
    host = hostbuffer.allocate(COPY_BYTES).fill_(1)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    found = {"paged": COPY_BYTES / _seconds(copy, accelerator)}
    if not hostbuffer.wants_pinned(device):
        found["pinned"] = found["paged"]  # nothing is pinned for it
    elif hostbuffer.pin(host, device):
        found["pinned"] = COPY_BYTES / _seconds(copy, accelerator)
        hostbuffer.unpin(host)
    first, second = target.chunk(2)
    found["memory"] = COPY_BYTES / _seconds(lambda: first.copy_(second), accelerator)  # half is read, half written
    x = torch.ones(_TOKENS, _WIDTH, dtype=torch.bfloat16, device=device)
    weight = torch.ones(_INNER, _WIDTH, dtype=torch.bfloat16, device=device)
    seconds = _seconds(lambda: torch.nn.functional.linear(x, weight), accelerator)
    return found | {"operations": 2 * _TOKENS * _WIDTH * _INNER / seconds}


def _seconds(work: Callable[[], object], accelerator: Accelerator) -> float:
    """The least of three, after one that warms up."""
    best = math.inf
    for attempt in range(4):
        accelerator.synchronize()
        start = time.perf_counter()
        work()
        accelerator.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best
