"""Measures how fast this machine is, once, and remembers it in the user's cache directory. Only when asked."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import simulated
from .accelerator import Accelerator
from .errors import is_out_of_memory
from .files import cache_home, replace_file
from .planning.rates import ASSUMED, Rates
from .simulated import card as simulated_card
from .units import hostbuffer

log = logging.getLogger("ballast")

COPY_BYTES = 256 * 2**20
OBSERVED_BYTES = 256 * 2**20  # less than this from a disk says little
_TOKENS, _WIDTH, _INNER = 4096, 3072, 12288  # a product of a transformer's feed-forward layer
_MUCH_FASTER = 1.5
_KEYS = ("pinned", "paged", "operations")

_lock = threading.Lock()
_known: dict[str, dict[str, float]] = {}  # in this process, in case the file cannot be written


def rates(device: torch.device) -> Rates:
    """How fast weights come to a device, and how fast it computes.

    The first call for a kind of CUDA, ROCm or XPU device takes up to 2 s and 500 MB of its memory. Where pinned memory
    turns out to be no faster, nothing is pinned from then on.
    """
    if device.type == simulated.DEVICE_TYPE:
        card = simulated_card.card
        h2d = card._rates["h2d"]
        return Rates(h2d, h2d, ASSUMED.disk_bytes_per_second, card.flops or math.inf, "simulated")
    if device.type not in ("cuda", "xpu"):
        return replace(ASSUMED, disk_bytes_per_second=_disk_rate())
    key = f"{platform.node()}, {Accelerator(device).name}"
    with _lock:
        found = _known.get(key) or _remembered(key) or _try_to_measure(device)
        if not found:
            return replace(ASSUMED, disk_bytes_per_second=_disk_rate())
        if key not in _known:
            _remember(key, found)
    pinned, paged = found.get("pinned", found["paged"]), found["paged"]
    # Clearly faster, since copies from paged memory overlap with nothing.
    if "pinned" in found and paged >= _MUCH_FASTER * pinned:
        hostbuffer.leave_paged(device)
    return Rates(pinned, paged, _disk_rate(), found["operations"], "measured")


def observe_disk(nbytes: int, seconds: float) -> None:
    """Note that reading so many bytes of weights took so long. Reads of less than 256 MB are not counted."""
    if nbytes < OBSERVED_BYTES or seconds <= 0:
        return
    with _lock:
        _remember(_disk_key(), {"disk": (_disk_rate(nbytes / seconds) + nbytes / seconds) / 2})


def _disk_rate(otherwise: float = ASSUMED.disk_bytes_per_second) -> float:
    found = _known.get(_disk_key()) or _remembered(_disk_key(), ("disk",))
    return found["disk"] if found else otherwise


def _disk_key() -> str:
    return f"{platform.node()}, disk"


# Remembering; what cannot be read or written is measured again in the next process


def _file() -> Path:
    return cache_home() / "rates.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remembered(key: str, keys: tuple[str, ...] = _KEYS) -> dict[str, float] | None:
    entry = _read().get(key)
    return entry if _is_whole(entry, keys) else None


def _is_whole(entry: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(entry, dict) and all(
        type(entry.get(key)) in (int, float) and 0 < entry[key] < 1e30 for key in keys
    )


def _remember(key: str, entry: dict[str, float]) -> None:
    _known[key] = entry
    if "paged" in entry and "pinned" not in entry:
        return  # pinning was refused, which need not be so the next time
    with contextlib.suppress(OSError):
        replace_file(_file(), json.dumps(_read() | {key: entry}, indent=1).encode())


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
