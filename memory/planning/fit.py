"""Decide which placements of a unit fit, and how many bytes of weights each holds, for the run.

`sizes_of` reads the sizes off a unit or module and caches them. The other functions are pure.
"""

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

# The sizes of each unit, with what they depend on: known calls, adapters, size, and presence in RAM.
_sizes: weakref.WeakKeyDictionary[ManagedModel, tuple[Hashable, UnitSizes]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Demand:
    """The demand of a unit on a device: its weights, and the working memory beside them.

    `working_bytes` is 0 if it is not known. Of the groups that could stay on the device, a `share` from 0 to 1 may.
    `loads` are the groups with the seconds that they compute. `has_forecast` tells that a dry run made the figures.
    """

    name: str
    sizes: UnitSizes
    loads: Loads
    working_bytes: int = 0
    share: float = 1.0
    has_forecast: bool = False

    def least_weights(self, kind: str) -> int:
        """Return the least bytes of weights on the device in the placement `kind`.

        For "streamed" that is all weights if the unit has nothing to stream.
        """
        least: dict[str, int] = {"cpu": 0, "streamed": self.sizes.resident_bytes}
        return (least | dict(least_weights(self.sizes)))[kind]

    def need_bytes(self, kind: str) -> int:
        """Return the least bytes that a placement takes on the device: weights, and known working memory."""
        return 0 if kind == "cpu" else self.least_weights(kind) + self.working_bytes

    def layout(self, placement: str, weights_bytes: int) -> Layout:
        """Return the layout for a placement with at most `weights_bytes` of weights on the device."""
        name: PlacementName = "resident" if placement == "resident" else "streamed"
        return place(self.loads, weights_bytes - self.sizes.outside_bytes(name), name)

    def call_seconds(self, kind: str, weights_bytes: int) -> float:
        """Return the planned seconds of a call with `weights_bytes` of weights on the device.

        All weights are taken to be in RAM. On the CPU the result is the seconds of computing alone.
        """
        return self.loads.compute_seconds if kind == "cpu" else self.layout(kind, weights_bytes).seconds

    def weights_to_hold(self, kind: str, room_bytes: int) -> int:
        """Return the most bytes that weights may take on the device in a placement.

        That is the `share` of the room that the working memory leaves, between the least and all weights. As long as
        the working memory is not known it is the least.
        """
        least = self.least_weights(kind)
        if kind == "cpu" or not self.working_bytes:
            return least
        most = max(least, min(self.sizes.most_bytes, room_bytes - self.working_bytes))
        return least + int(self.share * (most - least))


def turns_of(sizes: UnitSizes, work: UnitForecast, strategy: str, room_bytes: int) -> Turns:
    """Return the facts of a unit that takes turns. `room_bytes` is what its working memory leaves for all weights."""
    least = {str(name): nbytes for name, nbytes in least_weights(sizes).items()}
    if strategy != "auto":
        kind = meant_by(strategy, sizes)
        least = {name: nbytes for name, nbytes in least.items() if name == kind}
    return Turns(least, room_bytes, work.calls, work.turns)


def ram_groups(demand: Demand, kind: str, weights_bytes: int, spare_bytes: int) -> tuple[frozenset[int], int]:
    """Return the groups that RAM is to hold, and the bytes that they take there, windows included.

    For a unit that RAM cannot hold whole, in the placement `kind` with `weights_bytes` on the device. `demand.loads`
    tells the RAM. Copies of resident groups are held as far as `spare_bytes` allow, for which no other unit has to drop
    any.
    """
    sizes = demand.sizes
    groups = sizes.ram_groups(demand.layout(kind, weights_bytes), min(demand.loads.ram_bytes or 0, spare_bytes))
    return groups, window_bytes(sizes, kind) + sizes.ram_bytes(groups)


def sizes_of(unit: ManagedModel) -> UnitSizes:
    """Return the sizes of a unit's weights for the planner."""
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
    """Return the sizes of the weights of a module that is not on the device.

    `total_bytes` defaults to the sum over its tensors. `in_files` maps the `id` of a tensor to its bytes in files.
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
        dtype=_dtype_of(places),
        rest_read_bytes=read_bytes(divided.rest),
        read_bytes=read_bytes(places),
    )


def streamed_layout(
    module: nn.Module, weights_bytes: int = 0, calls: CallOrder | None = None, loads: Loads | None = None
) -> Layout:
    """Return the layout in which a module that is not on the device streams, with `weights_bytes` of weights there.

    0 asks for the least. Without `loads` each group is taken to compute for as long as it is copied. Raises ValueError
    if `weights_bytes` are too little.
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
    """Return the type in which most of the weights are computed with, named as in safetensors."""
    elements: Counter[torch.dtype] = Counter()
    for ref in places:
        plain = ref.tensor if ref.shown is None else ref.shown
        elements[plain.dtype] += plain.numel()
    most = max(elements, key=lambda each: elements[each], default=torch.bfloat16)
    return {torch.float32: "F32", torch.float16: "F16"}.get(most, "BF16")


def reads_groups(unit: ManagedModel) -> bool:
    """Return whether a unit can stream from its files, or from the one that it will be converted to."""
    runs_so = unit.placement is not None and not unit.in_ram  # `source()` is None while its weights are in place
    return runs_so or unit.source() is not None


def ram_left(unit: ManagedModel, room_bytes: int, unified: bool) -> int:
    """Return the part of `room_bytes` of RAM that the weights of a unit may take.

    On a device with unified memory that is no more than the windows, if the weights can be read from disk. A copy in
    RAM would hold them twice, and stream from RAM to RAM.
    """
    if not unified or not reads_groups(unit):
        return room_bytes
    sizes = sizes_of(unit)
    windows = max(window_bytes(sizes, kind) for kind in ("streamed", "resident"))
    return min(room_bytes, windows, sizes.total_bytes - 1)


def fitting_placements(demand: Demand, room_bytes: int, free_bytes: int, stated: bool) -> list[str]:
    """Return the names of the placements that fit, best first.

    `room_bytes` is what the budget leaves, `free_bytes` what the device really has. `stated` tells that the user named
    the budget. If nobody did, an estimate alone is no reason to refuse: the last placement is then tried, with a
    warning.
    """
    least = least_weights(demand.sizes)
    fitting: list[str] = [kind for kind in least if demand.need_bytes(kind) <= room_bytes]
    last = list(least)[-1]
    if len(fitting) > 1 and demand.sizes.most_bytes > demand.sizes.resident_bytes:
        # An encoded unit may be faster if some groups stream, so that more of the others can be kept dequantized.

        def seconds(kind: str) -> float:
            return comparable(demand.call_seconds(kind, demand.weights_to_hold(kind, room_bytes)))

        fitting.sort(key=seconds)
    if fitting or least[last] > room_bytes:
        return fitting
    # Without a forecast, known working memory was measured: the unit has run like this before.
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
    """Return one line for the user: the bytes wanted, the budget, what could be freed, and what to do."""
    could = ", ".join(f"{u.name} ({format_bytes(u.resident_bytes)}, pinned)" for u in pinned) or "nothing more"
    wants = " or ".join(f"{format_bytes(size)} {kind}" for kind, size in least_weights(demand.sizes).items())
    return (
        f"{demand.name} does not fit on {device}: it wants {wants}, and "
        f"{format_bytes(demand.working_bytes)} of activations, of a budget of "
        f"{format_bytes(budget_bytes)}, of which {format_bytes(max(0, room_bytes))} can be had. "
        f"Could be freed: {could}. Raise the vram budget, choose a smaller size, or use strategy cpu."
    )


def why_no_ram(unit: ManagedModel, least_bytes: int, room_bytes: int, limit_bytes: int) -> str:
    """Return one line for the user: the RAM wanted, the RAM budget, and what to do.

    `least_bytes` is the RAM in which the unit could run from disk, 0 if it cannot.
    """
    why, wanted = "its files cannot be run from as they are", unit.size_bytes
    if least_bytes:
        why, wanted = "on the CPU two of its largest parts must be there, and windows", least_bytes
    return (
        f"{unit.name} does not fit in RAM: {why}, which takes {format_bytes(wanted, up=True)}, and of a RAM budget of "
        f"{format_bytes(limit_bytes)} {format_bytes(max(0, room_bytes))} can be had. Raise the RAM budget."
    )
