"""Tensors of the simulated accelerator: a CPU tensor inside a wrapper that says it is on `sim:0`.

Every operator on such a tensor arrives at `__torch_dispatch__`, runs as a CPU kernel on the tensors inside,
and its new storages are charged to the card. Temporary memory inside one CPU kernel is not seen. Limits: an
in-place operator must not change a tensor's shape (`resize_`, `unsqueeze_`, ...); `cpu_parameter.data =
sim_tensor` is refused by torch; `Module.to` is refused for parameters that something else holds on to (a weak
reference, a view, an autograd graph); `untyped_storage()` is the CPU storage inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import card as state
from .clock import current_stream
from .lazy import copies

Handler = Callable[[Any, tuple, dict], Any]

_MARK = "_ballast_allocation"
_make = torch.Tensor._make_wrapper_subclass


class _Handlers(dict[Any, Handler]):
    """The handler of each operator, made by `plan` (set by `dispatch`) when it is first called."""

    plan: Callable[[Any], Handler]

    def __missing__(self, func: Any) -> Handler:
        self[func] = self.plan(func)
        return self[func]


handlers = _Handlers()


class SimTensor(torch.Tensor):
    """A tensor on `sim:0`. `raw` is the CPU tensor with the data, `allocation` the charged bytes of its storage."""

    raw: torch.Tensor
    allocation: state.Allocation

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, requires_grad: bool = False, **_: Any) -> Any:
        """Return a Parameter: code that calls `type(parameter)(data, requires_grad=...)` wants to re-create one."""
        # Parameters on the device are SimTensors by type, so this must serve data on any device.
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return handlers[func](func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # Module.to() keeps a parameter the same object, and so shared ones shared, if it can set `data` or, on
    # the way to the device, swap tensors. It does the latter for classes that have these two methods.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> SimTensor:
        return wrap(inner["raw"])

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """A tensor of the same storage without history. May be set to a tensor on any device."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        is_param = getattr(self, "_is_param", False)
        torch.utils.swap_tensors(self, _dressed(value.detach(), self.requires_grad, is_param))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.raw).replace(", device='meta'", "")
        text = f"{text[:-1]}, device='{self.device}'"
        return text + (", requires_grad=True)" if self.requires_grad else ")")

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.clone()
            memo[id(self)] = _dressed(copy, self.requires_grad, getattr(self, "_is_param", False))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.detach().cpu(), self.requires_grad, getattr(self, "_is_param", False))


def _dressed(tensor: torch.Tensor, requires_grad: bool, is_param: bool) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad) if is_param else tensor.requires_grad_(requires_grad)


def _restored(data: torch.Tensor, requires_grad: bool, is_param: bool) -> torch.Tensor:
    return _dressed(data.to("sim"), requires_grad, is_param)


def wrap(raw: torch.Tensor, charge: Callable[[int], state.Allocation] | None = None) -> SimTensor:
    """Return `raw` as a tensor of the device.

    Its storage is charged by `charge(nbytes)`, by default `card.allocate`, unless it is charged already. Raises
    torch.OutOfMemoryError if it does not fit.
    """
    storage = raw.untyped_storage()
    mark = getattr(storage, _MARK, None)
    allocation = mark and mark()
    if allocation is None:
        allocation = (charge or state.card.allocate)(storage.nbytes())
        setattr(storage, _MARK, weakref.ref(allocation))
        if copies.queued:
            copies.given(allocation, storage, current_stream().tail)
    device, strides, offset = state.card.device, raw.stride(), raw.storage_offset()
    if torch.is_inference_mode_enabled() and not raw.is_inference():
        # A view of a tensor from outside inference mode is an ordinary tensor too, and torch relies on that.
        with torch.inference_mode(False):
            tensor = _make(SimTensor, raw.shape, strides, offset, None, raw.dtype, device=device)
    else:
        tensor = _make(SimTensor, raw.shape, strides, offset, None, raw.dtype, device=device)
    tensor.raw = raw
    tensor.allocation = allocation
    return tensor


def wrap_all(result: Any) -> Any:
    """Return an operator's result with each tensor in it wrapped as one of the device."""
    if isinstance(result, torch.Tensor):
        return wrap(result)
    if isinstance(result, (tuple, list)):
        return type(result)(wrap_all(item) for item in result)
    return result


def raw_of(value: Any, func: Any) -> Any:
    """Return an argument of `func` with raw tensors. Raises RuntimeError for others, except scalars on the CPU."""
    kind = type(value)
    if kind is SimTensor:
        return value.raw
    if kind is int or kind is float or value is None or kind is bool:
        return value
    if kind is list or kind is tuple:
        if value and type(value[0]) is int:
            return value
        return [raw_of(item, func) for item in value]
    if isinstance(value, torch.Tensor) and (value.dim() or value.device.type != "cpu"):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{state.card.device} and {value.device}! (in {func})"
        )
    return value
