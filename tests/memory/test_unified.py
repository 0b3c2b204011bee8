"""A device whose memory is the system's: weights are there or on disk, and never in RAM beside that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import manager
from ballast.memory.accelerator import Accelerator

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 3, "guidance": 1.0}


@pytest.mark.long
def test_weights_are_on_the_device_or_on_disk(tiny_folders: Callable[[str], Path], sim: ModuleType) -> None:
    """Resident or streamed from disk, as planned, with the same result; what was in RAM is dropped, save on the CPU."""
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim", vram="1GB", keep=True)
    (dit,) = pipe.denoisers
    cond = pipe.encode("a red boat")
    expected = pipe.sample(cond, **SIZE)
    assert dit.in_ram, "elsewhere that is where it comes from"
    manager("sim").free()
    sim.enable(total="4GB", unified=True)
    least = pipe.plan(**SIZE, cond=cond, vram=1, strategy="streamed").sampling
    for vram, placement in ((2**30, "resident"), (least.peak_vram_bytes, "streamed")):
        pipe.runner = pipe.runner.set(vram_bytes=vram)
        plan = pipe.plan(**SIZE, cond=cond, vram=vram).sampling
        assert (plan.placement, plan.from_disk) == (placement, True)
        assert plan.ram_bytes < dit.size_bytes / 2
        for _ in range(2):
            read = manager("sim").disk_bytes_read
            assert torch.equal(pipe.sample(cond, **SIZE), expected)
            assert not dit.in_ram and dit.host_bytes < dit.size_bytes / 2
        assert (manager("sim").disk_bytes_read == read) == (placement == "resident"), "it stays, and is not read again"
    assert torch.equal(pipe.sample(cond, **SIZE, strategy="cpu"), expected)
    assert dit.in_ram
    pipe.runner = pipe.runner.set(vram_bytes=2**30)
    pipe.encode("a blue boat")
    assert not any(unit.in_ram for unit in pipe.encoders if unit.source() is not None)


@pytest.mark.parametrize(("kind", "facts", "unified"), [("cuda", {"is_integrated": 1}, True), ("cuda", {}, False)])
def test_devices_with_the_memory_of_the_system(kind: str, facts: dict[str, int], unified: bool) -> None:
    device = Accelerator.__new__(Accelerator)
    device.device, device.is_cpu, device._module = torch.device(kind, 0), False, ModuleType(kind)
    properties = type("Properties", (), facts)()
    device._module.get_device_properties = lambda device: properties  # type: ignore[attr-defined]
    assert device.is_unified == unified
    device.device = torch.device("mps", 0)
    assert device.is_unified
