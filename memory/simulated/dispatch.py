"""How each operator on simulated tensors is run: as a CPU kernel, as its parts, or specially."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import card as state
from . import shapes
from .attention import by_parts, softmax_by_parts
from .clock import ATTENTION, OPERATIONS, current_stream
from .lazy import Bytes, copies, stale
from .tensor import Handler, SimTensor, handlers, raw_of, wrap, wrap_all


def _run(func: Any, raws: Any, kwargs: dict) -> Any:
    if copies.queued:
        copies.force(current_stream().tail)
    result = shapes.run(func, raws, kwargs) if state.card.dry else func(*raws, **kwargs)
    if state.card.unknown_types:
        _refuse_unknown(func, tree_leaves((raws, kwargs)), tree_leaves(result))
    return result


def _refuse_unknown(func: Any, given: list, made: list) -> None:
    """Raise TypeError for a dtype that the card has no kernels for, unless the operator only makes views."""
    given, made = ([each for each in some if isinstance(each, torch.Tensor)] for some in (given, made))
    inside = {each.untyped_storage().data_ptr() for each in given}
    if made and not func._schema.is_mutable and all(each.untyped_storage().data_ptr() in inside for each in made):
        return
    for each in (*given, *made):
        if each.dtype in state.card.unknown_types:
            raise TypeError(f"Undefined type {each.dtype} (in {func})")


def _plain(func: Any, args: tuple, kwargs: dict) -> Any:
    raws = [raw_of(arg, func) for arg in args]
    if kwargs:
        kwargs = {key: raw_of(value, func) for key, value in kwargs.items()}
    result = _run(func, raws, kwargs)
    out = wrap(result) if isinstance(result, torch.Tensor) else wrap_all(result)
    if state.card.timed:
        _clock(func, args, out, ())
    return out


def _whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a composite operator as one. It may return its argument."""
    raws = [raw_of(arg, func) for arg in args]
    result = _run(func, raws, {key: raw_of(value, func) for key, value in kwargs.items()})
    if result is raws[0]:
        return args[0]
    out = wrap_all(result)
    if state.card.timed:
        _clock(func, args, out, ())
    return out


def composite(func: Any, args: tuple, kwargs: dict) -> Any:
    return func.decompose(*args, **kwargs)


def _attention(func: Any, args: tuple, kwargs: dict) -> Any:
    return by_parts(*args, **kwargs) if calls_others(_attention, args, kwargs) else _whole(func, args, kwargs)


def calls_others(handler: Handler, args: tuple, kwargs: dict) -> bool:
    """Return whether a handler calls other operators for these arguments."""
    if handler is _attention:
        return state.card.fuses is not None and not state.card.fuses(*args, **kwargs)
    return handler in (composite, softmax_by_parts)


def _mutating(func: Any) -> Handler:
    """Return a handler for an operator whose schema says that it writes to arguments."""
    arguments = func._schema.arguments
    written = [(at, a.name) for at, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]

    def alias(value: Any) -> int | None:
        """Return the index of the written argument that a return value aliases, or None."""
        info = value.alias_info
        if info is None:
            return None
        same = (arguments[at].alias_info.before_set == info.before_set for at, _ in written)
        return next(n for n, found in enumerate(same) if found)

    returned = [alias(value) for value in func._schema.returns]

    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written]
        for target in targets:
            if isinstance(target, torch.Tensor) and type(target) is not SimTensor:
                raise RuntimeError(f"{func} on sim:0 cannot write to a tensor on {target.device}")
        raws = [raw_of(arg, func) for arg in args]
        result = _run(func, raws, {key: raw_of(value, func) for key, value in kwargs.items()})
        for target in targets:
            if type(target) is SimTensor and target.raw.shape != target.shape:
                raise NotImplementedError(f"{func} changes a shape in place, which sim:0 does not support")
        if state.card.timed:
            _clock(func, args, None, targets)
        if len(returned) == 1:
            return wrap_all(result) if returned[0] is None else targets[returned[0]]
        results = zip(result or (), returned, strict=True)
        return tuple(wrap_all(item) if n is None else targets[n] for item, n in results)

    return handler


