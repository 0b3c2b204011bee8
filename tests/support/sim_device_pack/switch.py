"""Make this pack's simulated accelerator the device of a ComfyUI that was started with --cpu.

Both memory managers then share one small card whose bytes are counted. It replaces functions of the host, which only a
test may do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

RESERVED_BYTES = 2**20  # in the place of the host's 400 MB
INFERENCE_BYTES = 2**20  # in the place of its 0.8 GB


def simulated() -> ModuleType:
    """The pack's simulated accelerator, under whatever name the pack was imported."""
    return _of_pack("memory.simulated")


def _of_pack(module: str) -> ModuleType:
    names = [name for name in sys.modules if name.endswith(f".{module}")]
    if len(names) != 1:
        raise RuntimeError(f"expected one Ballast in this process, found {names}")
    return sys.modules[names[0]]


def switch(total: int | str, replace: Callable[[Any, str, Any], None] = setattr) -> torch.device:
    """Enable the device with so much memory, and let the host take it for its own.

    `replace` sets an attribute, as a monkeypatch that undoes it later.
    """
    import comfy.model_management as mm

    accelerator = simulated()
    accelerator.enable(total=total)
    device = torch.device(accelerator.DEVICE_TYPE, 0)

    def on_card(function: Callable[..., Any], value: Callable[[], int]) -> Callable[..., Any]:
        """The function with one answer for the card, and its own for any other device."""

        def answer(dev: Any = None, *pair: Any, **named_pair: Any) -> Any:
            if dev is not None and torch.device(dev).type != device.type:
                return function(dev, *pair, **named_pair)
            return (value(), 0) if any((*pair, *named_pair.values())) else value()

        return answer

    def asked_of_card(dev: Any = None, **_: Any) -> bool:
        return dev is None or torch.device(dev).type == device.type

    free, total_bytes = mm.get_free_memory, mm.get_total_memory
    reserve, floor = RESERVED_BYTES, RESERVED_BYTES + INFERENCE_BYTES
    replacements = {
        "cpu_state": mm.CPUState.GPU,
        "vram_state": mm.VRAMState.NORMAL_VRAM,
        "get_torch_device": lambda: device,
        "get_all_torch_devices": lambda exclude_current=False: [] if exclude_current else [device],
        "get_free_memory": on_card(free, lambda: torch.sim.mem_get_info()[0]),  # type: ignore[attr-defined]
        "get_total_memory": on_card(total_bytes, lambda: torch.sim.mem_get_info()[1]),  # type: ignore[attr-defined]
        "should_use_fp16": lambda device=None, *_, **__: asked_of_card(device),
        "should_use_bf16": lambda device=None, *_, **__: asked_of_card(device),
        "extra_reserved_memory": lambda: reserve,
        "minimum_inference_memory": lambda: floor,
        "device_supports_non_blocking": lambda device: False,
        "soft_empty_cache": lambda force=False: None,
        "synchronize": lambda: None,
    }
    for name, value in replacements.items():
        replace(mm, name, value)
    return device


def facts() -> dict[str, Any]:
    """What the card holds, and what the host has on it."""
    import comfy.model_management as mm

    stats = simulated().stats()
    managers = _of_pack("memory.memory_manager").managers()
    reports = [manager.report() for manager in managers]
    loaded = [entry.model for entry in mm.current_loaded_models if entry.model is not None]
    return {
        "device": str(mm.get_torch_device()),
        "total_bytes": stats.total_bytes,
        "allocated_bytes": stats.allocated_bytes,
        "peak_bytes": stats.peak_bytes,
        "h2d_bytes": stats.h2d_bytes,
        "in_ram": {f"{u.label} {u.name}": u.host_bytes for report in reports for u in report.units if u.host_bytes},
        "read_bytes": sum(report.disk_bytes_read for report in reports),
        "loaded": {type(patcher.model).__name__: patcher.loaded_size() for patcher in loaded},
    }
