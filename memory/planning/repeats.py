"""Repeated calls inside a dry run: blocks and tiles that are alike are walked once, and counted for each call.

A call is answered from memory where an earlier one of a module built alike was given values alike, and left nothing
behind: the same bytes on the card, and the same state in the module and in the lists that it was given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ..simulated.dry import DEVICE
from ..simulated.operators import tensors_in
from ..simulated.tensor import SimTensor
from ..weights.structure import own_refs
from .forecast import Operations

_FEWEST_MODULES = 4  # with weights inside: of fewer the walk is as quick as the comparison
_COMPARED_ELEMENTS = 4096  # elements up to which ids and masks are compared by value
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Walked:
    """What a call of a module did, with the paths of the modules inside counted from it.

    `peak_bytes` and `held` are beyond the bytes held when it began. `last` is the module that ran last, and `counted`
    are the `counters` of its arguments after it.
    """

    result: Any
    peak_bytes: int
    operations: Mapping[str, Operations]
    held: Mapping[str, int]
    last: str
    counted: tuple[tuple[int, ...], ...]


class Repeats:
    """The calls that may be answered from memory, by what was called and with what."""

    def __init__(self) -> None:
        self._walked: dict[Any, Walked] = {}
        self._built: dict[int, Any] = {}

    def key(self, module: nn.Module, times: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what calls alike share."""
        if id(module) not in self._built:
            self._built[id(module)] = _built(module)
        return self._built[id(module)], _state(module), times, *_given(args, kwargs), contents(args, kwargs)

    def find(self, key: Any) -> Walked | None:
        """Return the call of this key, None if it is to be walked."""
        return self._walked.get(key)

    def keep(self, key: Any, after: Any, walked: Walked) -> None:
        """Keep a call whose module and arguments are `after` it as they were before, but for its counters."""
        if key[:-1] == after[:-1]:
            self._walked[key] = walked


def has_repeats(module: nn.Module) -> bool:
    """Return whether calls of a module are worth comparing."""
    return sum(any(True for _ in own_refs(inner)) for inner in module.modules()) >= _FEWEST_MODULES


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what arguments alike share: shapes, strides, and the values of plain data and of small masks and ids."""
    rest = tuple(None if _is_counters(value) else value for value in (*args, *kwargs.values()))
    leaves, structure = tree_flatten(rest)
    return str(structure), tuple(kwargs), *map(_leaf, leaves)


def storages_of(values: Any) -> dict[int, int]:
    """Return the bytes of the storages on the card in a tree, by id."""
    return {id(t.allocation): t.allocation.nbytes for t in tensors_in(values) if isinstance(t, SimTensor)}


def shapes_of(result: Any, came: Collection[int]) -> Any:
    """Return a result without its values, for `made_again`; None for what shapes do not tell.

    Its tensors have floating-point values and storages of their own, none of those that `came` with the call.
    """
    leaves, _ = tree_flatten(result)
    storages = set(came)
    for leaf in leaves:
        if isinstance(leaf, SimTensor):
            last = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
            whole = leaf.allocation.nbytes == (last + 1) * leaf.dtype.itemsize
            if not whole or not leaf.is_floating_point() or id(leaf.allocation) in storages:
                return None
            storages.add(id(leaf.allocation))
        elif not isinstance(leaf, _PLAIN):
            return None
    return tree_map_only(torch.Tensor, lambda leaf: _Shape(tuple(leaf.shape), leaf.stride(), leaf.dtype), result)


def made_again(shapes: Any) -> Any:
    """Return a result on the card of the present dry run."""

    def make(shape: _Shape) -> torch.Tensor:
        return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=DEVICE)

    return tree_map_only(_Shape, make, shapes)


def counters(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of numbers among the arguments, which a call may count up."""
    return [value for value in (*args, *kwargs.values()) if _is_counters(value)]


def contents(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return what the counters hold now."""
    return tuple(map(tuple, counters(args, kwargs)))


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _is_counters(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(item) is int for item in value)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (type(value), value) if isinstance(value, _PLAIN) else id(value)
    raw = value.raw if isinstance(value, SimTensor) else value
    known = not raw.is_meta and not raw.is_floating_point() and raw.numel() <= _COMPARED_ELEMENTS
    return tuple(raw.shape), raw.stride(), raw.dtype, tuple(raw.flatten().tolist()) if known else None


def _built(module: nn.Module) -> Any:
    """Return what modules built alike share: the classes of all inside, and their weights' shapes."""
    return tuple(
        (path, type(inner), tuple((ref.key, tuple(ref.tensor.shape), ref.tensor.dtype) for ref in own_refs(inner)))
        for path, inner in module.named_modules()
    )


def _state(module: nn.Module) -> tuple[Any, ...]:
    """Return what the modules inside keep beside weights, such as strides, flags and cached tensors."""
    return tuple(
        (name, _kept(value))
        for inner in module.modules()
        for name, value in vars(inner).items()
        if name not in _OF_TORCH
    )


def _kept(value: Any, within: bool = True) -> Any:
    if isinstance(value, torch.Tensor):
        return _leaf(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (list, tuple, set):
        return type(value), *(_kept(item, within) for item in value)
    if type(value) is dict:
        return tuple((_kept(name, within), _kept(item, within)) for name, item in value.items())
    if not hasattr(value, "__dict__"):
        return id(value)
    return type(value), tuple((name, _kept(item, False)) for name, item in vars(value).items() if within)
