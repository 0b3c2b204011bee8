"""How many files of pipelines a run passes through, and in which order: one way down, from the face to the model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ballast
import pytest
from ballast import pipelines

ROOM = Path(pipelines.__file__).resolve().parent
MOST_FILES = 27  # entered by a first `sample`, the checks of arguments and the forecast among them
WAY_DOWN = ["pipeline.py", "stages/sample.py", "runner.py", "stages/sample.py", "models/diffusers/diffusers_model.py"]


@contextmanager
def entered() -> Iterator[dict[str, list[str]]]:
    """Note each file of pipelines whose code runs, with the files of pipelines on the stack when it first does."""
    found: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := place(frame)) and name not in found:
            found[name] = stack(frame)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def place(frame: FrameType) -> str:
    return place_of(frame.f_code.co_filename)


@functools.cache
def place_of(name: str) -> str:
    file = Path(name).resolve()
    return file.relative_to(ROOM).as_posix() if ROOM in file.parents else ""


def stack(frame: FrameType | None) -> list[str]:
    """The files of pipelines on the stack, the first caller first, one after the other named once."""
    names: list[str] = []
    while frame is not None:
        if (name := place(frame)) and name != "options.py" and (not names or names[-1] != name):
            names.append(name)
        frame = frame.f_back
    return names[::-1]


@pytest.mark.usefixtures("sim")
def test_a_first_sample_goes_one_way_down(tiny_folders: Callable[[str], Path], tmp_path: Path) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim", cache_dir=tmp_path)
    cond = pipe.encode("a boat")
    way: list[str] = []

    def on_step(*_: Any) -> None:
        way[:] = stack(sys._getframe(1))

    with entered() as found:
        pipe.sample(cond, width=32, height=32, steps=1, on_step=on_step)
    assert len(found) <= MOST_FILES, sorted(found)
    # The stage calls the runner, which calls the stage's own function back once the weights are there.
    down = [name for name in way if name not in ("stock/stand_ins.py",)]
    assert [name for at, name in enumerate(down) if at == 0 or down[at - 1] != name][: len(WAY_DOWN)] == WAY_DOWN
