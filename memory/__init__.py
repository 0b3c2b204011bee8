"""Memory: who holds VRAM and RAM, and how weights move. It knows nothing of prompts, diffusers or node graphs.

Imports go one way, from top to bottom (`pyproject.toml`, contract "Layers of memory"). Start at `engine/ring.py`.

    memory_manager, stage, residency   the public face; one stage within a budget; which models are on the device
    registry, budget, host_cache, workload, schedule, reports/   who owns what, limits, RAM copies, what was measured
    striped/                    VAE decoding in stripes of rows
    engine/                     makes a layout true: ring, copy streams, staging buffers
    planning/                   pure functions: forecast, solver, layout, eviction order, OOM fallback
    weights/, charts/           one module's weights in files and RAM, with its LoRA adapters; pictures of plans
    codecs/                     encodings of a weight, and their decoders
    accelerator, drivers/, ram  the device as torch and its driver report it; free RAM
    host/, simulated/           ComfyUI's memory management; a pretend device for tests and dry runs
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import simulated
    from .errors import DoesNotFitError
    from .memory_manager import MemoryManager, manager, managers
    from .sizes import format_bytes, parse_bytes
    from .weights.unit import ManagedModel

__all__ = [
    "DoesNotFitError",
    "ManagedModel",
    "MemoryManager",
    "format_bytes",
    "manager",
    "managers",
    "parse_bytes",
    "simulated",
]

_HOMES = {
    "DoesNotFitError": "errors",
    "ManagedModel": "weights.unit",
    "MemoryManager": "memory_manager",
    "format_bytes": "sizes",
    "manager": "memory_manager",
    "managers": "memory_manager",
    "parse_bytes": "sizes",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: the nodes need few of these modules until one of them runs."""
    if name == "simulated":
        return import_module(".simulated", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
