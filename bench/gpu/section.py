"""Code of all sections, each a process of its own: rows in a file that is written anew after each of them."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...memory import simulated
from ...memory.errors import release_frames
from ..measure import Meter, environment, find_device

_T = TypeVar("_T")


class Section:
    """Rows and notes of one section, and the time that it has.

    `request` has "dry", "seconds" and what the section itself wants. Until it is done the file says that it is not: a
    process that dies leaves its rows, and what it was at.
    """

    def __init__(self, request: dict[str, Any], answer: Path) -> None:
        self.request, self.answer = request, answer
        self.dry: bool = request["dry"]
        self.found: dict[str, Any] = {"rows": [], "notes": []}
        self._begun = time.monotonic()
        self._error: str | None = "it ended as it began"
        self._write()

    @property
    def kind(self) -> str:
        """The kind of the device: a real card, or the simulated one."""
        return simulated.DEVICE_TYPE if self.dry else "cuda"

    def meter(self) -> Meter:
        """Return a meter of the card, which is there and warm from then on, and told what it is."""
        meter = Meter(find_device(self.kind))
        torch.ones(1, device=meter.device).add_(1)
        if meter.is_sim:
            torch.set_num_threads(1)  # nothing there is large
        # What runs, or where there is no such thing what was asked for.
        asked = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "native").removeprefix("backend:")
        allocator = asked if meter.is_sim else torch.cuda.get_allocator_backend()
        self.tell(**environment(meter, ""), allocator=allocator)
        return meter

    def left(self) -> float:
        """Seconds until it should be done."""
        return self.request["seconds"] - (time.monotonic() - self._begun)

    def tell(self, **facts: Any) -> None:
        """Note what is true of all rows."""
        self.found |= facts
        self._write()

    def note(self, line: str) -> None:
        """Say something in one line."""
        self.found["notes"].append(line)
        self._write()

    def row(self, **figures: Any) -> None:
        """Add a row."""
        self.found["rows"].append(figures)
        self._write()

    def attempt(self, what: str, seconds: float, call: Callable[..., _T], *of: Any) -> _T | None:
        """Return what a call returns. None where it fails, or where fewer `seconds` are left: then a note says so.

        A dry run has the time that it takes.
        """
        if self.left() < seconds and not self.dry:
            self.note(f"{what}: left out, {max(0.0, self.left()):.0f} s were left")
            return None
        self._error = f"it ended in: {what}"
        self._write()
        try:
            return call(*of)
        except Exception as error:
            traceback.print_exc()
            self.note(f"{what}: {_line(error)}")
            release_frames(error)
            return None
        finally:
            gc.collect()

    def run(self, measure: Callable[[Section], None]) -> None:
        """Measure; what fails is the section's error."""
        try:
            measure(self)
            self._error = None if self.found["rows"] else "no row could be measured"
        except BaseException as error:  # a library may also exit
            traceback.print_exc()
            self._error = _line(error)
        self._write()

    def _write(self) -> None:
        part = self.answer.with_suffix(".part")
        part.write_text(json.dumps({**self.found, "error": self._error} if self._error else self.found), "utf-8")
        os.replace(part, self.answer)


def run(argv: Sequence[str], measure: Callable[[Section], None]) -> None:
    """Run a section as the `main` of its process: `argv` has the request as JSON, and the file for the answer."""
    Section(json.loads(argv[0]), Path(argv[1])).run(measure)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
