"""Which placements there is room for, and how much of a unit each is to hold. Pure functions of what a unit wants."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..sizes import format_bytes
from ..vocabulary import PlacementName
from ..weights.branches import keys_of
from ..weights.groups import CallOrder, GroupWeights, decoding_bytes, divide, nbytes_of, plain_bytes_of, workspace_bytes
from ..weights.structure import ParameterRef, parameter_refs
from ..weights.unit import ManagedModel
from .forecast import UnitForecast
from .planner import GroupSize, UnitSizes, comparable, least_weights, meant_by, window_bytes
from .solver import Layout, Loads, place
from .turns import Turns

log = logging.getLogger("ballast")

# Found out once, while the weights are not on the device, for the calls that are known.
_sizes: weakref.WeakKeyDictionary[ManagedModel, tuple[Hashable, UnitSizes]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Demand:
    """The demand of a unit on a device: its weights, and the memory of its work beside them.

    `working_bytes` is 0 where it is not known. Of the groups that could stay, a `share` may; `loads` are the groups
    with the seconds that they compute.
    """

    name: str
    sizes: UnitSizes
    loads: Loads
    working_bytes: int = 0
    share: float = 1.0
    has_forecast: bool = False

    def least_weights(self, kind: str) -> int:
        """Return the least weights on the device in a placement.

        One that is asked to stream may have nothing to stream.
        """
        least: dict[str, int] = {"cpu": 0, "streamed": self.sizes.resident_bytes}
        return (least | dict(least_weights(self.sizes)))[kind]

    def need_bytes(self, kind: str) -> int:
        """Return the least that a placement takes on the device, weights and what is known of the work together."""
        return 0 if kind == "cpu" else self.least_weights(kind) + self.working_bytes

    def layout(self, placement: str, weights_bytes: int) -> Layout:
        """Return how the groups lie in a placement on the device, with at most `weights_bytes` of weights there."""
        name: PlacementName = "resident" if placement == "resident" else "streamed"
        return place(self.loads, weights_bytes - self.sizes.outside_bytes(name), name)

    def call_seconds(self, kind: str, weights_bytes: int) -> float:
        """Return the planned seconds of a call with `weights_bytes` of weights on the device, and all in RAM."""
        return self.loads.compute_seconds if kind == "cpu" else self.layout(kind, weights_bytes).seconds

    def weights_to_hold(self, kind: str, room_bytes: int) -> int:
        """Return the most that weights may take on the device in a placement.

        That is a share of the room that the work leaves, and the least as long as the work is not known.
        """
        least = self.least_weights(kind)
        if kind == "cpu" or not self.working_bytes:
            return least
        most = max(least, min(self.sizes.most_bytes, room_bytes - self.working_bytes))
        return least + int(self.share * (most - least))


def turns_of(sizes: UnitSizes, work: UnitForecast, strategy: str, room_bytes: int) -> Turns:
    """Return how a unit takes turns, where its work leaves so many bytes for the weights of all."""
    least = {str(name): nbytes for name, nbytes in least_weights(sizes).items()}
    if strategy != "auto":
        kind = meant_by(strategy, sizes)
        least = {name: nbytes for name, nbytes in least.items() if name == kind}
    return Turns(least, room_bytes, work.calls, work.turns)


def ram_groups(demand: Demand, kind: str, weights_bytes: int, spare_bytes: int) -> tuple[frozenset[int], int]:
    """Which groups RAM is to hold of a unit that it cannot hold all of, and what they take there, windows included.

    For a call in a placement with `weights_bytes` on the device, in the RAM that its loads tell. What stays on the
    device is held as far as there are `spare_bytes`, for which nothing has to go.
    """
    sizes = demand.sizes
    groups = sizes.ram_groups(demand.layout(kind, weights_bytes), min(demand.loads.ram_bytes or 0, spare_bytes))
    return groups, window_bytes(sizes, kind) + sizes.ram_bytes(groups)


def sizes_of(unit: ManagedModel) -> UnitSizes:
    """Return the weights of a unit as the planner looks at them."""
    known, made_by = _sizes.get(unit), (unit.calls, keys_of(unit.active_adapters), unit.size_bytes, unit.in_ram)
    if known is None or known[0] != made_by:
        known = _sizes[unit] = (made_by, sizes_in(unit.module, unit.calls, unit.size_bytes, unit.file_bytes()))
    return known[1]


def sizes_in(
    module: nn.Module,
    calls: CallOrder | None = None,
    total_bytes: int | None = None,
    in_files: Mapping[int, int] | None = None,
) -> UnitSizes:
    """Return the weights of a module that is not on the device.

    They have `total_bytes`, or those of its tensors; `in_files` are the bytes that they take in files, by `id`.
    """
    places = list(parameter_refs(module))
    divided = divide(module, places, calls or CallOrder())
    tables = [ref for table in divided.tables for ref in table.refs]

    def read_bytes(own: Sequence[ParameterRef]) -> int | None:
        if not in_files:
            return None
        return sum(in_files.get(key, 0) for key in {id(ref.tensor) for ref in own})

    def size_of(group: GroupWeights) -> GroupSize:
        paths = tuple(owner.path for owner in group.owners)
        read = read_bytes(group.refs)
        return GroupSize(group.packed_bytes, group.held_bytes, paths, group.codecs, group.plain_bytes, read)

    return UnitSizes(
        total_bytes=nbytes_of(places) if total_bytes is None else total_bytes,
        table_bytes=nbytes_of(tables),
        fixed_bytes=plain_bytes_of(divided.rest) + workspace_bytes(divided.owners),
        decoded_bytes=plain_bytes_of(divided.rest) - nbytes_of(divided.rest) + workspace_bytes(divided.owners),
        decoding=decoding_bytes(divided.owners, divided.rest),
        groups=tuple(size_of(group) for group in divided.groups if group.called),
        idle=tuple(size_of(group) for group in divided.groups if not group.called),
        tensor_bytes=max((ref.tensor.nbytes for ref in places), default=0),
        is_estimate=any(map(_is_estimate, places)),
        dtype=_dtype_of(places),
        rest_read_bytes=read_bytes(divided.rest),
        read_bytes=read_bytes(places),
    )


def streamed_layout(
    module: nn.Module, weights_bytes: int = 0, calls: CallOrder | None = None, loads: Loads | None = None
) -> Layout:
    """Return how a module that is not on the device streams with `weights_bytes` there; 0 asks for the least.

    `loads` say what its groups compute, all as long as they are copied if not given. Raises ValueError for too little.
    """
    sizes = sizes_in(module, calls)
    least = sizes.least_streamed_bytes
    if 0 < weights_bytes < least:
        raise ValueError(
            f"{format_bytes(weights_bytes)} are too little to stream {type(module).__name__}: it wants "
            f"{format_bytes(least)} for two of its largest groups and for the weights outside of them."
        )
    return place(loads or Loads.even(sizes.groups), max(weights_bytes, least) - sizes.fixed_bytes)


def _dtype_of(places: Iterable[ParameterRef]) -> str:
    """Return what most of the weights are in where they are computed with, as safetensors names it."""
    elements: Counter[torch.dtype] = Counter()
    for ref in places:
        plain = ref.tensor if ref.shown is None else ref.shown
        elements[plain.dtype] += plain.numel()
    most = max(elements, key=lambda each: elements[each], default=torch.bfloat16)
    return {torch.float32: "F32", torch.float16: "F16"}.get(most, "BF16")


def _is_estimate(ref: ParameterRef) -> bool:
    """Return whether how a weight is going to be stored follows from its shape alone."""
    encoding = ref.encoding
    if encoding is None or encoding.maker is None or not ref.tensor.is_meta:
        return False
    return encoding.codec == encoding.maker.planned(encoding.codec.shape, encoding.codec.dtype)


def reads_groups(unit: ManagedModel) -> bool:
    """Return whether a unit can run from disk: from its files, or from the file that its encoded weights will have."""
    runs_so = unit.placement is not None and not unit.in_ram  # what is on the device has no source meanwhile
    return runs_so or unit.source() is not None or unit.unmade_bytes > 0


def ram_left(unit: ManagedModel, room_bytes: int, unified: bool) -> int:
    """Return the part of `room_bytes` of RAM that the weights of a unit may take.

    That is no more than windows where the device's memory is the system's, and they can be read from disk: a copy
    would be held twice, and streamed from RAM to RAM.
    """
    if not unified or not reads_groups(unit):
        return room_bytes
    sizes = sizes_of(unit)
    windows = max(window_bytes(sizes, kind) for kind in ("streamed", "resident"))
    return min(room_bytes, windows, sizes.total_bytes - 1)


def fitting_placements(demand: Demand, room_bytes: int, free_bytes: int, stated: bool) -> list[str]:
    """Names of the placements that fit, best first.

    `room_bytes` is what the budget leaves, `free_bytes` what the device really has; `stated` says that the budget is
    the user's word. One that was not stated is no reason to refuse what is only thought not to fit.
    """
    least = least_weights(demand.sizes)
    fitting: list[str] = [kind for kind in least if demand.need_bytes(kind) <= room_bytes]
    last = list(least)[-1]
    if len(fitting) > 1 and demand.sizes.most_bytes > demand.sizes.resident_bytes:
        # What is encoded may be faster where some of it streams, and more of the rest is decoded for good.

        def seconds(kind: str) -> float:
            return comparable(demand.call_seconds(kind, demand.weights_to_hold(kind, room_bytes)))

        fitting.sort(key=seconds)
    if fitting or least[last] > room_bytes:
        return fitting
    # Without a forecast it has run so before, when its working memory was not known yet.
    may_try = not stated if demand.has_forecast else least[last] + demand.working_bytes <= free_bytes
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


def why_no_ram(unit: ManagedModel, least_bytes: int, room_bytes: int, limit_bytes: int) -> str:
    """One line: the RAM that was wanted, the budget, and what to do. From disk it runs in `least_bytes`, if any."""
    why, wanted = "its files cannot be run from as they are", unit.size_bytes
    if least_bytes:
        why, wanted = "on the CPU two of its largest parts must be there, and windows", least_bytes
    return (
        f"{unit.name} does not fit in RAM: {why}, which takes {format_bytes(wanted, up=True)}, and of a RAM budget of "
        f"{format_bytes(limit_bytes)} {format_bytes(max(0, room_bytes))} can be had. Raise the RAM budget."
    )
