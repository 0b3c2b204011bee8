"""The thread that looks after what nobody asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from ballast.memory.watch import Watch


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_looks_when_woken_and_as_long_as_it_is_told_to() -> None:
    answers: list[float | None] = [0.01, 0.01, None]
    looks: list[str] = []

    def look() -> float | None:
        looks.append(threading.current_thread().name)
        return answers[len(looks) - 1] if len(looks) <= len(answers) else None

    watch = Watch(look)
    assert not looks
    watch.wake()
    until(lambda: watch._thread is None)
    assert len(looks) == 3 and threading.current_thread().name not in looks
    watch.wake()
    until(lambda: watch._thread is None and len(looks) == 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_one_look_ends_no_later_one() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("of one look")

    watch = Watch(look)
    watch.wake()
    until(lambda: watch._thread is None and len(looks) == 1)
    watch.wake()
    until(lambda: len(looks) == 2)
