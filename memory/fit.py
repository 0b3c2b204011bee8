"""Which placements a unit has room for. Pure functions: bytes in, names and words out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .sizes import format_bytes
from .unit import ManagedModel

log = logging.getLogger("ballast")


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
