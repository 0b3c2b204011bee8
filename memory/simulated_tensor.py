"""Tensors of the simulated accelerator: a CPU tensor inside a wrapper that says it is on `sim:0`.

Every operator on such a tensor arrives at `__torch_dispatch__`, runs as a CPU kernel on the tensors inside, and its
new storages are charged to the card. Temporary memory inside one CPU kernel is not seen. Limits: an in-place
operator must not change a tensor's shape (`resize_`, `unsqueeze_`, ...); `cpu_parameter.data = sim_tensor` is refused
by torch; `untyped_storage()` is the CPU storage inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import simulated_card as state

Handler = Callable[[Any, tuple, dict], Any]

_aten = torch.ops.aten
_MARK = "_ballast_allocation"
_PINNED = "_ballast_pinned"
_make = torch.Tensor._make_wrapper_subclass
_device: torch.device | None = None  # "sim:0", once that name means something to torch


class SimTensor(torch.Tensor):
    """A tensor on `sim:0`: `raw` holds the data, `allocation` the bytes that its storage is charged for."""

    raw: torch.Tensor
    allocation: state.Allocation

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, requires_grad: bool = False, **_: Any) -> torch.Tensor:
        """What code means that re-creates a parameter as `type(parameter)(data, requires_grad=...)`."""
        # Parameters on the device are SimTensors by type, so this must serve data on any device.
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (_handlers.get(func) or _plan(func))(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> SimTensor:  # type: ignore[override]
        """The same storage without history; may be set to a tensor of the same shape, strides and dtype."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        same = type(value) is SimTensor and value.dtype == self.dtype and value.shape == self.shape
        if not same or value.stride() != self.stride() or value.storage_offset() != self.storage_offset():
            raise RuntimeError("sim: set .data to a sim tensor of the same layout, or replace the parameter itself")
        self.raw, self.allocation = value.raw, value.allocation

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:
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


def wrap(raw: torch.Tensor) -> SimTensor:
    """Put a tensor on the device, charging its storage unless that is charged already."""
    storage = raw.untyped_storage()
    allocation = getattr(storage, _MARK, None)
    if allocation is None:
        if raw.is_meta is not state.card.dry:
            raise RuntimeError("sim: a dry run and the world outside it cannot share tensors")
        allocation = state.card.allocate(storage.nbytes())
        setattr(storage, _MARK, allocation)
    tensor = _make(
        SimTensor, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=_device
    )
    tensor.raw = raw
    tensor.allocation = allocation
    return tensor


def _wrapped(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(item) for item in result)
    return result


def _raw(value: Any, func: Any) -> Any:
    """The tensors inside; raises RuntimeError for a tensor elsewhere, save a scalar on the CPU."""
    kind = type(value)
    if kind is SimTensor:
        return value.raw
    if kind is int or kind is float or value is None or kind is bool:
        return value
    if kind is list or kind is tuple:
        if value and type(value[0]) is int:
            return value
        return [_raw(item, func) for item in value]
    if isinstance(value, torch.Tensor) and (value.dim() or value.device.type != "cpu"):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{_device} and {value.device}! (in {func})"
        )
    return value


