"""Modes that see each operator, without taking longer than the operators do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout)


class Uncompiled(TorchDispatchMode):
    """A mode for code that is not compiled meanwhile: torch need not guard each call of it, which takes as long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of arguments. Operators are called by the thousand, and torch's own is slow."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    if isinstance(values, torch.Tensor):
        found.append(values)
    elif values is None or isinstance(values, _PLAIN):
        return
    elif isinstance(values, tuple | list):
        for value in values:
            _collect(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            _collect(value, found)
    else:
        found += (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
