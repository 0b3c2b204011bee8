"""The placement of a name."""

from __future__ import annotations

import torch

from ..planning.solver import Loads
from ..units.unit import ManagedModel
from .placement import Cpu, Placement, Resident
from .stream import Streamed


def make_placement(
    unit: ManagedModel, kind: str, device: torch.device, weights_bytes: int, loads: Loads | None = None
) -> Placement:
    """How a unit is to sit; nothing is moved yet. `weights_bytes` may be on the device.

    What is not in RAM comes from disk. `loads` say what its pieces compute.
    """
    source = None if unit.in_ram else unit.source()
    if kind == "streamed":
        return Streamed(unit.module, device, weights_bytes, source, unit.calls, loads, reading=unit.reading)
    if kind == "resident":
        return Resident(unit.module, device, source, unit.calls, weights_bytes, reading=unit.reading)
    return Cpu(unit.module, torch.device("cpu"), source, unit.calls)