def _with_device(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator with a `device=` argument, such as `zeros_like`, which says where the result goes."""
    wanted = kwargs.get("device")
    here = wanted is None or _is_here(wanted)
    kwargs = {key: raw_of(value, func) for key, value in kwargs.items() if key != "pin_memory"}
    raws = [raw_of(arg, func) for arg in args]
    kwargs["device"] = raws[0].device if here else wanted
    result = _run(func, raws, kwargs)
    return wrap_all(result) if here else result


def _is_here(device: Any) -> bool:
    return state.card.device is not None and torch.device(device).type == state.card.device.type


def _copy_(func: Any, args: tuple, kwargs: dict) -> Any:
    target, source = args[0], args[1]
    blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    copy_between(target, source, blocking)
    return target


def copy_between(target: Any, source: Any, blocking: bool) -> None:
    """Copy to, from or within the device, and count the bytes of the target, which cross the bus."""
    to_sim, from_sim = type(target) is SimTensor, type(source) is SimTensor
    if source.is_meta and not from_sim:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    direction = "d2d" if to_sim and from_sim else "h2d" if to_sim else "d2h"
    device_side, stream = target if to_sim else source, current_stream()
    raws = target.raw if to_sim else target, source.raw if from_sim else source
    if state.card.unknown_types:
        _refuse_unknown(torch.ops.aten.copy_.default, [*raws], [])
    if copies.mode == "eager" or state.card.dry or direction == "d2d":
        copies.force(stream.tail)
        shapes.copy(*raws)
    else:
        blocking = copies.copy(*raws, to_sim, Bytes(*state.span_of(device_side)), blocking, stream)
    state.card.transfer(direction, target, device_side, blocking, stream)
    if state.card.timed and direction == "d2d":
        _clock(torch.ops.aten.copy_.default, (source,), None, [target])


def _to_copy(func: Any, args: tuple, kwargs: dict) -> Any:
    wanted = kwargs.get("device")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if wanted is None or _is_here(wanted):
        return _plain(func, args, kwargs)
    kwargs["device"] = wanted
    if torch.device(wanted).type == "meta":
        return func(args[0].raw, **kwargs)
    blocking = not kwargs.pop("non_blocking", False)
    _refuse_unknown(func, [args[0].raw], [])
    copies.force(current_stream().tail)
    result = func(shapes.valued(args[0].raw), **kwargs)
    if blocking or copies.mode == "eager" or state.card.dry:
        state.card.transfer("d2h", result, args[0], blocking, current_stream())
    else:  # torch takes pinned memory for it
        result = stale(result).pin_memory()
        copy_between(result, args[0], False)
    return result


def read_item(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the number in a tensor of one element: a copy that the host waits for."""
    copies.force(current_stream().tail)
    value = shapes.known(args[0].raw, func).item()
    state.card.transfer("d2h", args[0], args[0], True, current_stream())
    return value


def data_may_be_set(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `tensor.data = value` works: SimTensor has a setter, other tensors take no SimTensor."""
    return type(tensor) is SimTensor


def _synchronous(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator whose result's shape or value the host waits for."""
    result = _plain(func, args, kwargs)
    current_stream().synchronize()
    return result


def _index(func: Any, args: tuple, kwargs: dict) -> Any:
    indices = _moved(args[1])
    if state.card.dry:
        indices = [part for i in indices for part in _counted(i, func)]
    return _plain(func, (args[0], indices), kwargs)


def _moved(indices: Any) -> list:
    """Copy indices to the card. Only they may lie on the CPU, as with a real card."""
    return [wrap(i.clone()) if isinstance(i, torch.Tensor) and type(i) is not SimTensor else i for i in indices]


def _counted(index: Any, func: Any) -> tuple:
    """Return a mask as the indices it selects, so that the shape of the result is known even without data."""
    if type(index) is not SimTensor or index.raw.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return tuple(wrap(places) for places in shapes.known(index.raw, func).nonzero(as_tuple=True))


def _index_write(func: Any) -> Handler:
    write = _mutating(func) if func._schema.is_mutable else _plain

    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        if type(args[0]) is SimTensor:
            return write(func, (args[0], _moved(args[1]), *args[2:]), kwargs)
        # A tensor on the CPU: torch brings indices there, as MiniMax-H3's code counts on. The host waits for them.
        indices = [index.cpu() if type(index) is SimTensor else index for index in args[1]]
        return func(args[0], indices, *args[2:], **kwargs)

    return handler


# Composite operators that run as one. Cut up, they would make the same storages in more steps.
_WHOLE = {
    "aten::linear", "aten::matmul", "aten::reshape", "aten::flatten",
    "aten::unflatten", "aten::chunk", "aten::narrow", "aten::contiguous", "aten::type_as", "aten::dropout",
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::layer_norm", "aten::group_norm", "aten::movedim",
}  # fmt: skip

_SPECIAL: dict[str, Handler] = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::_safe_softmax": softmax_by_parts,
    "aten::copy_": _copy_,
    "aten::_to_copy": _to_copy,
    "aten::_local_scalar_dense": read_item,
    "aten::index": _index,
    "aten::nonzero": _synchronous,
    "aten::masked_select": _synchronous,
    "aten::equal": _synchronous,
    "aten::_has_compatible_shallow_copy_type": lambda func, args, kwargs: data_may_be_set(*args),
    "aten::is_pinned": lambda func, args, kwargs: False,
}


def plan(func: Any) -> Handler:
    """Return the handler of an operator. It is asked once for each."""
    name, handler = func._schema.name, None
    if name in _SPECIAL:
        handler = _SPECIAL[name]
    elif name in ("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"):
        handler = _index_write(func)
    elif name in _WHOLE:
        handler = _whole
    elif torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        handler = composite
    elif func._schema.is_mutable:
        handler = _mutating(func)
    elif any(argument.name == "device" for argument in func._schema.arguments):
        handler = _with_device
    else:
        handler = _plain
    return handler


def _clock(func: Any, args: tuple, out: Any, written: Any) -> None:
    """Put an operator on the virtual clock. Only matrix products, convolutions and attention take time."""
    formula = OPERATIONS.get(func._schema.name)
    if formula is None and state.card.dry:
        return  # no kernel of a dry run reads what another has yet to write
    reads = _spans(args)
    made = _spans((out,))
    if made and any(made[0].allocation is span.allocation for span in reads):
        return  # a view: no kernel
    operations = formula(args, out) if formula and state.card.flops else 0
    if copies.queued:
        copies.check(map(Bytes._make, reads), map(Bytes._make, made + _spans(written)))
    large: state.KernelKind = "attention" if func._schema.name == ATTENTION else "product"
    kind: state.KernelKind = large if formula else "other"
    state.card.compute(operations, reads, made + _spans(written), current_stream(), kind)


def _spans(values: Any) -> list[state.Span]:
    found = []
    for value in values:
        if type(value) is SimTensor:
            found.append(state.span_of(value))
        elif isinstance(value, (tuple, list)):
            found += _spans(value)
    return found


handlers.plan = plan
