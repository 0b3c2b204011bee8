"""Tables of the results of modules that are computed once, by the arguments of the unit's calls."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from ..planning.taint import is_of_latents, named_arguments
from ..weights.interpose import Forward, interpose


@dataclass(eq=False)
class KnownCall:
    """A call of the unit: its `arguments` by name, those that change with the latents as shapes.

    `rows` maps the path of a module to the number of its result in the table, for each of its calls in turn.
    """

    arguments: Mapping[str, Any]
    rows: dict[str, list[int]] = field(default_factory=dict)

    def is_like(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call has the same arguments, bit for bit, but for those that change with the latents."""
        ours, theirs = (
            {name: value for name, value in each.items() if not is_of_latents(name)}
            for each in (self.arguments, arguments)
        )
        return ours.keys() == theirs.keys() and are_equal(ours, theirs)


class Tables:
    """The results of the modules `paths` of one unit, for calls that are known."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = frozenset(paths)
        self.calls: list[KnownCall] = []
        self.rows: dict[str, list[Any]] = {}
        self._local = threading.local()  # calls that take turns run in threads of their own
        self._undo: list[Callable[[], None]] = []
        self._running = 0
        self._next = 0
        self.missed = 0  # calls that were not found

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(t.nbytes for t in tree_iter(self.rows) if isinstance(t, torch.Tensor))

    def add(self, arguments: Mapping[str, Any]) -> None:
        """Add a call, unless one like it is known."""
        if not any(call.is_like(arguments) for call in self.calls):
            self.calls.append(KnownCall(arguments))

    def clear(self) -> None:
        """Forget all results. The calls stay known."""
        self.rows = {}
        for call in self.calls:
            call.rows = {}

    def forget(self) -> None:
        """Forget all calls and their results."""
        self.calls, self.rows = [], {}

    def _find(self, arguments: Mapping[str, Any]) -> KnownCall | None:
        """Return the known call with these arguments. The one after the last found is tried first."""
        for ahead in range(len(self.calls)):
            at = (self._next + ahead) % len(self.calls)
            if self.calls[at].is_like(arguments):
                self._next = at + 1
                return self.calls[at]
        return None

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[None]:
        """Answer for the modules in all calls of the unit's `module` that are known, until the block ends.

        To be entered before the unit is placed: the answers then come ahead of the gates of weight groups.
        """
        undo = interpose(module, functools.partial(self._run, module))
        try:
            yield
        finally:
            undo()

    def _run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a call of the unit, with answers if it is known."""
        found = self._find(named_arguments(forward, args, kwargs))
        if found is None:
            self.missed += 1
            return forward(*args, **kwargs)
        self._local.call, self._local.taken = found, Counter()
        self._begin(module)
        try:
            return forward(*args, **kwargs)
        finally:
            self._local.call = None
            self._end()

    def _begin(self, module: nn.Module) -> None:
        """Answer for the modules from now on, in front of the gates of their weight groups."""
        self._running += 1
        if self._running == 1:
            paths = [(path, module.get_submodule(path)) for path in self.rows]
            self._undo = [interpose(owner, functools.partial(self._answer, path)) for path, owner in paths]

    def _end(self) -> None:
        self._running -= 1
        while not self._running and self._undo:
            self._undo.pop()()

    def _answer(self, path: str, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Return a copy of a module's result: callers may write to it, as to that of the module."""
        call: KnownCall | None = getattr(self._local, "call", None)
        if call is None or path not in call.rows:
            return forward(*args, **kwargs)
        at, numbers = self._local.taken[path], call.rows[path]
        self._local.taken[path] += 1
        if at >= len(numbers):
            return forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.clone, self.rows[path][numbers[at]])


def are_equal(ours: Any, theirs: Any) -> bool:
    """Return whether two trees of arguments are the same, tensors bit for bit."""
    (some, structure), (others, other) = tree_flatten(ours), tree_flatten(theirs)
    return structure == other and all(map(_is_equal, some, others))


def _is_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one is other:
        return True
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and bool(torch.equal(one, other))
