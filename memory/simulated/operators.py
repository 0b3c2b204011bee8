"""What sees each operator, without taking longer than the operators do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, type(None))
_SEARCHED: dict[type, Any] = {torch.Tensor: torch.Tensor, tuple: (tuple, list), dict: dict, object: object}


class Uncompiled(TorchDispatchMode):
    """A mode for code that is not compiled meanwhile: torch need not guard each call of it, which takes as long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Observer:
    """Sees each operator that the code of a dry run calls, but not those that an operator is made of."""

    def before(self, given: list[torch.Tensor]) -> None:
        """Take the tensors that an operator is about to read."""

    def after(self, func: Any, args: tuple, kwargs: dict, given: list[torch.Tensor], result: Any) -> None:
        """Take a call of an operator and its result. `given` are all tensors among its arguments."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of arguments. Operators are called by the thousand, and torch's own is slow."""
    found: list[torch.Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        kind = _kinds[type(value)]
        if kind is torch.Tensor:
            found.append(value)
        elif kind is tuple:
            _collect(value, found)
        elif kind is dict:
            _collect(value.values(), found)
        elif kind is object:
            found += (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


class _Kinds(dict[Any, Any]):
    """How values of a class are searched: as `Tensor`, `tuple`, `dict` or `object`; None for plain ones."""

    def __missing__(self, cls: type) -> type | None:
        kinds = (kind for kind in (torch.Tensor, tuple, dict, object) if issubclass(cls, _SEARCHED[kind]))
        self[cls] = None if issubclass(cls, _PLAIN) else next(kinds)
        return self[cls]


_kinds = _Kinds()  # `isinstance` asks the class of tensors, which is slow
