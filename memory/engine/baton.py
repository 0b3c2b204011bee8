"""A baton for several calls of one module: they take turns, and each weight group comes once for all of them.

Each call runs in a thread of its own, one at a time. A call passes the baton on when it is about to enter another
weight group, and goes on when it gets it back. So the group that the first call brought is the running one for all
others.

The threads stay for the next step, and for the next run: torch keeps the plans of cuDNN's attention for each thread, to
make one takes 0.1 s, and those of threads that ended are never freed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import torch

from ..errors import release_frames

_log = logging.getLogger("ballast")
_local = threading.local()


class _StoppedError(BaseException):
    """The first call ended with an error: the others end too."""


class _Baton:
    """Says whose turn it is. `running` are the calls that have not ended, in order."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self.running = list(range(count))
        self.turn = 0
        self.stopped = False

    def await_turn(self, mine: int) -> None:
        """Wait for the baton. Raises _StoppedError in the other calls once the first has failed."""
        with self._condition:
            self._condition.wait_for(lambda: self.turn == mine or (self.stopped and mine > 0))
            if self.stopped and mine > 0:
                raise _StoppedError

    def pass_on(self, mine: int) -> None:
        """Give the baton to the next call that runs, and wait until it comes back."""
        with self._condition:
            self.turn = self._next(mine)
            self._condition.notify_all()
        self.await_turn(mine)

    def end(self, mine: int, failed: bool = False) -> None:
        """End a call, and give the baton to the next one. If the first `failed`, the others end at their turns."""
        with self._condition:
            following = self._next(mine)
            self.running.remove(mine)
            self.stopped |= failed and mine == 0
            if self.turn == mine:
                self.turn = following
            self._condition.notify_all()

    def _next(self, mine: int) -> int:
        at = self.running.index(mine)
        return self.running[(at + 1) % len(self.running)]


def pass_on() -> None:
    """Let the other calls that this one takes turns with run up to the same place. Does nothing without any."""
    if baton := getattr(_local, "baton", None):
        baton.pass_on(_local.mine)


def in_turns(device: torch.device, calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """Run calls in turns. Return the result of the first, and those of the others, None for each that failed.

    What the first raises is raised here, when all have ended. The others run on the same stream of the device.
    """
    baton, results = _Baton(len(calls)), [None] * (len(calls) - 1)
    backend, inference = torch.get_device_module(device), torch.is_inference_mode_enabled()
    stream = backend.current_stream(device) if hasattr(backend, "current_stream") and device.type != "cpu" else None
    cores = torch.get_num_threads()

    def run(mine: int) -> None:
        _local.baton, _local.mine = baton, mine
        try:
            torch.set_num_threads(cores)  # a thread has its own number, by which kernels of the CPU divide their sums
            with ExitStack() as exits:
                if stream is not None and hasattr(backend, "set_device"):  # else the thread has no context, or card 0
                    backend.set_device(stream.device)
                exits.enter_context(torch.inference_mode(inference))
                if stream is not None:
                    exits.enter_context(backend.stream(stream))
                baton.await_turn(mine)
                results[mine - 1] = calls[mine]()
        except BaseException as error:  # the call is made again when the first has ended, and fails again if it must
            if not isinstance(error, _StoppedError):
                _log.warning("Ballast: a pass beside another ended with %s: %s", type(error).__name__, str(error))
            release_frames(error)
        finally:
            _local.baton = None
            baton.end(mine)

    others = [_worker(device, mine).submit(run, mine) for mine in range(1, len(calls))]
    _local.baton, _local.mine = baton, 0
    failed = True
    try:
        first = calls[0]()
        failed = False
        return first, results
    finally:
        _local.baton = None
        baton.end(0, failed)
        wait(others)


@functools.cache
def _worker(device: torch.device, mine: int) -> ThreadPoolExecutor:
    """Return the thread that runs the calls of one number on a device."""
    return ThreadPoolExecutor(1, f"pass-{mine}-of-ballast")
