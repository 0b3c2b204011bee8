"""Which placements there is room for, and how much of a unit each is to hold. Pure functions of what a unit wants."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..sizes import format_bytes
from ..units.structure import Slot, leafwise_slots, slots, split_blocks
from ..units.unit import ManagedModel
from .planner import UnitSizes, least_weights
from .residency import BlockSize

log = logging.getLogger("ballast")

# Found out once, while the weights are not on the device.
_sizes: weakref.WeakKeyDictionary[ManagedModel, UnitSizes] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Demand:
    """What a unit wants of a device: its weights, and what its work takes beside them.

    `working_bytes` is 0 where it is not known. `leafwise_bytes` is the same under `leafwise`, with the weights that
    come for a call, None without a forecast. Of the blocks that could stay, a `share` may.
    """

    name: str
    sizes: UnitSizes
    working_bytes: int = 0
    leafwise_bytes: int | None = None
    share: float = 1.0

    def least_weights(self, kind: str) -> int:
        """The least weights on the device in a placement. One that is asked to stream may have nothing to stream."""
        least: dict[str, int] = {"cpu": 0, "streamed": self.sizes.total_bytes}
        return (least | dict(least_weights(self.sizes)))[kind]

    def need_bytes(self, kind: str) -> int:
        """The least that a placement takes on the device, weights and what is known of the work together."""
        if kind == "cpu":
            return 0
        if kind == "leafwise" and self.leafwise_bytes is not None:
            return self.sizes.stay_bytes + self.leafwise_bytes
        return self.least_weights(kind) + self.working_bytes

    def weights_to_hold(self, kind: str, room_bytes: int) -> int:
        """The weights that a placement is to hold on the device.

        Streaming takes its share of the room that the work leaves, and the least as long as the work is not known.
        """
        least = self.least_weights(kind)
        if kind != "streamed" or not self.working_bytes:
            return least
        most = max(least, min(self.sizes.total_bytes, room_bytes - self.working_bytes))
        return least + int(self.share * (most - least))


def sizes_of(unit: ManagedModel) -> UnitSizes:
    """The weights of a unit as the planner looks at them."""
    if unit not in _sizes:
        blocks, rest = split_blocks(unit.module, list(slots(unit.module)))
        stays, comes = leafwise_slots(unit.module)
        _sizes[unit] = UnitSizes(
            total_bytes=unit.size_bytes,
            fixed_bytes=_nbytes(rest),
            # A VAE is small, and its feature maps are not.
            blocks=tuple(BlockSize(b.packed_bytes, b.held_bytes) for b in blocks if unit.role != "vae"),
            stay_bytes=_nbytes(stays),
            leaf_bytes=max((_nbytes(own) for _, own in comes), default=0),
            tensor_bytes=max((slot.tensor.nbytes for slot in slots(unit.module)), default=0),
        )
    return _sizes[unit]


def _nbytes(own: Sequence[Slot]) -> int:
    return sum({id(slot.tensor): slot.tensor.nbytes for slot in own}.values())


def fitting_placements(demand: Demand, room_bytes: int, free_bytes: int, stated: bool) -> list[str]:
    """Names of the placements that fit, best first.

    `room_bytes` is what the budget leaves, `free_bytes` what the device really has; `stated` says that the budget is
    the user's word. One that was not stated is no reason to refuse what is only thought not to fit.
    """
    least = least_weights(demand.sizes)
    fitting: list[str] = [kind for kind in least if demand.need_bytes(kind) <= room_bytes]
    last = list(least)[-1]
    if fitting or least[last] > room_bytes:
        return fitting
    # Without a forecast it has run so before, when its working memory was not known yet.
    has_forecast = demand.leafwise_bytes is not None
    may_try = not stated if has_forecast else least[last] + demand.working_bytes <= free_bytes
    if not may_try:
        return []
    log.warning(
        "Ballast: %s and its activations take %s, more than there is (%s); trying",
        demand.name,
        format_bytes(demand.need_bytes(last)),
        format_bytes(room_bytes),
    )
    return [last]


def why_nothing_fits(
    demand: Demand, pinned: Sequence[ManagedModel], device: str, budget_bytes: int, room_bytes: int
) -> str:
    """One line: what was wanted, the budget, what could be freed, and what to do."""
    could = ", ".join(f"{u.name} ({format_bytes(u.resident_bytes)}, pinned)" for u in pinned) or "nothing more"
    wants = " or ".join(f"{format_bytes(size)} {kind}" for kind, size in least_weights(demand.sizes).items())
    return (
        f"{demand.name} does not fit on {device}: it wants {wants}, and "
        f"{format_bytes(demand.working_bytes)} of activations, of a budget of "
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
