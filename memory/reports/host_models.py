"""The host's own models, in the form in which reports and the timeline list ours."""

from __future__ import annotations

import torch

from ..host import management as host
from .report import UnitReport
from .timeline import OnDevice


def host_models_on(device: torch.device) -> tuple[OnDevice, ...]:
    """Return the host's models with bytes on `device` now, sorted by role and name."""
    found = [model for model in host.known_models(device) if model.bytes]
    found.sort(key=lambda model: (model.role, model.name))
    return tuple(OnDevice(_name(model), model.role, model.bytes, host.page_bytes(model.patcher)) for model in found)


def host_model_reports(device: torch.device) -> tuple[UnitReport, ...]:
    """Return the state of each of the host's models whose device is `device`, on it or in RAM."""
    return tuple(_reported(model) for model in host.known_models(device))


def _reported(model: host.HostModel) -> UnitReport:
    size, ram = int(model.patcher.model_size()), host.model_ram_bytes(model.patcher)
    placement = "resident" if model.bytes >= size else "streamed" if model.bytes else None
    return UnitReport(
        name=_name(model),
        label="",
        role=model.role,
        tier="device" if model.bytes else "host",
        placement=placement,
        size_bytes=size,
        resident_bytes=model.bytes,
        host_bytes=ram,
        leased=False,
        pinned=False,
        pinned_bytes=host.model_pinned_bytes(model.patcher),
    )


def _name(model: host.HostModel) -> str:
    return f"{model.name} (ComfyUI)"
