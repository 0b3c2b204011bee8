"""The placement of a name."""

from __future__ import annotations

import torch

from ..planning.solver import Loads
from ..units.unit import ManagedModel
from .incoming import NOTHING, Incoming
from .placement import Cpu, Placement
from .resident import Resident
from .stream import CpuStreamed, Streamed


def make_placement(
    unit: ManagedModel,
    kind: str,
    device: torch.device,
    weights_bytes: int,
    loads: Loads | None = None,
    incoming: Incoming = NOTHING,
) -> Placement:
    """Return how a unit is to sit; nothing is moved yet. `weights_bytes` may be on the device, or on the CPU
    in RAM beside the windows.

    What is not in RAM comes from disk, save what is `incoming`. `loads` say what its pieces compute.
    """
    source = None if unit.in_ram else unit.source()
    if kind == "streamed":
        return Streamed(unit.module, device, weights_bytes, source, unit.calls, loads, incoming=incoming)
    if kind == "resident":
        return Resident(unit.module, device, source, unit.calls, weights_bytes, incoming=incoming)
    if source is not None:
        return CpuStreamed(unit.module, torch.device("cpu"), weights_bytes, source, unit.calls, loads)
    return Cpu(unit.module, torch.device("cpu"), source, unit.calls)