def _run(func: Any, raws: Any, kwargs: dict) -> Any:
    if not state.card.dry:
        return func(*raws, **kwargs)
    try:
        return func(*raws, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower():
            raise _no_data(func) from error
        raise


def _no_data(func: Any) -> RuntimeError:
    return RuntimeError(f"{func} needs the values of a tensor, and in a dry run tensors have none")


def _plain(func: Any, args: tuple, kwargs: dict) -> Any:
    raws = [_raw(arg, func) for arg in args]
    if kwargs:
        kwargs = {key: _raw(value, func) for key, value in kwargs.items()}
    result = _run(func, raws, kwargs)
    out = wrap(result) if isinstance(result, torch.Tensor) else _wrapped(result)
    if state.card.timed:
        _clock(func, args, out, ())
    return out


def _whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """A composite operator that is run as one; it may hand back its argument."""
    raws = [_raw(arg, func) for arg in args]
    result = _run(func, raws, {key: _raw(value, func) for key, value in kwargs.items()})
    if result is raws[0]:
        return args[0]
    out = _wrapped(result)
    if state.card.timed:
        _clock(func, args, out, ())
    return out


def _decomposed(func: Any, args: tuple, kwargs: dict) -> Any:
    return func.decompose(*args, **kwargs)


def _mutating(func: Any) -> Handler:
    """A handler for an operator that writes to arguments, as its schema says."""
    arguments = func._schema.arguments
    written = [(at, arg.name) for at, arg in enumerate(arguments) if arg.alias_info and arg.alias_info.is_write]

    def alias(value: Any) -> int | None:
        """Which of the written arguments a return value is."""
        info = value.alias_info
        if info is None:
            return None
        return next(n for n, (at, _) in enumerate(written) if arguments[at].alias_info.before_set == info.before_set)

    returned = [alias(value) for value in func._schema.returns]

    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written]
        for target in targets:
            if isinstance(target, torch.Tensor) and type(target) is not SimTensor:
                raise RuntimeError(f"{func} on {_device} cannot write to a tensor on {target.device}")
        raws = [_raw(arg, func) for arg in args]
        result = _run(func, raws, {key: _raw(value, func) for key, value in kwargs.items()})
        for target in targets:
            if type(target) is SimTensor and target.raw.shape != target.shape:
                raise NotImplementedError(f"{func} changes a shape in place, which {_device} does not support")
        if state.card.timed:
            _clock(func, args, None, targets)
        if len(returned) == 1:
            return _wrapped(result) if returned[0] is None else targets[returned[0]]
        return tuple(_wrapped(r) if n is None else targets[n] for r, n in zip(result or (), returned, strict=True))

    return handler


def _with_device(func: Any, args: tuple, kwargs: dict) -> Any:
    """`zeros_like` and friends: `device=` says where the result goes."""
    wanted = kwargs.get("device")
    here = wanted is None or torch.device(wanted).type == "sim"
    kwargs = {key: _raw(value, func) for key, value in kwargs.items() if key != "pin_memory"}
    kwargs["device"] = state.card.raw_device if here else wanted
    result = _run(func, [_raw(arg, func) for arg in args], kwargs)
    return _wrapped(result) if here else result


def _copy_(func: Any, args: tuple, kwargs: dict) -> Any:
    target, source = args[0], args[1]
    blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    copy_between(target, source, blocking)
    return target


def copy_between(target: torch.Tensor, source: torch.Tensor, blocking: bool) -> None:
    """Copy to, from or within the device, and count it. Bytes are those of the target, which is what crosses."""
    to_sim, from_sim = type(target) is SimTensor, type(source) is SimTensor
    if source.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if from_sim and state.card.dry and not to_sim:
        raise _no_data(_aten.copy_)
    (target.raw if to_sim else target).copy_(source.raw if from_sim else source)
    direction = "d2d" if to_sim and from_sim else "h2d" if to_sim else "d2h"
    state.card.transfer(direction, target, target if to_sim else source, blocking)
    if state.card.timed and direction == "d2d":
        _clock(_aten.copy_.default, (source,), None, [target])


def _to_copy(func: Any, args: tuple, kwargs: dict) -> Any:
    wanted = kwargs.get("device")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if wanted is None or torch.device(wanted).type == "sim":
        return _plain(func, args, kwargs)
    kwargs["device"] = wanted
    if torch.device(wanted).type == "meta":
        return func(args[0].raw, **kwargs)
    if state.card.dry:
        raise _no_data(func)
    result = func(args[0].raw, **kwargs)
    state.card.transfer("d2h", result, args[0], not kwargs.get("non_blocking", False))
    return result


def _item(func: Any, args: tuple, kwargs: dict) -> Any:
    if state.card.dry:
        raise _no_data(func)
    state.card.transfer("d2h", args[0], args[0], True)
    return args[0].raw.item()


