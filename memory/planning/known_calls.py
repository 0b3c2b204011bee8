"""The known calls of a module: the results of dry runs, so that each kind of call is run on shapes only once.

They are saved as plain data, and read again in later processes. Calls of the same kind with other numbers of tokens are
interpolated.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from ..simulated.tensor import SimTensor, wrap
from .forecast import HeldBytes, ModuleOperations, Operations, operations_from

_APART = 64  # tokens: the largest gap between two known calls across which others are interpolated


@dataclass(frozen=True)
class Leaf:
    """A tensor of a result: a view of one of its storages, with `offset` and `stride` in elements.

    `value` is that of all elements of an integer or boolean tensor with a storage of its own, such as a mask of ones.
    None where they differ or are not known.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    value: int | None = None


_OBJECT = Leaf(-1, 0, (), (), "uint8")  # stands for a value that is neither a tensor nor plain data


@dataclass(frozen=True)
class Given:
    """The result of a call: a tree of plain values and of tensors, which have no contents but for a `Leaf.value`.

    `structure` is the serialized tree. The tensors are views of `storages`, given by their bytes. A leaf that is
    neither a tensor nor plain is replaced by a tensor that holds as many bytes, or by None.
    """

    structure: str
    storages: tuple[int, ...]
    leaves: tuple[Leaf | str | int | float | bool | None, ...]

    @classmethod
    def of(cls, result: Any) -> Given:
        """Return the record of a result. Raises RuntimeError for a tensor that is not on the dry run's card."""
        found, structure = tree_flatten(result)
        views = Counter(leaf.untyped_storage()._cdata for leaf in found if isinstance(leaf, SimTensor))
        places: dict[int, int] = {}
        storages: list[int] = []
        leaves: list[Any] = []
        for leaf in found:
            if isinstance(leaf, SimTensor):
                storage = leaf.untyped_storage()
                if places.setdefault(storage._cdata, len(places)) == len(storages):
                    storages.append(storage.nbytes())
                raw, dtype = leaf.raw, str(leaf.dtype).removeprefix("torch.")
                value = _value_of(raw) if views[storage._cdata] == 1 else None
                place = places[storage._cdata], int(raw.storage_offset())
                leaves.append(Leaf(*place, tuple(raw.shape), tuple(raw.stride()), dtype, value))
            elif isinstance(leaf, torch.Tensor):
                raise RuntimeError("the module gives a tensor that is not on its device")
            else:
                leaves.append(
                    leaf if isinstance(leaf, str | int | float | bool | None) else Leaf(-1, 0, (), (), "uint8")
                )
        return cls(treespec_dumps(structure), tuple(storages), tuple(leaves))

    def with_objects(self, nbytes: int) -> tuple[Given, int]:
        """Return the same record with `nbytes` held by its first leaf that is neither a tensor nor plain.

        Other such leaves become None. The second value is the bytes that no leaf can hold: `nbytes` if there is no such
        leaf, else 0.
        """
        leaves = list(self.leaves)
        objects = [i for i, leaf in enumerate(leaves) if leaf == _OBJECT]
        for i in objects:
            leaves[i] = None
        if not objects or not nbytes:
            return replace(self, leaves=tuple(leaves)), nbytes
        leaves[objects[0]] = Leaf(len(self.storages), 0, (nbytes,), (1,), "uint8")
        return replace(self, leaves=tuple(leaves), storages=(*self.storages, nbytes)), 0

    def make(self) -> Any:
        """Return the result again, as tensors on the card of a dry run."""
        leaves: list[Any] = []
        with _disable_current_modes():  # in the dry run's mode small tensors would get values
            made = [torch.empty(size, dtype=torch.uint8, device="meta") for size in self.storages]
            for leaf in self.leaves:
                if isinstance(leaf, Leaf):
                    dtype, place = getattr(torch, leaf.dtype), (leaf.shape, leaf.stride, leaf.offset)
                    if leaf.value is not None:
                        count = self.storages[leaf.storage] // dtype.itemsize
                        leaves.append(wrap(torch.full((count,), leaf.value, dtype=dtype).as_strided(*place)))
                        continue
                    raw = torch.empty(0, dtype=dtype, device="meta")
                    storage = made[leaf.storage].untyped_storage()
                    leaves.append(wrap(raw.set_(storage, leaf.offset, leaf.shape, leaf.stride)))
                else:
                    leaves.append(leaf)
        return tree_unflatten(leaves, treespec_loads(self.structure))


