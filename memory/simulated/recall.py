"""A cache of the shapes of results: steps and blocks repeat the same calls, and torch's shape functions are slow.

The result of an operator on `meta` tensors depends only on their shapes, strides and dtypes, its other arguments and
torch's default dtype. Torch's FakeTensorMode has a cache for the same reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_MOST = 2**14  # entries; a full cache is cleared

_found: dict[Any, Any] = {}


class _Made(NamedTuple):
    """The recipe of a tensor that an operator made, with its own storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _UnfitError(Exception):
    """A call that cannot be cached."""


def remembered(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return `func(*args, **kwargs)` for tensors on `meta`, from the cache if possible. Errors are not cached."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        named = tuple((name, _key(value)) for name, value in kwargs.items()) if kwargs else ()
        key = func, _key(args), named, torch.get_default_dtype()
        recipe = _found.get(key)
    except (_UnfitError, TypeError):
        return func(*args, **kwargs)
    if recipe is not None:
        return _make(recipe)
    result = func(*args, **kwargs)
    try:
        recipe = _recipe(result, [])
    except _UnfitError:
        return result
    if not _shares(result, (args, kwargs.values())):
        if len(_found) >= _MOST:
            _found.clear()
        _found[key] = recipe
    return result


@functools.cache
def _makes_new(func: Any) -> bool:
    """Return whether an operator's results have storages of their own. Views are made quickly."""
    return not func._schema.is_mutable and not any(value.alias_info for value in func._schema.returns)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or not value.is_meta or value.is_conj() or value.is_neg():
            raise _UnfitError
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value  # True, 1 and 1.0 are equal, and promote differently


def _recipe(result: Any, storages: list[int]) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_recipe(item, storages) for item in result)
    if type(result) is not torch.Tensor:
        raise _UnfitError
    made = _Made(result.shape, result.stride(), result.dtype)
    storage, last = result.untyped_storage(), sum((size - 1) * step for size, step in zip(*made[:2], strict=True))
    whole = storage.nbytes() == (last + 1 if result.numel() else 0) * made.dtype.itemsize
    if not result.is_meta or result.is_conj() or result.is_neg() or not whole or storage._cdata in storages:
        raise _UnfitError
    storages.append(storage._cdata)
    return made


def _make(recipe: Any) -> Any:
    if type(recipe) is _Made:
        return torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
    return type(recipe)(map(_make, recipe))


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        return set()
    return set().union(*map(_storages, value))


def _shares(result: Any, given: Any) -> bool:
    return bool(_storages(result) & _storages(given))
