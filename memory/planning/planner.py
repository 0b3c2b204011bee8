"""Sizes, work, rates and a budget in; the placement of a unit, its bytes and seconds, and the reason out.

Pure functions: no device, no weights. Seconds follow the recurrence of the streaming engine: with k = 2 slots, a copy
waits for the slot's last use and for the copy before it, a block for its copy and for the block before it. A step takes
at least max(compute, streamed bytes / bandwidth).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..rates import Rates
from ..sizes import format_bytes
from ..units.reader import BATCH_BYTES
from ..vocabulary import PlacementName
from .forecast import UnitForecast
from .residency import RING_SLOTS, WINDOWS, BlockSize, blocks_to_stream, least_streamed_bytes, ring_bytes

_STEPS_TO_STEADY = 4


@dataclass(frozen=True)
class UnitSizes:
    """The weights of a unit, in bytes.

    `fixed_bytes` lie outside its blocks. Under `leafwise`, `stay_bytes` stay on the device and `leaf_bytes` come at a
    time at most. Units that are not to be streamed have no blocks. The largest tensor has `tensor_bytes`.
    """

    total_bytes: int
    fixed_bytes: int
    blocks: tuple[BlockSize, ...]
    stay_bytes: int
    leaf_bytes: int
    tensor_bytes: int = 0

    @property
    def least_streamed_bytes(self) -> int:
        """The least on the device that the unit can be streamed in; all of it if it has no blocks."""
        return least_streamed_bytes(self.fixed_bytes, self.blocks)


@dataclass(frozen=True)
class Candidate:
    """One way to run a unit. `streamed` are the indices of the blocks that pass through the ring.

    `peak_vram_bytes` is the most on the device, weights and work together; `ram_bytes` what the weights hold in RAM.
    The first step brings the weights, the others do not; no step can be faster than `bound_seconds`, and its copies
    alone take `transfer_seconds`. `why_not` is
    empty for the one that was chosen.
    """

    placement: PlacementName
    weights_bytes: int
    peak_vram_bytes: int
    ram_bytes: int
    streamed: tuple[int, ...]
    blocks: int
    step_seconds: float
    first_step_seconds: float
    bound_seconds: float
    transfer_seconds: float
    from_disk: bool = False
    why_not: str = ""

    @property
    def label(self) -> str:
        """The placement, and how many blocks stay."""
        if self.placement != "streamed":
            return self.placement
        where = " from disk" if self.from_disk else ""
        return f"streamed{where}, {self.blocks - len(self.streamed)} of {self.blocks} blocks stay"


@dataclass(frozen=True)
class Plan(Candidate):
    """The chosen candidate, the reason in one sentence, and the others with theirs."""

    unit: str = ""
    budget_bytes: int = 0
    reason: str = ""
    rejected: tuple[Candidate, ...] = ()
    fits: bool = True

    @property
    def resident_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks that stay on the device."""
        return tuple(i for i in range(self.blocks) if i not in set(self.streamed))


def least_weights(sizes: UnitSizes) -> dict[PlacementName, int]:
    """The least weights on the device at a time for each placement, best placement first."""
    leafwise = min(sizes.total_bytes, sizes.stay_bytes + sizes.leaf_bytes)
    least: dict[PlacementName, int] = {"resident": sizes.total_bytes}
    if sizes.blocks and sizes.least_streamed_bytes < sizes.total_bytes:
        least["streamed"] = sizes.least_streamed_bytes
    return least | {"leafwise": leafwise}


def meant_by(strategy: str, sizes: UnitSizes) -> str:
    """The placement that a strategy other than auto means for a unit: what cannot be streamed is resident instead."""
    return "resident" if strategy == "streamed" and "streamed" not in least_weights(sizes) else strategy


def window_bytes(sizes: UnitSizes, placement: str) -> int:
    """The RAM that a placement takes where the weights come straight from disk."""
    if placement == "streamed" and sizes.blocks:
        return ring_bytes(sizes.blocks, WINDOWS)
    return WINDOWS * min(BATCH_BYTES, sizes.tensor_bytes)


