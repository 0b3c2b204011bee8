"""Which placements a unit has room for, and how much of it each is to take."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from .placement import Cpu, Leafwise, Placement, Resident
from .sizes import format_bytes
from .stream import Streamed
from .unit import ManagedModel

log = logging.getLogger("ballast")


def least_weights(unit: ManagedModel) -> dict[str, int]:
    """The least weights on the device for each placement of a unit, best placement first."""
    if unit.least_streamed_bytes is None:
        unit.least_streamed_bytes = Streamed.least_bytes(unit.module)
    least = {"resident": unit.size_bytes, "streamed": unit.least_streamed_bytes, "leafwise": unit.leaf_bytes}
    if unit.role == "vae" or least["streamed"] >= least["resident"]:
        del least["streamed"]
    return least


def weights_to_hold(unit: ManagedModel, kind: str, room_bytes: int) -> int:
    """The weights that a placement is to hold on the device.

    Streaming takes all the room that the work leaves, and the least as long as the work is not known.
    """
    least = least_weights(unit).get(kind, 0)
    if kind != "streamed" or not unit.working_bytes:
        return least
    return max(least, min(unit.size_bytes, room_bytes - unit.working_bytes))


def make_placement(unit: ManagedModel, kind: str, device: torch.device, weights_bytes: int) -> Placement:
    """The placement of that name; nothing is moved yet."""
    if kind == "streamed":
        return Streamed(unit.module, device, weights_bytes)
    kinds: dict[str, type[Placement]] = {"resident": Resident, "leafwise": Leafwise, "cpu": Cpu}
    return kinds[kind](unit.module, device)


def fitting_placements(needs: Mapping[str, int], working_bytes: int, room_bytes: int, free_bytes: int) -> list[str]:
    """Names of the placements that fit, best first.

    `needs` maps each placement, best first, to the weights that it holds on the device; `working_bytes` is what the run
    takes beside them, 0 if unknown. `room_bytes` is what the budget leaves, `free_bytes` what the device really has.
    """
    fitting = [kind for kind, need in needs.items() if need + working_bytes <= room_bytes]
    last = list(needs)[-1]
    if not fitting and needs[last] <= room_bytes and working_bytes <= free_bytes:
        # It has run so before, when what it works in was not known yet.
        log.warning(
            "Ballast: %s of working memory are more than the budget leaves (%s), but the device has them",
            format_bytes(working_bytes),
            format_bytes(room_bytes - needs[last]),
        )
        return [last]
    return fitting


def why_nothing_fits(
    unit: ManagedModel, pinned: Sequence[ManagedModel], device: str, budget_bytes: int, room_bytes: int
) -> str:
    """One line: what was wanted, the budget, what could be freed, and what to do."""
    could = ", ".join(f"{u.name} ({format_bytes(u.resident_bytes)}, pinned)" for u in pinned) or "nothing more"
    return (
        f"{unit.role} {unit.name} does not fit on {device}: it wants {format_bytes(unit.size_bytes)} resident or "
        f"{format_bytes(unit.leaf_bytes)} leafwise, and {format_bytes(unit.working_bytes)} to work in, of a budget of "
        f"{format_bytes(budget_bytes)}, of which {format_bytes(max(0, room_bytes))} can be had. "
        f"Could be freed: {could}. Raise the vram budget, or use strategy='cpu'."
    )
