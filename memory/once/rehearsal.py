"""Compute the tables of a unit: its own code runs for each known call, with latents that have shapes only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from ..weights.interpose import Forward, interpose
from ..weights.structure import block_lists
from .recording import ShapesOf, on_shapes
from .shaped import ShapedError, has_shaped
from .tables import KnownCall, Tables, are_equal

_COMPARED_BYTES = 2**18  # of arguments that are read to tell equal ones; larger ones are compared on the device


class _Use(NamedTuple):
    """A call of a chosen module whose result is wanted, in a call of the unit."""

    call: KnownCall
    args: tuple
    kwargs: dict


class _EnoughError(Exception):
    """The call ran as far as it can before results are there that its blocks need."""


class Rehearsal:
    """Fills `tables` in one call of the unit's module, which must be in place.

    In each round all known calls run as far as their results are known. Then each chosen module that was called with
    values is brought, and computes the results of all calls. Blocks are entered when the modules before them are done.
    """

    def __init__(self, module: nn.Module, tables: Tables, shapes: ShapesOf) -> None:
        self.module, self.tables, self.shapes = module, tables, shapes
        self._firsts = [members[0] for _, members in block_lists(module) if len(members)]
        self._blocks = tuple(f"{path}." for path, _ in block_lists(module))
        self._waiting: dict[str, list[_Use]] = {}
        self._seen: dict[str, dict[Hashable, int]] = {}
        self._taken: Counter[str] = Counter()
        self._unfinished = self._early = False
        self._call = KnownCall({})

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Fill the tables in place of each call of the module until the block ends."""
        undo = interpose(self.module, lambda forward, args, kwargs: self.run(forward))
        try:
            yield
        finally:
            undo()
            self._waiting, self._call = {}, KnownCall({})

    def run(self, forward: Forward) -> None:
        """Fill the tables. Raises ShapedError where a module needs something that is made of latents."""
        self.tables.clear()
        self._seen = defaultdict(dict)
        while True:
            self._waiting, self._unfinished = {}, False
            with self._on_shapes():
                for call in self.tables.calls:
                    self._run_call(call, forward)
            if not self._waiting:
                break
            for path, uses in self._waiting.items():
                self._compute(path, uses)
        if self._unfinished:
            raise ShapedError("a module that sees no latents waits for one that does")

    @contextmanager
    def _on_shapes(self) -> Iterator[None]:
        with ExitStack() as exits:
            exits.enter_context(_unchanged(self.module))
            for first in self._firsts:
                exits.callback(interpose(first, self._enter_blocks))
            exits.enter_context(on_shapes(self.module, self.shapes, dict.fromkeys(self.tables.paths, self._called)))
            yield

    def _run_call(self, call: KnownCall, forward: Forward) -> None:
        self._call, self._taken, self._early = call, Counter(), False
        try:
            forward(**call.arguments)
        except _EnoughError:
            self._unfinished = True

    def _enter_blocks(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self._early:
            raise _EnoughError
        return forward(*args, **kwargs)

    def _called(self, path: str, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Answer a chosen module's call: by its result, or with a shape until that is there."""
        at, numbers = self._taken[path], self._call.rows.get(path, [])
        self._taken[path] += 1
        if at < len(numbers):
            return self.tables.rows[path][numbers[at]]
        if has_shaped((args, kwargs)):
            self._unfinished = True
        elif at == len(numbers) + sum(use.call is self._call for use in self._waiting.get(path, ())):
            self._waiting.setdefault(path, []).append(_Use(self._call, args, kwargs))
        self._early |= not path.startswith(self._blocks)
        return self.shapes.result(path, args, kwargs)

    def _compute(self, path: str, uses: list[_Use]) -> None:
        """Compute the results of one module for all that use it. Calls with equal arguments share one."""
        module, rows, seen = self.module.get_submodule(path), self.tables.rows.setdefault(path, []), self._seen[path]
        large: list[tuple[Any, int]] = []
        for call, args, kwargs in uses:
            key = _key((args, kwargs))
            number = seen.get(key) if key is not None else _find_large(large, (args, kwargs))
            if number is None:
                number = len(rows)
                rows.append(tree_map_only(torch.Tensor, torch.clone, module(*args, **kwargs)))
                if key is None:
                    large.append(((args, kwargs), number))
                else:
                    seen[key] = number
            call.rows.setdefault(path, []).append(number)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Give all modules the attributes again that they have now, when the block ends: some code caches what it made."""
    before = {owner: dict(vars(owner)) for owner in module.modules()}
    try:
        yield
    finally:
        for owner, attributes in before.items():
            vars(owner).clear()
            vars(owner).update(attributes)


def _find_large(known: list[tuple[Any, int]], given: Any) -> int | None:
    return next((number for values, number in known if are_equal(values, given)), None)


def _key(values: Any) -> Hashable | None:
    """Return what tells small arguments apart, with all their bits; None for large ones."""
    tensors = [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
    if sum(tensor.nbytes for tensor in tensors) > _COMPARED_BYTES:
        return None
    return tuple(_bits(value) if isinstance(value, torch.Tensor) else repr(value) for value in tree_iter(values))


def _bits(tensor: torch.Tensor) -> Hashable:
    flat = tensor.detach().cpu().contiguous().flatten()
    return tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy().tobytes()
