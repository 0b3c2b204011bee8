"""Tensors that have a shape and a device but no values, beside real ones in one run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only


class ShapedError(RuntimeError):
    """Code wanted a value that only has a shape, or wrote one to a real tensor."""


class Shaped(torch.Tensor):
    """A tensor that says it is on a device, and has a shape only. `meta` stands for it in operators."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls: type, meta: torch.Tensor, device: torch.device) -> Any:
        # A view of a tensor from outside inference mode is an ordinary tensor too, and torch relies on that.
        with torch.inference_mode(torch.is_inference_mode_enabled() and meta.is_inference()):
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                Shaped, meta.shape, meta.stride(), meta.storage_offset(), None, meta.dtype, device=device
            )
        made.meta = meta
        return made

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


def shaped_like(tensor: torch.Tensor, device: torch.device) -> Shaped:
    """Return a tensor on `device` with the shape alone."""
    return Shaped(_meta_of(tensor), device)


def shaped(values: Any, device: torch.device) -> Any:
    """Return a tree in which all tensors are new ones that have their shapes only, on `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: shaped_like(tensor, device), values)


# Tensors on the device that something without values was written to, by their storage, while a mode is on. Held here so
# that no other tensor gets the same storage.
_written: dict[int, torch.Tensor] = {}


def has_shaped(values: Any) -> bool:
    """Return whether a tree holds a tensor with a shape only."""
    return any(isinstance(value, torch.Tensor) and _is_shaped(value) for value in tree_iter(values))


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
        kwargs = kwargs or {}
        return _on_meta(func, args, kwargs) if has_shaped((args, kwargs)) else func(*args, **kwargs)


def _meta_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Shaped):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on shapes. Its result is on the device that it asks for, or on that of its arguments."""
    written = _targets(func, args, kwargs)
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.device) or has_shaped(value)]
    device = next(value if isinstance(value, torch.device) else value.device for value in sorted(given, key=_asks))
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
    if func._schema.name.startswith("aten::index"):
        args = tuple(_places(arg) if isinstance(arg, list | tuple) else arg for arg in args)
    wrappers: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        found = _meta_of(tensor)
        if isinstance(tensor, Shaped) or any(tensor is each for each in written):
            wrappers[id(found)] = tensor
        return found

    plain_args, plain_kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    try:
        result = func(*plain_args, **plain_kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise ShapedError(f"{func} has no result without values: {error}") from error
    if any(isinstance(each, Shaped) and each.shape != each.meta.shape for each in wrappers.values()):
        raise ShapedError(f"{func} changes a shape in place")
    _written.update((target.untyped_storage()._cdata, target) for target in written if not isinstance(target, Shaped))
    return tree_map_only(torch.Tensor, lambda t: wrappers[id(t)] if id(t) in wrappers else Shaped(t, device), result)


def _asks(value: torch.Tensor | torch.device) -> bool:
    """Return whether an argument only has a device, and does not ask for one."""
    return isinstance(value, torch.Tensor)


def _places(indices: Any) -> list:
    """Return indices with masks that have values as the places that they select, whose number is the result's size."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        found += index.nonzero(as_tuple=True) if is_mask and not isinstance(index, Shaped) else [index]
    return found


def _targets(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to. Raises ShapedError for one that the host can read as it is."""
    found: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and not isinstance(value, Shaped):
                raise ShapedError(f"{func} writes something made of latents to a tensor in RAM")
            found.append(value)
    return found
