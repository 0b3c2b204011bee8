"""Lockstep: the passes of guidance take turns at each weight group, which comes once a step for all of them.

A stock pipeline makes one call of its transformer after the other. When it makes the first of a step, the others are
foreseen: they have the arguments of the last step's others, with the latents and the time of this one. They run beside
the first, and their results are handed out when the pipeline makes the calls, if these have the same arguments bit for
bit. So a wrong guess costs a pass, and never a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .engine.baton import in_turns
from .once.tables import are_equal
from .planning.taint import is_of_latents, is_of_step, named_arguments
from .weights.interpose import Forward, interpose

Arguments = Mapping[str, Any]


class Lockstep:
    """The passes of one unit. `shared` counts calls that were foreseen, `missed` passes that ran in vain."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        self._step: list[Arguments] = []  # calls of the present step
        self._passes: list[Arguments] = []  # of a step: the arguments that stay the same, the first call's first
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
            self._step, self._passes, self._made = [], [], []

    def _run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        arguments = named_arguments(forward, args, kwargs)
        if self._made:
            known, result = self._made.pop(0)
            if result is not None and are_alike(known, arguments):
                self.shared += 1
                return result
            self.missed += 1 + len(self._made)
            self._made, self._passes, self._step = [], [], []
        others = self._foreseen(arguments)
        if not others:
            self._learn(arguments)
            return forward(**arguments)
        calls = [lambda given=given: forward(**given) for given in (arguments, *others)]
        result, results = in_turns(self._device(), calls)
        self._made = list(zip(others, results, strict=True))
        return result

    def _learn(self, arguments: Arguments) -> None:
        """Note a call. One with the same latents and time as the one before is another pass of the same step."""
        if self._step and not are_alike(_moving(self._step[0]), _moving(arguments)):
            self._passes = [_constant(each) for each in self._step] if len(self._step) > 1 else []
            self._step = []
        self._step.append(arguments)

    def _foreseen(self, arguments: Arguments) -> list[Arguments]:
        """Return the other calls of the step that this call begins; none where it is not known to begin one."""
        if not self._passes and len(self._step) > 1 and not are_alike(_moving(self._step[0]), _moving(arguments)):
            self._passes = [_constant(each) for each in self._step]
        if not self._passes or not are_alike(self._passes[0], _constant(arguments)):
            return []
        self._step = []
        return [{**each, **_moving(arguments)} for each in self._passes[1:]]


def are_alike(ours: Arguments, theirs: Arguments) -> bool:
    """Return whether two calls have the same arguments, bit for bit."""
    return ours.keys() == theirs.keys() and are_equal({key: theirs[key] for key in ours}, dict(ours))


def _moving(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that change from step to step: latents and time."""
    return {name: value for name, value in arguments.items() if is_of_latents(name) or is_of_step(name)}


def _constant(arguments: Arguments) -> dict[str, Any]:
    """Return the others."""
    return {name: value for name, value in arguments.items() if not (is_of_latents(name) or is_of_step(name))}
