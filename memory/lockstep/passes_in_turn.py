"""Run the passes of a step in turns. See [Note: Passes in lockstep] in the package."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.baton import in_turns
from ..once.tables import KnownCall, are_equal
from ..planning.taint import is_of_latents, is_of_step, named_arguments
from ..weights.interpose import Forward, interpose

Arguments = Mapping[str, Any]
_log = logging.getLogger("ballast")


def passes_of(calls: Sequence[KnownCall]) -> list[Arguments]:
    """Return the arguments in which the passes of a step differ, those of its first call first.

    The first calls of a loop that have one timestep are a step.
    """
    if not calls:
        return []
    step = _of_step(calls[0].arguments)
    first = [call.arguments for call in calls if _are_alike(_of_step(call.arguments), step)]
    return [_constant(arguments) for arguments in first]


class Lockstep:
    """The passes of one unit. `shared` counts calls that were foreseen, `missed` passes that ran in vain."""

    def __init__(self, device: torch.device, passes: Sequence[Arguments]) -> None:
        self._device, self._passes = device, list(passes)
        self._made: list[tuple[Arguments, Any]] = []  # foreseen calls with their results
        self.shared = self.missed = 0

    @contextmanager
    def sharing(self, module: nn.Module) -> Iterator[None]:
        """Run the unit's passes in turns until the block ends. To be entered before the unit is placed."""
        undo = interpose(module, self._run)
        try:
            yield
        finally:
            undo()
            self._stop()

    def _stop(self) -> None:
        """Let passes run alone from now on."""
        self._passes, self._made = [], []

    def _run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        arguments = named_arguments(forward, args, kwargs)
        if self._made:
            known, result = self._made.pop(0)
            if result is not None and _are_alike(known, arguments):
                self.shared += 1
                return result
            self.missed += 1 + len(self._made)
            _log.warning(
                "Ballast: passes run alone from now on: a call was another than foreseen, or failed beside another."
            )
            self._stop()
        if len(self._passes) < 2 or not _are_alike(self._passes[0], _constant(arguments)):
            return forward(**arguments)
        others = [{**each, **_changing(arguments)} for each in self._passes[1:]]
        calls: list[Callable[[], Any]] = [functools.partial(forward, **each) for each in (arguments, *others)]
        try:
            first, results = in_turns(self._device, calls)
        except BaseException:
            self._stop()  # such as of memory that ran out: the call is made again, in less
            raise
        self._made = list(zip(others, results, strict=True))
        return first


def _are_alike(ours: Arguments, theirs: Arguments) -> bool:
    """Return whether two calls have the same arguments, bit for bit."""
    return ours.keys() == theirs.keys() and are_equal({name: theirs[name] for name in ours}, dict(ours))


def _of_step(arguments: Arguments) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if is_of_step(name)}


def _changing(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that change from step to step: latents and time."""
    return {name: value for name, value in arguments.items() if is_of_latents(name) or is_of_step(name)}


def _constant(arguments: Arguments) -> dict[str, Any]:
    """Return the others."""
    return {name: value for name, value in arguments.items() if not (is_of_latents(name) or is_of_step(name))}
