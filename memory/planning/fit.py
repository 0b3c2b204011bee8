"""Which placements a unit has room for, and how much of it each is to take."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..sizes import format_bytes
from ..streaming.placement import Cpu, Leafwise, Placement, Resident, leafwise_slots
from ..streaming.ring import split_blocks
from ..streaming.stream import Streamed
from ..units.unit import ManagedModel, Slot, slots
from .planner import UnitSizes, least_weights
from .residency import BlockSize

log = logging.getLogger("ballast")


def sizes_of(unit: ManagedModel) -> UnitSizes:
    """The weights of a unit as the planner looks at them. Found out once, before they are on the device."""
    if unit.sizes is None:
        blocks, rest = split_blocks(unit.module, list(slots(unit.module)))
        stays, comes = leafwise_slots(unit.module)
        unit.sizes = UnitSizes(
            total_bytes=unit.size_bytes,
            fixed_bytes=_nbytes(rest),
            # A VAE is small, and its feature maps are not.
            blocks=tuple(BlockSize(b.packed_bytes, b.held_bytes) for b in blocks if unit.role != "vae"),
            stay_bytes=_nbytes(stays),
            leaf_bytes=max((_nbytes(own) for _, own in comes), default=0),
            tensor_bytes=max((slot.tensor.nbytes for slot in slots(unit.module)), default=0),
        )
    return unit.sizes


def need_bytes(unit: ManagedModel, kind: str) -> int:
    """The least that a placement takes on the device, weights and what is known of the work together."""
    if kind == "cpu":
        return 0
    sizes = sizes_of(unit)
    if kind == "leafwise" and unit.forecast is not None:
        return sizes.stay_bytes + unit.forecast.leafwise_bytes
    return _least(sizes, kind) + unit.working_bytes


def _least(sizes: UnitSizes, kind: str) -> int:
    # One that is asked to stream may have nothing to stream: then all of it.
    return {"cpu": 0, "streamed": sizes.total_bytes, **least_weights(sizes)}[kind]  # type: ignore[index]


def weights_to_hold(unit: ManagedModel, kind: str, room_bytes: int) -> int:
    """The weights that a placement is to hold on the device.

    Streaming takes its share of the room that the work leaves, and the least as long as the work is not known.
    """
    sizes = sizes_of(unit)
    least = _least(sizes, kind)
    if kind != "streamed" or not unit.working_bytes:
        return least
    most = max(least, min(sizes.total_bytes, room_bytes - unit.working_bytes))
    return least + int(unit.terms.share * (most - least))


def make_placement(unit: ManagedModel, kind: str, device: torch.device, weights_bytes: int) -> Placement:
    """The placement of that name; nothing is moved yet. What is not in RAM comes from disk."""
    source = None if unit.in_ram else unit.source()
    if kind == "streamed":
        return Streamed(unit.module, device, weights_bytes, source)
    kinds: dict[str, type[Placement]] = {"resident": Resident, "leafwise": Leafwise, "cpu": Cpu}
    return kinds[kind](unit.module, device, source)


def fitting_placements(unit: ManagedModel, room_bytes: int, free_bytes: int, stated: bool) -> list[str]:
    """Names of the placements that fit, best first.

    `room_bytes` is what the budget leaves, `free_bytes` what the device really has; `stated` says that the budget is
    the user's word. One that was not stated is no reason to refuse what is only thought not to fit.
    """
    least = least_weights(sizes_of(unit))
    fitting: list[str] = [kind for kind in least if need_bytes(unit, kind) <= room_bytes]
    last = list(least)[-1]
    if fitting or least[last] > room_bytes:
        return fitting
    # Without a forecast it has run so before, when what it works in was not known yet.
    may_try = not stated if unit.forecast is not None else least[last] + unit.working_bytes <= free_bytes
    if not may_try:
        return []
    log.warning(
        "Ballast: %s and what it works in take %s, more than there is (%s); trying",
        unit.name,
        format_bytes(need_bytes(unit, last)),
        format_bytes(room_bytes),
    )
    return [last]


def why_nothing_fits(
    unit: ManagedModel, pinned: Sequence[ManagedModel], device: str, budget_bytes: int, room_bytes: int
) -> str:
    """One line: what was wanted, the budget, what could be freed, and what to do."""
    could = ", ".join(f"{u.name} ({format_bytes(u.resident_bytes)}, pinned)" for u in pinned) or "nothing more"
    least = least_weights(sizes_of(unit))
    wants = " or ".join(f"{format_bytes(size)} {kind}" for kind, size in least.items())
    return (
        f"{unit.name} does not fit on {device}: it wants {wants}, and "
        f"{format_bytes(unit.working_bytes)} to work in, of a budget of "
        f"{format_bytes(budget_bytes)}, of which {format_bytes(max(0, room_bytes))} can be had. "
        f"Could be freed: {could}. Raise the vram budget, choose a smaller size, or use strategy cpu."
    )


def why_no_ram(unit: ManagedModel, kind: str, room_bytes: int, limit_bytes: int) -> str:
    """One line: the RAM that was wanted, the budget, and what to do."""
    why = "on the CPU all of it must be there" if kind == "cpu" else "its files cannot be run from as they are"
    return (
        f"{unit.name} does not fit in RAM: {why}, which takes {format_bytes(unit.size_bytes)}, and of a RAM budget of "
        f"{format_bytes(limit_bytes)} {format_bytes(max(0, room_bytes))} can be had. Raise the RAM budget."
    )


def _nbytes(own: Sequence[Slot]) -> int:
    return sum({id(slot.tensor): slot.tensor.nbytes for slot in own}.values())
