"""Structures of modules that were built once, and copies of them.

A plan opens each model several times, for its stages, its proofs and its weights, and constructors took half of its
time: they make thousands of modules one by one, and some make tables of positions that the files hold anyway.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ...memory.weights.structure import empty_on_meta, modules_in

_MOST = 16  # structures that are kept: of two pipelines, at some 10 MB for a large model
_TABLE_BYTES = 2**20  # from this size on, a buffer is not copied: copies share it while any module holds it
_PLAIN = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device, torch.Size)


class _Kept:
    """A structure without its tables, which it only knows while a module somewhere holds them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copied(module)
        self._tables: list[tuple[dict[str, Any], str, weakref.ref[torch.Tensor]]] = []
        for owner in modules_in(self._module):
            for key, tensor in owner._buffers.items():
                if tensor is not None and _is_table(tensor):
                    self._tables.append((owner._buffers, key, weakref.ref(tensor)))
        for buffers, key, _ in self._tables:
            buffers[key] = None

    def copy(self) -> nn.Module | None:
        """Return a copy, or None where a table is gone."""
        tables = [table() for _, _, table in self._tables]
        if any(table is None for table in tables):
            return None
        try:
            for (buffers, key, _), table in zip(self._tables, tables, strict=True):
                buffers[key] = table
            return copied(self._module)
        finally:
            for buffers, key, _ in self._tables:
                buffers[key] = None


_built: OrderedDict[Hashable, _Kept] = OrderedDict()  # the latest at the end
_lock = threading.Lock()


def built(key: Hashable, build: Callable[[], nn.Module]) -> nn.Module:
    """Return what `build` returns, or a copy of what it returned for an equal `key`.

    `key` must tell all that the structure and the values of its buffers follow from.
    """
    with _lock:
        kept = _built.get(key)
        if module := kept and kept.copy():
            _built.move_to_end(key)
            return module
    module = build()
    if can_be_copied(module):
        with _lock:
            _built[key] = _Kept(module)
            while len(_built) > _MOST:
                _built.popitem(last=False)
    return module


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module that `can_be_copied`, which shares nothing with it but its tables and its code.

    As `copy.deepcopy`, in a fraction of its time, and with what a tensor has besides its values.
    """
    memo: dict[int, Any] = {}
    owners = list(modules_in(module))
    for owner in owners:
        memo[id(owner)] = type(owner).__new__(type(owner))
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None and id(tensor) not in memo:  # tied ones stay tied
                memo[id(tensor)] = _copied_tensor(tensor)
    for owner in owners:
        twin = vars(memo[id(owner)])
        for key, value in vars(owner).items():
            if isinstance(value, _PLAIN):
                twin[key] = value
            elif key in ("_parameters", "_buffers", "_modules"):
                twin[key] = type(value)(
                    (name, each if each is None else memo[id(each)]) for name, each in value.items()
                )
            elif isinstance(value, dict | set) and not value:
                twin[key] = type(value)()
            else:
                twin[key] = copy.deepcopy(value, memo)
    return memo[id(module)]  # type: ignore[no-any-return]


def can_be_copied(module: nn.Module) -> bool:
    """Return whether a copy is as good as a module that is built anew.

    It is not where something refers to the module in a way that `copy.deepcopy` hands on as it is: functions that
    enclose values, and weak references. Nor where a tensor was computed from weights, as by `weight_norm`.
    """
    return not any(_hands_on(value) for owner in modules_in(module) for value in vars(owner).values())


def _hands_on(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, dict):
        return any(_hands_on(each) for each in value.values())
    if isinstance(value, list | tuple | set):
        return any(_hands_on(each) for each in value)
    if isinstance(value, functools.partial):
        return any(map(_hands_on, (value.func, value.args, value.keywords)))
    if isinstance(value, torch.Tensor):
        return not value.is_leaf
    return isinstance(value, weakref.ref) or (isinstance(value, types.FunctionType) and value.__closure__ is not None)


def _is_table(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.nbytes >= _TABLE_BYTES


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if _is_table(tensor) and not isinstance(tensor, nn.Parameter):
        return tensor
    twin = empty_on_meta(tensor) if tensor.is_meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin
