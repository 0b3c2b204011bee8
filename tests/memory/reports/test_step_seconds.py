"""Seconds of a step, from the events of a stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from ballast.memory.planning.runplan import StagePlan
from ballast.memory.reports.timeline import Event, EventKind, StageRecord


def seconds_of(steps: int | None, *moments: tuple[str, float]) -> float | None:
    """The figure of a stage in which that happened when."""
    record = StageRecord("sample", 0.0, {})
    if steps is not None:
        record.planned = cast(StagePlan, SimpleNamespace(steps=steps))
    kinds = [(cast(EventKind, kind), moment) for kind, moment in moments]
    record.events = [Event(moment, kind, "transformer", 0, 0, 0, ()) for kind, moment in kinds]
    return record.step_seconds


FIRST: list[tuple[str, float]] = [("load", 1), ("place", 5), ("call", 6), ("ran", 10)]


def test_steps_after_the_first_are_told_in_the_mean() -> None:
    """To where the device is done with the last, which the return of its call does not say."""
    said = seconds_of(3, *FIRST, ("call", 10), ("ran", 12), ("call", 12), ("ran", 13), ("done", 16))
    assert said == pytest.approx((16 - 10) / 2)


def test_a_step_of_several_calls() -> None:
    """It lasts from its first call to the first of the next step."""
    calls: list[tuple[str, float]] = [(kind, time) for time in (10, 11, 20, 22, 30, 37) for kind in ("call", "ran")]
    assert seconds_of(3, ("place", 1), *calls) == pytest.approx(((30 - 20) + (37 - 30)) / 2)
    assert seconds_of(4, ("place", 1), *calls) is None, "a call was left out or made again"


@pytest.mark.parametrize("kind", ["load", "place", "evict"])
def test_a_step_in_which_something_was_placed_is_left_out(kind: str) -> None:
    """As where the groups lie elsewhere from then on, since their seconds are known."""
    moved = (kind, 15)
    second, third, fourth = (("call", 11), ("ran", 14)), (("call", 16), ("ran", 22)), (("call", 23), ("ran", 30))
    assert seconds_of(4, *FIRST, *second, moved, *third, *fourth) == pytest.approx(((15 - 11) + (30 - 23)) / 2)
    assert seconds_of(3, *FIRST, *second, moved, *third) == pytest.approx(15 - 11)
    assert seconds_of(3, *FIRST, moved, *third, *fourth) == pytest.approx(30 - 23)
    assert seconds_of(2, *FIRST, moved, *third) is None


@pytest.mark.parametrize("steps", [None, 0, 1])
def test_one_step_tells_nothing(steps: int | None) -> None:
    assert seconds_of(steps, *FIRST, ("ran", 12), ("done", 13)) is None


def test_nothing_ran() -> None:
    assert seconds_of(3) is None
    assert seconds_of(3, ("place", 1)) is None