@dataclass(frozen=True)
class Call:
    """One kind of call. Bytes are on top of those held when it began.

    `peak_bytes` is its peak, `left_bytes` is what the module keeps afterwards, and `given` is its result. For the other
    fields see `UnitForecast`.
    """

    peak_bytes: int
    left_bytes: int
    operations: Operations
    given: Given
    modules: ModuleOperations = ()
    whole: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    held: HeldBytes = ()


def kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, int]:
    """Return the kind of a call, and its number of tokens, 0 if there is none.

    Calls of a kind differ in the number of tokens only. For ids and masks the kind ignores the values, except whether
    one of them is zero: without a zero, models leave the mask out.
    """
    leaves, structure = tree_flatten((args, kwargs))
    counts = {leaf.shape[-1] for leaf in leaves if _is_tokens(leaf)}
    tokens = counts.pop() if len(counts) == 1 else 0
    return json.dumps([str(structure), [_described(leaf, tokens) for leaf in leaves]]), tokens


def _is_tokens(value: Any) -> bool:
    """Return whether a value is a tensor of ids or a mask, with tokens in its last dimension."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.ndim > 1


def _described(value: Any, tokens: int) -> Any:
    """Return the part of a call's kind that one argument makes, as plain data."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str | int | float | bool | None) else str(type(value))
    if not _is_tokens(value):
        return [str(value.dtype), *value.shape]
    raw = value.raw if isinstance(value, SimTensor) else value
    return [str(value.dtype), *value.shape[: -1 if tokens else None], None if raw.is_meta else bool(raw.all())]


