"""Operators on tensors of which only some have values, for the dry run of a model without its weights.

Small tensors keep their values for as long as these follow from values that are known (timesteps, masks, token ids).
Large ones, and all that was computed from a tensor without values, are raw tensors on `meta`: shape, strides and
dtype. The host may ask for floating values that are not known and gets zeros; asking for other ones is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from .recall import remembered

_PLAIN = frozenset((int, float, bool, type(None), torch.dtype))  # to ask whether one is a tensor takes long
KEPT_BYTES = 4 * 2**20  # storages up to this size keep their values


def run(func: Any, raws: Any, kwargs: dict) -> Any:
    """Run an operator with values if all of its tensors have them, else on shapes."""
    if not any(map(_unknown, raws)) and not any(map(_unknown, kwargs.values())):
        return _shed(func(*raws, **kwargs))
    kwargs = {key: _shape_of(value) for key, value in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = "meta"
    try:
        return remembered(func, tuple(map(_shape_of, raws)), kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower() or "data-dependent" in str(error).lower():
            raise _no_value(func) from error
        raise


def make(func: Any, args: Any, kwargs: dict) -> torch.Tensor:
    """Run an operator without tensor arguments, such as `zeros`. A result above `KEPT_BYTES` has no values."""
    raw = func(*args, **{**kwargs, "device": "meta"})
    if raw.untyped_storage().nbytes() > KEPT_BYTES:
        return raw
    return func(*args, **{**kwargs, "device": "cpu"})


def moved(source: torch.Tensor) -> torch.Tensor:
    """Return the raw device tensor of a host tensor: a copy, or its shape if above `KEPT_BYTES`."""
    return _shape_of(source) if source.untyped_storage().nbytes() > KEPT_BYTES else source.clone()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values if both sides have them. Raises RuntimeError if the host would read unknown integers."""
    if source.is_meta and not target.is_meta:
        if not _is_measure(source):
            raise _no_value(torch.ops.aten.copy_)
    elif not target.is_meta:
        target.copy_(source)


def valued(raw: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or zeros on the CPU for floats without values. Raises RuntimeError for other dtypes."""
    if not raw.is_meta:
        return raw
    if not _is_measure(raw):
        raise _no_value(torch.ops.aten._to_copy)
    return torch.zeros(1, dtype=raw.dtype).expand(raw.shape)


def known(raw: torch.Tensor, func: Any) -> torch.Tensor:
    """Return the tensor. Raises RuntimeError if it has no values."""
    if raw.is_meta:
        raise _no_value(func)
    return raw


def _is_measure(raw: torch.Tensor) -> bool:
    # Code does not branch on floats, but it may on integers and booleans.
    return raw.is_floating_point() or raw.is_complex()


def _unknown(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return False
    if kind is list or kind is tuple:
        return any(map(_unknown, value))
    return isinstance(value, torch.Tensor) and value.is_meta


def _shape_of(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return [_shape_of(item) for item in value]
    if isinstance(value, torch.Tensor) and not value.is_meta and value.dim():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _shed(result: Any) -> Any:
    """Return a result without the values of tensors above `KEPT_BYTES`."""
    if isinstance(result, (list, tuple)):
        return type(result)(_shed(item) for item in result)
    if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() > KEPT_BYTES:
        return _shape_of(result)
    return result


def _no_value(func: Any) -> RuntimeError:
    return RuntimeError(f"{func} needs the values of a tensor, and in a dry run this one has none")