def _synchronous(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose result's shape or value the host waits for."""
    result = _plain(func, args, kwargs)
    state.current_stream().synchronize()
    return result


def _index(func: Any, args: tuple, kwargs: dict) -> Any:
    return _plain(func, (args[0], _moved(args[1])), kwargs)


def _moved(indices: Any) -> list:
    """Indices, and only they, may lie on the CPU: as on a real card they are copied over."""
    return [i.to(_device) if isinstance(i, torch.Tensor) and type(i) is not SimTensor else i for i in indices]


def _index_write(func: Any) -> Handler:
    write = _mutating(func) if func._schema.is_mutable else _plain
    return lambda func, args, kwargs: write(func, (args[0], _moved(args[1]), *args[2:]), kwargs)


# Composite operators that run as one. Cut up, most of them would make the same storages in more steps;
# attention would make the whole score matrix, which no real card does.
_WHOLE = {
    "aten::scaled_dot_product_attention", "aten::linear", "aten::matmul", "aten::reshape", "aten::flatten",
    "aten::unflatten", "aten::chunk", "aten::narrow", "aten::contiguous", "aten::type_as", "aten::dropout",
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::layer_norm", "aten::group_norm", "aten::movedim",
}  # fmt: skip

_SPECIAL: dict[str, Handler] = {
    "aten::copy_": _copy_,
    "aten::_to_copy": _to_copy,
    "aten::_local_scalar_dense": _item,
    "aten::index": _index,
    "aten::nonzero": _synchronous,
    "aten::masked_select": _synchronous,
    "aten::equal": _synchronous,
    "aten::_has_compatible_shallow_copy_type": lambda func, args, kwargs: False,
    "aten::is_pinned": lambda func, args, kwargs: False,
}
_handlers: dict[Any, Handler] = {}


def _plan(func: Any) -> Handler:
    """Decide once per operator how it is run."""
    name, handler = func._schema.name, None
    if name in _SPECIAL:
        handler = _SPECIAL[name]
    elif name in ("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"):
        handler = _index_write(func)
    elif name in _WHOLE:
        handler = _whole
    elif torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        handler = _decomposed
    elif func._schema.is_mutable:
        handler = _mutating(func)
    elif any(argument.name == "device" for argument in func._schema.arguments):
        handler = _with_device
    else:
        handler = _plain
    _handlers[func] = handler
    return handler


def _clock(func: Any, args: tuple, out: Any, written: Any) -> None:
    """Put an operator on the virtual clock. Only matrix products, convolutions and attention take time."""
    reads = [a.allocation for a in args if type(a) is SimTensor]
    made = [t.allocation for t in (out if type(out) is tuple else (out,)) if type(t) is SimTensor]
    if made and made[0] in reads:
        return  # a view: no kernel
    formula = _OPERATIONS.get(func._schema.name) if state.card.flops else None
    made += [t.allocation for t in written if type(t) is SimTensor]
    state.card.compute(formula(args, out) if formula else 0, reads, made)


def _attention(args: tuple, out: Any) -> int:
    query, key, value = args[:3]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _convolution(args: tuple, out: Any) -> int:
    transposed = len(args) > 6 and args[6] is True
    return 2 * (args[0] if transposed else out).numel() * math.prod(args[1].shape[1:])


_OPERATIONS: dict[str, Callable[[tuple, Any], int]] = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::linear", "aten::matmul"), lambda a, out: 2 * out.numel() * a[0].shape[-1]
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), lambda a, out: 2 * out.numel() * a[1].shape[-1]),
    **dict.fromkeys(("aten::convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d"), _convolution),
    "aten::scaled_dot_product_attention": _attention,
}


# Operators without a tensor argument. Most factories (zeros, full, randn, ...) are made of `empty` and a fill; these
# are the ones whose default would first make an empty tensor and then resize it.
_FACTORIES = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "logspace",
    "range", "range.step", "eye", "eye.m", "randperm", "randperm.generator", "tril_indices", "triu_indices",
    "hann_window", "hann_window.periodic",
)  # fmt: skip


def _factory(func: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> SimTensor:
        kwargs.pop("pin_memory", None)
        if torch.device(kwargs["device"]).index:
            raise RuntimeError(f"invalid device {kwargs['device']}: there is only {_device}")
        return wrap(func(*args, **{**kwargs, "device": state.card.raw_device}))

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    copy_between(target, source, not non_blocking)
    return target


def _sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention under autograd: one operator as long as no gradient is asked for, else the decomposed one."""
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        kwargs.pop("enable_gqa", None)
        return _aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _aten.scaled_dot_product_attention.default(*args, **kwargs)


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    pinned = tensor.clone(memory_format=torch.contiguous_format)
    setattr(pinned.untyped_storage(), _PINNED, True)
    return pinned


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return hasattr(tensor.untyped_storage(), _PINNED)


def set_device(device: torch.device) -> None:
    """Say what device new tensors claim to be on."""
    global _device
    _device = device


def register_kernels(library: torch.library.Library) -> None:
    """Register what torch calls below `__torch_dispatch__`."""
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(_aten, packet), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", lambda tensor: _item(None, (tensor,), {}), "PrivateUse1")
    library.impl("scaled_dot_product_attention", _sdpa, "AutogradPrivateUse1")
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
