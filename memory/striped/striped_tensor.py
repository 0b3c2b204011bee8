"""`StripedTensor`: the wrapper that a module is given in place of a real tensor, with a `LazyTensor` inside."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import is_out_of_memory
from . import layers as layers
from . import pointwise as pointwise
from . import reshapes as reshapes
from . import striped_attention as striped_attention
from .arena import Buffer, StripeMemory
from .chunked_calls import NotStripedError, handlers
from .lazy_tensor import LazyTensor, materialized_tensor
from .materialize import to_device, to_host
from .views import replaced

log = logging.getLogger("ballast")

_FACTS = (
    "shape ndim dtype device layout is_meta is_cuda is_cpu is_sparse is_quantized is_nested requires_grad grad grad_fn "
    "is_leaf names size dim numel nelement stride element_size is_floating_point is_complex is_contiguous __len__ "
    "get_device is_inference __hash__ storage_offset ndimension"
)
_VIEWS = (
    "permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze expand narrow select split chunk unbind "
    "__getitem__ view reshape unflatten flatten detach split_with_sizes tensor_split view_as reshape_as T mT"
)
_COPY_NAMES = (
    "clone",
    "pad",
    "div",
    "true_divide",
    "divide",
    "__truediv__",
)  # their result is another tensor even if the handler returns the same lazy one
_FACT_NAMES, _VIEW_NAMES = frozenset(_FACTS.split()), frozenset(_VIEWS.split())
_ANY_PLACE = frozenset((*pointwise.ELEMENT, "to", "type_as"))  # their first argument need not be the lazy tensor
_LEAST_DIMS = 3  # results with fewer dimensions are small, and stay real tensors


class StripedTensor(torch.Tensor):
    """A tensor whose elements are made stripe by stripe when read. `__torch_function__` sends calls to `handlers`."""

    node: LazyTensor
    family: weakref.WeakSet[Any]  # the tensors that as real ones would share memory with this one

    @staticmethod
    def __new__(cls: type, node: LazyTensor, family: Any = None) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, node.shape, dtype=node.dtype, device=node.arena.device
        )
        made._is(node)
        made.family = weakref.WeakSet() if family is None else family
        made.family.add(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if name in _FACT_NAMES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "data":
            return args[0]
        if name in ("T", "mT"):
            return args[0].transpose(-1, -2)
        if name == "__setitem__":
            return _set_item(*args)
        if name == "copy_":
            return args[0]._become(args[1].node) if isinstance(args[1], StripedTensor) else _whole(func, args, kwargs)
        if name in ("cpu", "__repr__", "__format__", "tolist", "item", "__bool__", "numpy"):
            real = to_host(args[0].node)
            return real if name == "cpu" else func(real, *args[1:], **kwargs)
        in_place = (name.endswith("_") and not name.endswith("__")) or kwargs.pop("inplace", False) is True
        if name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"):
            in_place, name = True, f"__{name[3:]}"
        if name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        result = _called(
            getattr(torch.Tensor, name) if in_place and func.__name__ != name else func, name, args, kwargs
        )
        if in_place:
            return args[0]._become(result)
        copies = name in _COPY_NAMES or kwargs.get("copy", False)
        return _wrapped(
            result, args[0].family if name in _VIEW_NAMES else None, args[0] if args and not copies else None
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"{func} reached a striped tensor below torch's own functions.")

    def _become(self, node: Any) -> StripedTensor:
        """Take another lazy tensor's values, as an in-place operation does. Raises RuntimeError if there are views."""
        if len(self.family) > 1:
            raise RuntimeError("a striped tensor cannot be changed in place while there are views of it.")
        if not isinstance(node, LazyTensor) or node.shape != self.node.shape:
            raise RuntimeError("an operation in place must leave a striped tensor's shape as it is.")
        self._is(node)
        return self

    def _is(self, node: LazyTensor) -> None:
        self.node = node
        node.holders.append(weakref.ref(self))


def striped(tensor: torch.Tensor, arena: StripeMemory, axis: int = -2) -> StripedTensor:
    """Return a striped tensor of a real one, on the device or in RAM, with rows along `axis`. It is not copied."""
    on_device = tensor.device == arena.device
    return StripedTensor(materialized_tensor(arena, tensor, axis % tensor.dim(), Buffer(arena, tensor, on_device)))


def _called(function: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
    """Return the lazy tensor or tensors that a call gives.

    When memory runs out, the call is made once more with a lower budget. Tensors materialized by then stay so.
    """
    try:
        return _answered(function, name, args, kwargs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _arena(args, kwargs).ran_out(error)
    return _answered(function, name, args, kwargs)


def _answered(function: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        given = _nodes(args), {key: _nodes(value) for key, value in kwargs.items()}
        try:
            handler = handlers.get(name)
            first = given[0][0] if given[0] else None
            if handler is None or (isinstance(first, torch.Tensor) and name not in _ANY_PLACE):
                raise NotStripedError
            return handler(function, *given[0], **given[1])
        except NotStripedError:
            log.debug("Ballast: %s is done on a whole map", name)
    return _whole(function, args, kwargs)


def _nodes(value: Any) -> Any:
    """Return a tree of arguments with the lazy tensor in place of each striped one. Torch's own `tree_map` is slow."""
    kind = type(value)
    if kind is StripedTensor:
        return value.node
    return kind(map(_nodes, value)) if kind is tuple or kind is list else value


def _arena(args: tuple, kwargs: dict) -> StripeMemory:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StripedTensor)).node.arena


def _whole(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call a function on whole, real tensors on the device. Large results become lazy tensors."""
    arena = _arena(args, kwargs)
    real_args, real_kwargs = tree_map_only(StripedTensor, lambda tensor: to_device(tensor.node), (args, kwargs))
    result = function(*real_args, **real_kwargs)

    def as_lazy(tensor: torch.Tensor) -> Any:
        if tensor.dim() < _LEAST_DIMS or tensor.device.type != arena.device.type:
            return tensor
        return materialized_tensor(arena, tensor, tensor.dim() - 2, Buffer(arena, tensor, True))

    return tree_map_only(torch.Tensor, as_lazy, result)


def _set_item(target: Any, index: Any, value: Any) -> None:
    if not isinstance(target, StripedTensor):
        target[index] = to_device(value.node)
        return
    node = value.node if isinstance(value, StripedTensor) else value
    try:
        target._become(replaced(target.node, index, node))
    except NotStripedError:
        whole = to_device(target.node).clone()
        whole[index] = to_device(node) if isinstance(node, LazyTensor) else node
        target._become(
            materialized_tensor(target.node.arena, whole, target.node.axis, Buffer(target.node.arena, whole, True))
        )


def _wrapped(result: Any, family: Any, first: Any) -> Any:
    if isinstance(result, LazyTensor):
        return first if isinstance(first, StripedTensor) and first.node is result else StripedTensor(result, family)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(item, family, None) for item in result)
    return result