class KnownCalls:
    """The known calls of one module, by kind and number of tokens."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[int, Call]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def find(self, kind: str, tokens: int) -> Call | None:
        """Return the call of this kind with `tokens`; None if it is not known.

        An unknown number is interpolated between the next smaller and the next larger one, if these are at most 64
        tokens apart.
        """
        seen = self._calls.get(kind, {})
        if tokens in seen:
            return seen[tokens]
        fewer = max((count for count in seen if count < tokens), default=-math.inf)
        more = min((count for count in seen if count > tokens), default=math.inf)
        if more - fewer > _APART:
            return None
        return _between(seen[int(fewer)], seen[int(more)], tokens - int(fewer), int(more - fewer))

    def add(self, kind: str, tokens: int, call: Call) -> None:
        """Add a call, or replace the known one."""
        self._calls.setdefault(kind, {})[tokens] = call

    def to_dict(self) -> dict[str, Any]:
        """Return the calls as plain data, for a file."""
        return {kind: {str(n): asdict(call) for n, call in seen.items()} for kind, seen in self._calls.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KnownCalls:
        """Return the calls that `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        known = cls()
        for kind, seen in data.items():
            for tokens, facts in seen.items():
                known.add(kind, int(tokens), _call_from(facts))
        return known


def _call_from(facts: Mapping[str, Any]) -> Call:
    """Return a call from the plain data of a file. Raises KeyError, TypeError or ValueError for anything else."""
    numbers = {name: facts[name] for name in ("peak_bytes", "left_bytes")}
    storages = tuple(facts["given"]["storages"])
    if not all(type(n) in (int, float) and 0 <= n < math.inf for n in (*numbers.values(), *storages)):
        raise ValueError("a call has facts that are not numbers from 0 up")
    leaves = [_leaf_from(leaf) if isinstance(leaf, dict) else leaf for leaf in facts["given"]["leaves"]]
    given = Given(facts["given"]["structure"], storages, tuple(leaves))
    try:
        expected = treespec_loads(given.structure).num_leaves
    except Exception as error:  # torch raises many kinds, for text that is no structure or names an unknown class
        raise ValueError("a call has a result of an unknown structure") from error
    if len(leaves) != expected or not _has_room(given):
        raise ValueError("a call has tensors that have no room")
    return Call(**numbers, given=given, **operations_from(facts))


def _leaf_from(facts: Mapping[str, Any]) -> Leaf:
    """Return a leaf from the plain data of a file."""
    shape, stride = tuple(map(int, facts["shape"])), tuple(map(int, facts["stride"]))
    value = facts["value"]
    return Leaf(int(facts["storage"]), int(facts["offset"]), shape, stride, str(facts["dtype"]), value and int(value))


def _has_room(given: Given) -> bool:
    """Return whether every tensor of a result lies within its storage."""
    for leaf in given.leaves:
        if not isinstance(leaf, Leaf):
            continue
        dtype = getattr(torch, leaf.dtype, None)
        if not isinstance(dtype, torch.dtype) or not 0 <= leaf.storage < len(given.storages):
            return False
        last = leaf.offset + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))
        if 0 not in leaf.shape and (last + 1) * dtype.itemsize > given.storages[leaf.storage]:
            return False
    return True


def _between(fewer: Call, more: Call, part: int, whole: int) -> Call | None:
    """Return the call that lies `part` of `whole` tokens from `fewer` to `more`; None if the two are not alike.

    Its bytes are never below the truth. A peak is the largest of sums that grow with the tokens and with their square.
    That is a convex function, which never exceeds its chord.
    """
    gave = fewer.given, more.given
    alike = [(given.structure, len(given.storages), [_rank(leaf) for leaf in given.leaves]) for given in gave]
    paths = [[path for path, _ in call.modules] for call in (fewer, more)]
    if alike[0] != alike[1] or paths[0] != paths[1]:
        return None

    def chord(low: int, high: int) -> int:
        return low - (low - high) * part // whole if high < low else low + -(-(high - low) * part // whole)

    def chords(low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        return tuple(chord(a, b) for a, b in zip(low, high, strict=True))

    leaves: list[Any] = []
    for low, high in zip(gave[0].leaves, gave[1].leaves, strict=True):
        if isinstance(low, Leaf) and isinstance(high, Leaf):
            shape, stride = chords(low.shape, high.shape), chords(low.stride, high.stride)
            leaves.append(replace(low, offset=chord(low.offset, high.offset), shape=shape, stride=stride))
        else:
            leaves.append(low)
    given = Given(gave[0].structure, chords(gave[0].storages, gave[1].storages), tuple(leaves))
    share, held = part / whole, dict(more.held)
    call = Call(
        peak_bytes=chord(fewer.peak_bytes, more.peak_bytes),
        left_bytes=chord(fewer.left_bytes, more.left_bytes),
        operations=fewer.operations + (more.operations - fewer.operations) * share,
        modules=tuple((p, a + (b - a) * share) for (p, a), (_, b) in zip(fewer.modules, more.modules, strict=True)),
        whole=tuple({*fewer.whole, *more.whole}),
        outside=tuple({*fewer.outside, *more.outside}),
        held=tuple((path, chord(nbytes, held[path])) for path, nbytes in fewer.held if path in held),
        given=given,
    )
    return call if _has_room(given) else None


def _rank(leaf: Any) -> Any:
    """Return what two leaves must share for their calls to be interpolated."""
    return [leaf.storage, leaf.dtype, leaf.value, len(leaf.shape)] if isinstance(leaf, Leaf) else leaf


def _value_of(raw: torch.Tensor) -> int | None:
    """Return the one value of all elements of an integer or boolean tensor, None if there is no such."""
    if raw.is_meta or raw.is_floating_point() or raw.is_complex() or not raw.numel():
        return None
    with _disable_current_modes():
        first = raw.flatten()[0]
        return int(first) if bool((raw == first).all()) else None
