"""Memory: who holds VRAM and RAM, and how weights move. It knows nothing of prompts, diffusers or node graphs.

Imports go one way, from top to bottom (`pyproject.toml`, contract "Layers of memory"). Start at `engine/ring.py`.

    manager, stage, residency   the public face; one stage within a budget; which models are on the device
    registry, budget, host_cache, workload, schedule, reports/   who owns what, limits, RAM copies, what was measured
    striped/                    VAE decoding in stripes of rows
    engine/                     makes a layout true: ring, copy streams, staging buffers
    planning/                   pure functions: forecast, solver, layout, eviction order, OOM fallback
    weights/, charts/           one module's weights in files and RAM, with its LoRA adapters; pictures of plans
    codecs/                     encodings of a weight, and their decoders
    accelerator, drivers/, ram  the device as torch and its driver report it; free RAM
    host/, simulated/           ComfyUI's memory management; a pretend device for tests and dry runs
"""

from . import simulated
from .errors import DoesNotFitError
from .manager import MemoryManager, manager
from .sizes import format_bytes, parse_bytes
from .weights.unit import ManagedModel

__all__ = ["DoesNotFitError", "ManagedModel", "MemoryManager", "format_bytes", "manager", "parse_bytes", "simulated"]
