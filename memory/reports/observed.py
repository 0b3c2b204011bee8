"""Records of the host's own nodes: their use of VRAM, as observed from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..vocabulary import Tier
from .timeline import Event, StageRecord, Timeline, UnitRecord

_ROUNDED = 0.01  # share of the bytes on a device by which an allocator rounds


class Observation:
    """The record of one node of the host while it runs. Call `look` now and then, and `finish` when it is done.

    It goes into the timeline if weights came to the device or memory beside weights was used there. It does not if one
    of our stages ran meanwhile, since that stage's own record says more.
    """

    def __init__(self, timeline: Timeline, name: str, run: str, budget_bytes: int) -> None:
        self._timeline = timeline
        self._stage = StageRecord(name, time.perf_counter(), {}, budget_bytes=budget_bytes, run=run)
        timeline.target_bytes = 0
        timeline.moment()  # starts the peak anew
        self._stage.events.append(timeline.moment())

    def look(self) -> None:
        """Note the weights on the device now, and the peak since the last look."""
        if not self._timeline.is_in_stage:
            self._stage.events.append(self._timeline.moment())

    def finish(self) -> None:
        """Close the record, and add it to the timeline under the conditions of the class."""
        if self._timeline.stages and self._timeline.stages[-1].started > self._stage.started:
            return
        self.look()
        stage = self._stage
        if len(stage.events) == 1:  # a stage of ours has run since before it began
            return
        stage.seconds = time.perf_counter() - stage.started
        stage.peak_bytes = stage.own_peak_bytes = max(_most(event) for event in stage.events[1:])
        stage.units = _records(stage.events)
        stage.budget_bytes = self._timeline.target_bytes or stage.budget_bytes
        held = [sum(resident.bytes for resident in event.residents) for event in stage.events]
        # Weights that left between two looks are not counted as work at the second.
        beside = max(
            _most(event) - max(before, now)
            for event, before, now in zip(stage.events[1:], held, held[1:], strict=False)
        )
        # Such as a model whose budget was lowered. A node that only unloads has no budget of its own.
        gave_way = held[-1] < held[0] and (held[-1] > 0 or self._timeline.target_bytes > 0)
        worked = gave_way or beside > _ROUNDED * stage.peak_bytes
        if worked or any(unit.bytes_in for unit in stage.units.values()):
            self._timeline.stages.append(stage)


def _most(event: Event) -> int:
    return max(event.peak_bytes, event.allocated_bytes)


def _records(events: Sequence[Event]) -> dict[str, UnitRecord]:
    """Return a record of each model that was on the device: its tiers before and after, and the bytes it brought in."""
    held = [{resident.name: resident.bytes for resident in event.residents} for event in events]
    found = {}
    for name in dict.fromkeys(name for each in held for name in each):
        before, after = (each.get(name, 0) for each in (held[0], held[-1]))
        came = max(0, max(each.get(name, 0) for each in held) - before)
        found[name] = UnitRecord(name, _tier(before), _tier(after), "", came)
    return found


def _tier(held_bytes: int) -> Tier:
    return "device" if held_bytes else "host"
