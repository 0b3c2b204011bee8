"""Tensors that have a shape and a device but no values, beside real ones in one run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..simulated.recall import remembered

_META = torch.device("meta")


class ShapedError(RuntimeError):
    """Code wanted a value that only has a shape, or wrote one to a tensor in RAM."""


class Shaped(torch.Tensor):
    """A tensor that says it is on a device, and has a shape only. `meta` stands for it in operators."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls: type, meta: torch.Tensor, device: torch.device) -> Any:
        # A view of a tensor from outside inference mode is an ordinary tensor too, and torch relies on that.
        if torch.is_inference_mode_enabled() and not meta.is_inference():
            with torch.inference_mode(False):
                return _wrapped(meta, device)
        return _wrapped(meta, device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _on_meta(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        raise ShapedError("the model reads values that depend on the latents")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise ShapedError("the model reads values that depend on the latents")


def _wrapped(meta: torch.Tensor, device: torch.device) -> Shaped:
    made: Shaped = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        Shaped, meta.shape, meta.stride(), meta.storage_offset(), None, meta.dtype, device=device
    )
    made.meta = meta
    return made


def shaped_like(tensor: torch.Tensor, device: torch.device) -> Shaped:
    """Return a tensor on `device` with the shape alone."""
    return Shaped(_meta_of(tensor), device)


def shaped(values: Any, device: torch.device) -> Any:
    """Return a tree in which all tensors are new ones that have their shapes only, on `device`."""
    return _mapped(values, lambda tensor: shaped_like(tensor, device))


# Tensors on the device that something without values was written to, by their storage, while a mode is on. Held here so
# that no other tensor gets the same storage.
_written: dict[int, torch.Tensor] = {}


def has_shaped(value: Any) -> bool:
    """Return whether a tree holds a tensor with a shape only."""
    if isinstance(value, torch.Tensor):
        return _is_shaped(value)
    if isinstance(value, tuple | list):
        return any(map(has_shaped, value))
    if value is None or isinstance(value, int | float | str | torch.dtype | torch.device):
        return False
    if type(value) is dict:
        return any(map(has_shaped, value.values()))
    return any(isinstance(each, torch.Tensor) and _is_shaped(each) for each in tree_iter(value))


def _is_shaped(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, Shaped):
        return True
    return bool(_written) and not tensor.is_meta and tensor.untyped_storage()._cdata in _written


class ShapedMode(TorchDispatchMode):
    """A mode in which an operator that is given a `Shaped` gives one. All others run as they are.

    A tensor on the device that one is written to counts as one from then on, with all that share its storage. Raises
    ShapedError where code reads such a value.
    """

    _depth = 0

    def __enter__(self) -> ShapedMode:
        ShapedMode._depth += 1
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        ShapedMode._depth -= 1
        if not ShapedMode._depth:
            _written.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_shaped(args) or kwargs and has_shaped(kwargs):
            return _on_meta(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def _meta_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Shaped):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a tree with its tensors changed. Of the kinds that operators and modules take; others by pytree."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, int | float | str):
        return value
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    return tree_map_only(torch.Tensor, change, value)


def _on_meta(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on shapes. Its result is on the device that it asks for, or on that of its arguments."""
    written = _targets(func, args, kwargs)
    if func._schema.name.startswith("aten::index"):
        args = tuple(_places(arg) if isinstance(arg, list | tuple) else arg for arg in args)
    device: torch.device | None = None
    asked: torch.device | None = None
    wrappers: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal device
        found = _meta_of(tensor)
        if device is None and _is_shaped(tensor):
            device = tensor.device
        if isinstance(tensor, Shaped) or any(tensor is each for each in written):
            wrappers[id(found)] = tensor
        return found

    plain_args = _mapped(args, meta)
    plain_kwargs = {key: _mapped(value, meta) for key, value in kwargs.items() if key != "pin_memory"}
    if any(isinstance(each, torch.device) for each in (*plain_args, *plain_kwargs.values())):
        asked = next(each for each in (*plain_args, *plain_kwargs.values()) if isinstance(each, torch.device))
        plain_args = tuple(_META if isinstance(each, torch.device) else each for each in plain_args)
        plain_kwargs |= {key: _META for key, each in plain_kwargs.items() if isinstance(each, torch.device)}
    try:
        result = remembered(func, plain_args, plain_kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise ShapedError(f"{func} has no result without values: {error}") from error
    for target in written:
        if not isinstance(target, Shaped):
            _written[target.untyped_storage()._cdata] = target
        elif target.shape != target.meta.shape:
            raise ShapedError(f"{func} changes a shape in place")
    at = asked or device
    assert at is not None
    return _mapped(result, lambda tensor: wrappers[id(tensor)] if id(tensor) in wrappers else Shaped(tensor, at))


def _places(indices: Any) -> list:
    """Return indices with masks that have values as the places that they select, whose number is the result's size."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero(as_tuple=True) if is_mask and not _is_shaped(index) else [index]
    return found


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an operator writes to."""
    arguments = func._schema.arguments if func._schema.is_mutable else ()
    return tuple((at, each.name) for at, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write)


def _targets(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to. Raises ShapedError for one that the host can read as it is."""
    found: list[torch.Tensor] = []
    for at, name in _writes(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and not isinstance(value, Shaped):
                raise ShapedError(f"{func} writes something made of latents to a tensor in RAM")
            found.append(value)
    return found
