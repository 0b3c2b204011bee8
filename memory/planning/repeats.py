"""Repeated calls inside a dry run: blocks and tiles that are alike are walked once, and counted for each call.

A call is answered from memory where an earlier one of a module built alike was given values alike, made of the same
inputs of the whole, and left nothing behind: the same bytes on the card, and the same state in the module and in the
lists and objects that it was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..simulated.operators import tensors_in
from ..simulated.tensor import SimTensor
from ..weights.structure import own_refs
from .forecast import Operations
from .known_calls import Given
from .taint import Mark, Seen

_FEWEST_MODULES = 4  # with weights inside: of fewer the walk is as quick as the comparison
_COMPARED_ELEMENTS = 4096  # elements up to which ids and masks are compared by value
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, FunctionType, BuiltinFunctionType)
_INDEX, _WATCHED = "layer_idx", "_ballast_index"  # the number of a block of transformers, which caches know it by

MarkOf = Callable[[torch.Tensor], Mark]


@dataclass(frozen=True)
class Result:
    """The result of a call: what is `made`, and the arguments in it, by the numbers of their leaves."""

    made: Given
    passed: Mapping[int, int]

    @classmethod
    def of(cls, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result | None:
        """Return the record of a result; None for what shapes do not tell.

        What is made has floating-point values that are not known, and storages of its own.
        """
        came = tensors_in((args, kwargs))
        numbers, storages = {id(tensor): i for i, tensor in enumerate(came)}, storages_of(came)
        leaves, structure = tree_flatten(result)
        passed = {i: numbers[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in numbers}
        leaves = [None if i in passed else leaf for i, leaf in enumerate(leaves)]
        for leaf in leaves:
            if isinstance(leaf, SimTensor):
                if not leaf.raw.is_meta or not leaf.is_floating_point() or id(leaf.allocation) in storages:
                    return None
            elif not isinstance(leaf, str | int | float | bool | None):
                return None
        try:
            return cls(Given.of(tree_unflatten(leaves, structure)), passed)
        except NotImplementedError:  # a class that has no name to be saved by
            return None

    def make(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """Return the result of a call alike, and the tensors that were made for it."""
        made = self.made.make()
        if not self.passed:
            return made, tensors_in(made)
        leaves, structure = tree_flatten(made)
        came = tensors_in((args, kwargs))
        whole = [came[self.passed[i]] if i in self.passed else leaf for i, leaf in enumerate(leaves)]
        return tree_unflatten(whole, structure), tensors_in(made)


@dataclass(frozen=True)
class Walked:
    """What a call of a module did, with the paths of the modules inside counted from it.

    `peak_bytes` and `held` are beyond the bytes held when it began, `side_bytes` beyond those made without latents.
    `marks` are those of the tensors made for the result, and whether they count among these bytes. `last` is the module
    that ran last, and `counted` are the `counters` of its arguments after it.
    """

    result: Result
    marks: Sequence[tuple[Mark, bool]]
    peak_bytes: int
    side_bytes: int
    kept_in_ram: int
    operations: Mapping[str, Operations]
    held: Mapping[str, int]
    seen: Mapping[str, Seen]
    last: str
    counted: tuple[tuple[int, ...], ...]


class Repeats:
    """The calls that may be answered from memory, by what was called and with what.

    `unlike` counts what no other call does: one that raised it is not kept.
    """

    def __init__(self, module: nn.Module, mark_of: MarkOf) -> None:
        """Watch whether the modules inside read their numbers."""
        self.unlike = 0
        self._mark_of = mark_of
        self._walked: dict[Any, Walked] = {}
        self._built: dict[int, Any] = {}
        for inner in module.modules():
            if _INDEX in vars(inner):
                vars(inner)[_WATCHED] = vars(inner).pop(_INDEX), self
                inner.__class__ = _numbered(type(inner))  # type: ignore[arg-type]

    def key(self, module: nn.Module, times: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what calls alike share."""
        if id(module) not in self._built:
            self._built[id(module)] = _built(module)
        state = _State(self._mark_of)
        rest = tuple(None if _is_counters(value) else value for value in (*args, *kwargs.values()))
        given = tuple(kwargs), state.of(rest)
        return self._built[id(module)], state.inside(module), times, given, contents(args, kwargs)

    def find(self, key: Any) -> Walked | None:
        """Return the call of this key, None if it is to be walked."""
        return self._walked.get(key)

    def keep(self, key: Any, after: Any, walked: Walked) -> None:
        """Keep a call whose module and arguments are `after` it as they were before, but for its counters."""
        if key[:-1] == after[:-1]:
            self._walked[key] = walked