def make_plan(
    unit: str,
    sizes: UnitSizes,
    work: UnitForecast,
    rates: Rates,
    budget_bytes: int,
    ram_bytes: int,
    *,
    steps: int = 1,
    strategy: str = "auto",
    by_user: bool = True,
    idle_bytes: int = 0,
    in_ram: bool = False,
    from_disk: bool = False,
) -> Plan:
    """The best placement that fits the budget, or the one that `strategy` names, `by_user` or not.

    `budget_bytes` is what the device may hold in all, `ram_bytes` what weights may hold in RAM. `steps` are those that
    the calls of `work` belong to, `idle_bytes` what the stage holds before the first. What has too few blocks to be
    streamed, where that is asked for, is resident. `in_ram` says that the weights
    need not be read first, `from_disk` that they can be streamed from there. When nothing fits, the plan is the one
    that wants least, with `fits` false.
    """
    bound_to = ["resident", "streamed", "leafwise"] if strategy in ("auto", "cpu") else [meant_by(strategy, sizes)]
    streams_from_disk = from_disk and sizes.total_bytes > ram_bytes
    made = []
    for placement in least_weights(sizes):
        for room in _rooms(placement, sizes, work, budget_bytes, strategy):
            weights, streamed = _weights(placement, sizes, room)
            made.append(
                _candidate(
                    placement, sizes, work, rates, weights, streamed, steps, idle_bytes, in_ram, streams_from_disk
                )
            )
    made = [c for i, c in enumerate(made) if c not in made[:i]]
    allowed = [c for c in made if c.placement in bound_to]
    # Where nothing can run from disk, weights that exceed the RAM budget are a matter of the run.
    ram_bytes_allowed = ram_bytes if streams_from_disk else sizes.total_bytes
    on_device = [c for c in allowed if c.peak_vram_bytes <= budget_bytes]
    fitting = [c for c in on_device if c.ram_bytes <= ram_bytes_allowed]
    chosen = fitting[0] if fitting else min(allowed, key=lambda c: (c.peak_vram_bytes, c.ram_bytes))
    rejected = tuple(
        replace(c, why_not=_why_not(c, chosen, budget_bytes, ram_bytes_allowed, bound_to))
        for c in made
        if c is not chosen
    )
    asked = strategy if by_user and len(bound_to) == 1 else ""
    reason = _reason(chosen, sizes, budget_bytes, bool(fitting), ram_bytes, rates, asked)
    return Plan(
        **vars(chosen), unit=unit, budget_bytes=budget_bytes, reason=reason, rejected=rejected, fits=bool(fitting)
    )


def step_seconds(compute: Sequence[float], transfer: Sequence[float], streamed: Sequence[int], before: float) -> float:
    """Seconds of a steady pass over the blocks: each computes, the streamed ones are copied, two slots take turns.

    `before` is the compute outside the blocks, ahead of them.
    """
    chosen = set(streamed)
    if len(chosen) <= RING_SLOTS:  # each has a slot of its own and is copied once
        return before + sum(compute)
    free, turns = [0.0] * RING_SLOTS, itertools.cycle(range(RING_SLOTS))
    copied = done = last = 0.0
    for _ in range(_STEPS_TO_STEADY):
        last, done = done, done + before
        for i, seconds in enumerate(compute):
            if i in chosen:
                slot = next(turns)
                copied = max(copied, free[slot]) + transfer[i]
                done = max(done, copied)
                free[slot] = done + seconds
            done += seconds
    return done - last


def _rooms(
    placement: PlacementName, sizes: UnitSizes, work: UnitForecast, budget_bytes: int, strategy: str
) -> list[int]:
    """The bytes of weights to consider: all that the budget leaves, and the least."""
    least = least_weights(sizes)[placement]
    most = budget_bytes - work.peak_bytes
    if strategy == "streamed":  # takes what there is, all of it too
        most = min(most, sizes.total_bytes)
        return [most, least] if least < most else [least]
    return [most, least] if placement == "streamed" and least < most < sizes.total_bytes else [least]


def _weights(placement: PlacementName, sizes: UnitSizes, room_bytes: int) -> tuple[int, tuple[int, ...]]:
    if placement != "streamed":
        return least_weights(sizes)[placement], ()
    streamed = tuple(blocks_to_stream(sizes.fixed_bytes, sizes.blocks, room_bytes))
    chosen = set(streamed)
    kept = sum(block.held_bytes for i, block in enumerate(sizes.blocks) if i not in chosen)
    return sizes.fixed_bytes + kept + (ring_bytes(sizes.blocks) if streamed else 0), streamed


