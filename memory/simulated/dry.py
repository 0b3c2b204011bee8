"""A dry run in any process, beside a real GPU too: `meta` serves as the simulated device, so none is registered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from . import card as state
from . import shapes
from .attention import Fuses
from .clock import Stream
from .dispatch import calls_others
from .operators import Uncompiled, tensors_in
from .recall import remembered
from .tensor import SimTensor, handlers, wrap

DEVICE = torch.device("meta")

# Methods that change a shape in place, which a wrapper tensor cannot do: it is swapped with the result.
_RESHAPES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.unsqueeze_: torch.Tensor.unsqueeze,
    torch.Tensor.squeeze_: torch.Tensor.squeeze,
    torch.Tensor.transpose_: torch.Tensor.transpose,
    torch.Tensor.t_: torch.Tensor.t,
}

_SPECIAL = frozenset((torch.tensor, torch.as_tensor, torch.Tensor.__getitem__, *_RESHAPES))

one_at_a_time = threading.RLock()  # held while `state.card` is another card than the process's own


@contextmanager
def dry_card(fuses: Fuses | None = None) -> Iterator[state.Card]:
    """Turn `meta` tensors that this thread makes into tensors of a simulated card, counted and without a cap.

    Small tensors keep their values there, large ones have shapes only (see `shapes`). The card's seconds of compute
    are operations. `fuses` tells which attention the real card has a fused kernel for, by default all. One at a time
    in a process. It holds for the process's simulated device too: do no work on that in another thread meanwhile.
    """
    with one_at_a_time, _one_core():
        outer, card = state.card, state.Card(None, DEVICE, dry=True)
        card.configure(None, 0, 25e9, 25e9, 1.0)
        card.fuses = fuses
        state.card = card
        try:
            # A stream of its own: an operation a second would set the clock of the others ahead by ages.
            with Stream(), _autocast_nowhere(), _Functions(), _Operators():
                yield card
        finally:
            state.card = outer


def held_bytes() -> int:
    """Return the allocated bytes on the card of the present dry run."""
    return state.card.allocated_bytes()


def keep_in_ram(nbytes: int) -> None:
    """Count bytes that the code of the present dry run keeps in RAM until its stage ends."""
    state.card.kept_in_ram += nbytes


@contextmanager
def counted(times: int) -> Iterator[None]:
    """Count operations `times` times on the card of the present dry run, for calls that it makes only once."""
    card = state.card
    outer, card.times = card.times, card.times * times
    try:
        yield
    finally:
        card.times = outer


class _Operators(Uncompiled):
    """A mode that sends operators making a tensor on `meta` to the card's handlers, even without a card tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not (observers := state.card.observers):
            return self._run(func, types, args, kwargs)
        given = tensors_in((args, kwargs))
        for observer in observers:
            observer.before(given)
        state.card.observers = ()
        try:
            result = self._run(func, types, args, kwargs)
        finally:
            state.card.observers = observers
        for observer in observers:
            observer.after(func, args, kwargs, given, result)
        return result

    def _run(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        here = SimTensor in types
        if not (here or _is_device(kwargs.get("device")) or any(map(_is_device, args))):
            return remembered(func, args, kwargs)  # stand-ins of the code that runs
        handler = handlers[func]
        if calls_others(handler, args, kwargs):
            with self:  # its parts make tensors too
                return handler(func, args, kwargs)
        if here:
            return handler(func, args, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if not (args and isinstance(args[0], torch.Tensor)):
            return wrap(shapes.make(func, args, kwargs))
        source = func(*args, **{**kwargs, "device": args[0].device})
        return wrap(shapes.moved(source))


def _is_device(value: Any) -> bool:
    return type(value) is torch.device and value == DEVICE  # to compare a tensor with it takes long


class _Functions(TorchFunctionMode):
    """A mode for functions that turn numbers into device tensors, or back, without calling an operator."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SPECIAL:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor):
            kwargs = dict(kwargs)
            values = tree_map_only(SimTensor, SimTensor.tolist, args) if func is torch.tensor else args
            device = kwargs.pop("device", None)
            made = func(*values, **kwargs)
            return made if device is None else made.to(device)
        if func in _RESHAPES and isinstance(args[0], SimTensor):
            torch.utils.swap_tensors(args[0], _RESHAPES[func](*args, **kwargs))
            return args[0]
        if func is torch.Tensor.__getitem__:
            picked = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(item, list) for item in picked):
                args = args[0], tuple(torch.tensor(i) if isinstance(i, list) else i for i in picked)
        return func(*args, **kwargs)


@contextmanager
def _one_core() -> Iterator[None]:
    """Run small kernels on one core: others would wait for them, busily, most of the time."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)


@contextmanager
def _autocast_nowhere() -> Iterator[None]:
    """Make `autocast("meta")`, which torch refuses, a null context. Its choice of dtypes matters little here."""
    autocast = torch.autocast

    def chosen(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == DEVICE.type else autocast(device_type, *args, **kwargs)

    torch.autocast = torch.amp.autocast = chosen  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.autocast = torch.amp.autocast = autocast  # type: ignore[misc]