@functools.cache
def _numbered(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules that tell when their number is read."""

    def read(self: nn.Module) -> Any:
        number, repeats = vars(self)[_WATCHED]
        repeats.unlike += 1
        return number

    def write(self: nn.Module, number: Any) -> None:
        vars(self)[_WATCHED] = number, vars(self)[_WATCHED][1]

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, _INDEX: property(read, write)})


def has_repeats(module: nn.Module) -> bool:
    """Return whether calls of a module are worth comparing."""
    return sum(any(True for _ in own_refs(inner)) for inner in module.modules()) >= _FEWEST_MODULES


def storages_of(values: Any) -> dict[int, int]:
    """Return the bytes of the storages on the card in a tree, by id."""
    return {id(t.allocation): t.allocation.nbytes for t in tensors_in(values) if isinstance(t, SimTensor)}


def counters(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of numbers among the arguments, which a call may count up."""
    return [value for value in (*args, *kwargs.values()) if _is_counters(value)]


def contents(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return what the counters hold now."""
    return tuple(map(tuple, counters(args, kwargs)))


def _is_counters(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(item) is int for item in value)


def _built(module: nn.Module) -> Any:
    """Return what modules built alike share: the classes of all inside, and their weights' shapes."""
    return tuple(
        (path, type(inner), tuple((ref.key, tuple(ref.tensor.shape), ref.tensor.dtype) for ref in own_refs(inner)))
        for path, inner in module.named_modules()
    )


class _State:
    """What values hold: shapes and marks of tensors, values of small masks and ids, and plain data, however deep."""

    def __init__(self, mark_of: MarkOf) -> None:
        self._mark_of = mark_of
        self._met: dict[int, int] = {}  # the numbers of objects, by id, each told once

    def inside(self, module: nn.Module) -> tuple[Any, ...]:
        """Return what the modules inside keep beside weights, such as strides, flags and cached tensors."""
        return tuple(
            (name, self.of(value))
            for inner in module.modules()
            for name, value in vars(inner).items()
            if name not in _OF_TORCH and name != _WATCHED
        )

    def of(self, value: Any) -> Any:
        """Return what equal states share."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, _CODE):
            return id(value)
        if isinstance(value, MethodType | functools.partial):
            return type(value), id(value.__func__ if isinstance(value, MethodType) else value.func)
        if isinstance(value, tuple):
            return type(value), *map(self.of, value)
        if id(value) in self._met:
            return (self._met[id(value)],)
        self._met[id(value)] = len(self._met)
        if isinstance(value, nn.Module):
            return type(value)
        if isinstance(value, list | set | frozenset):
            return type(value), *map(self.of, value)
        if isinstance(value, dict):
            return type(value), *((self.of(name), self.of(item)) for name, item in value.items())
        if not hasattr(value, "__dict__"):
            return id(value)
        return type(value), *((name, self.of(item)) for name, item in vars(value).items())

    def _tensor(self, value: torch.Tensor) -> Any:
        raw = value.raw if isinstance(value, SimTensor) else value
        known = not raw.is_meta and not raw.is_floating_point() and raw.numel() <= _COMPARED_ELEMENTS
        told = tuple(raw.flatten().tolist()) if known else raw.is_meta
        return tuple(raw.shape), raw.stride(), raw.dtype, told, self._mark_of(value)
