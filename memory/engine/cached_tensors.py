"""Tensors that a run left on the device, outside of the module's parameters and buffers."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Mapping
from types import CellType, ModuleType
from typing import Any

import torch
from torch import nn

_LruCache = type(functools.lru_cache(len))


def clear_cached_tensors(module: nn.Module, device: torch.device) -> None:
    """Move tensors that a run has cached on the device to the host, and clear `functools.lru_cache`s.

    Models keep tensors in lists, deques, dicts and plain objects: rotary tables, the feature caches of causal VAEs.
    `module.to()` finds none of them. `Placement.remove` calls this, so that nothing of the unit stays on the device.
    """
    if callable(clear := getattr(module, "clear_cache", None)):
        clear()
    for cls in {cls for owner in module.modules() for cls in type(owner).__mro__}:
        if not cls.__module__.startswith(("torch.", "builtins")):
            _clear_function_caches(vars(cls))
            _clear_function_caches(vars(sys.modules.get(cls.__module__, object)))
    seen: set[int] = set()
    for owner in module.modules():
        for name, value in vars(owner).items():
            if not name.startswith(("_parameters", "_buffers", "_modules")):
                moved = _to_host(value, device, seen)
                if moved is not value:
                    vars(owner)[name] = moved


def _clear_function_caches(namespace: Mapping[str, Any]) -> None:
    """Clear the `functools.lru_cache` functions in a namespace, decorated ones included."""
    for function in list(namespace.values()):
        # A decorator outside of `lru_cache` hides the cached function in its closure. Empty cells raise when read.
        cells = [cell for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
        for cached in (function, *(cell.cell_contents for cell in cells)):
            if isinstance(cached, _LruCache):
                cached.cache_clear()


def _to_host(value: Any, device: torch.device, seen: set[int]) -> Any:
    """Return `value` with every tensor on `device` replaced by its host copy; the same object where it could be kept.

    Entries of a dict under a key that names the device are removed: the model would take the host copy for one on it.
    """
    if isinstance(value, torch.Tensor):
        return value.cpu() if value.device == device else value
    # `seen`: objects may refer to each other in circles. Modules are visited by the caller.
    if id(value) in seen or isinstance(value, nn.Module | type | ModuleType):
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        items = [_to_host(item, device, seen) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            if _names(value, device):
                return None
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, dict | list | deque):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            moved = _to_host(item, device, seen)
            if moved is not item and isinstance(value, dict) and _names(key, device):
                del value[key]
            elif moved is not item:
                value[key] = moved
    elif hasattr(value, "__dict__"):
        _to_host(vars(value), device, seen)
    return value


def _names(key: Any, device: torch.device) -> bool:
    """Return whether a key, or a part of a tuple, names the device."""
    if isinstance(key, tuple):
        return any(_names(part, device) for part in key)
    return isinstance(key, torch.device | str) and str(key) == str(device)