def _candidate(
    placement: PlacementName,
    sizes: UnitSizes,
    work: UnitForecast,
    rates: Rates,
    weights_bytes: int,
    streamed: tuple[int, ...],
    steps: int,
    idle_bytes: int,
    in_ram: bool,
    from_disk: bool,
) -> Candidate:
    calls_per_step = work.calls / steps
    compute = [operations / max(1, work.calls) / rates.operations_per_second for operations in work.block_operations]
    compute = compute if len(compute) == len(sizes.blocks) else [0.0] * len(sizes.blocks)
    outside = max(0.0, work.operations / max(1, work.calls) / rates.operations_per_second - sum(compute))
    bandwidth = rates.pinned_bytes_per_second
    if from_disk:
        bandwidth = min(bandwidth, rates.disk_bytes_per_second)
    transfer = [block.packed_bytes / bandwidth for block in sizes.blocks]
    copied = sum(transfer[i] for i in streamed) if len(streamed) > RING_SLOTS else 0.0
    working = work.working_bytes
    if placement == "leafwise":
        paged = rates.paged_bytes_per_second
        # With the gaps that blocks have for streaming: their copies are then never the slower ones.
        moved = sizes.fixed_bytes + sum(block.packed_bytes for block in sizes.blocks)
        copied = moved / (min(paged, rates.disk_bytes_per_second) if from_disk else paged)
        seconds = outside + sum(compute) + copied
        weights_bytes, working = sizes.stay_bytes, work.leafwise_bytes
    else:
        seconds = step_seconds(compute, transfer, streamed, outside)
    brought = (weights_bytes if placement != "leafwise" else 0) / bandwidth
    read = 0.0 if in_ram or from_disk else sizes.total_bytes / rates.disk_bytes_per_second
    return Candidate(
        placement=placement,
        weights_bytes=weights_bytes,
        peak_vram_bytes=max(idle_bytes, work.live_bytes + working + weights_bytes),
        ram_bytes=window_bytes(sizes, placement) if from_disk else sizes.total_bytes,
        streamed=streamed,
        blocks=len(sizes.blocks),
        step_seconds=seconds * calls_per_step,
        first_step_seconds=read + brought + seconds * calls_per_step,
        bound_seconds=max(outside + sum(compute), copied) * calls_per_step,
        transfer_seconds=copied * calls_per_step,
        from_disk=from_disk,
    )


def _why_not(candidate: Candidate, chosen: Candidate, budget_bytes: int, ram_bytes: int, bound_to: list[str]) -> str:
    if candidate.placement not in bound_to:
        return "not what was asked for"
    if candidate.peak_vram_bytes > budget_bytes:
        return f"{format_bytes(candidate.peak_vram_bytes)} do not fit {format_bytes(budget_bytes)}"
    if candidate.ram_bytes > ram_bytes:
        return f"{format_bytes(candidate.ram_bytes)} do not fit {format_bytes(ram_bytes)} of RAM"
    if candidate.step_seconds > chosen.step_seconds:
        times = candidate.step_seconds / chosen.step_seconds if chosen.step_seconds else 0
        return f"{times:.1f} times as slow" if times >= 1.05 else "slower"
    return "no faster, though it takes less"


def _reason(
    chosen: Candidate,
    sizes: UnitSizes,
    budget_bytes: int,
    fits: bool,
    ram_bytes: int,
    rates: Rates,
    asked: str,
) -> str:
    how = f"{asked.capitalize()}, as asked for"
    budget, whole = format_bytes(budget_bytes), format_bytes(sizes.total_bytes)
    if not fits and chosen.peak_vram_bytes <= budget_bytes:
        ram = format_bytes(ram_bytes)
        if asked:
            return f"{how}, does not fit {ram} of RAM: from disk it wants {format_bytes(chosen.ram_bytes)}."
        return f"Nothing fits {ram} of RAM: {chosen.placement} from disk wants {format_bytes(chosen.ram_bytes)}."
    if not fits and asked:
        return f"{how}, does not fit {budget}: it wants {format_bytes(chosen.peak_vram_bytes, up=True)}."
    if not fits:
        least = format_bytes(chosen.peak_vram_bytes, up=True)
        return f"Nothing fits {budget}: {chosen.placement} wants least, {least}."
    if chosen.placement != "leafwise" and not chosen.streamed:
        reason = f"{how}: all" if asked else "All"
        reason += f" {whole} of weights fit {budget} with their activations"
    elif chosen.placement == "streamed":
        copies_first = chosen.transfer_seconds >= 0.99 * chosen.bound_seconds
        cost = "the copies set the pace" if copies_first else "the copies hide behind the computing"
        why = how if asked else f"{whole} of weights do not fit {budget}"
        reason = (
            f"{why}: {chosen.blocks - len(chosen.streamed)} of {chosen.blocks} blocks "
            f"stay, {len(chosen.streamed)} pass through two slots, and {cost}"
        )
    elif asked:
        reason = f"{how}: each layer comes for its own call, which is slow"
    else:
        why = f"two blocks and their activations do not fit {budget}" if sizes.blocks else "it has no blocks to stream"
        reason = f"{whole} of weights do not fit {budget}, and {why}: each layer comes for its own call, which is slow"
    if chosen.from_disk:
        once = sizes.total_bytes / rates.disk_bytes_per_second
        again = chosen.streamed or chosen.placement == "leafwise"
        cost = f"{chosen.transfer_seconds:.1f} s of each step" if again else f"{once:.0f} s, once"
        reason += f"; {whole} do not fit {format_bytes(ram_bytes)} of RAM, so they are read from disk, {cost}"
    return reason + "."
