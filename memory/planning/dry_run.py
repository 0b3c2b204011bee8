"""Dry runs: the forecast of a stage, made by running it on shapes. No device, no weights; seconds at full size.

The stage's own code runs unchanged, on a simulated card of its own (`simulated.dry`). Its modules are structures on the
`meta` device. Code that reads values which follow from weights, such as the routing of a mixture of experts, needs a
stand-in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from ..simulated.attention import Fuses
from ..simulated.card import Allocation, Card
from ..simulated.dry import DEVICE, dry_card
from ..simulated.shapes import moved
from ..simulated.tensor import SimTensor, wrap
from ..weights.groups import embedding_tables
from ..weights.structure import parameter_refs
from ..weights.unit import ManagedModel
from .forecast import Forecast, HeldBytes, ModuleOperations, OnceModule, Operations, UnitForecast
from .known_calls import Call, Given, KnownCalls, kind_of
from .modules import ModuleWatch, done_by
from .taint import named_arguments

StandIns = Mapping[tuple[str, str], Callable[..., Any]]  # replacements of methods, by the names of class and method

_COMPARED_ELEMENTS = 4096  # elements up to which masks and ids are compared by value, to tell kinds of calls apart


def dry_run(
    modules: Mapping[str, nn.Module],
    run: Callable[[torch.device], Any],
    stand_ins: StandIns | None = None,
    method: str = "forward",
    fuses: Fuses | None = None,
) -> tuple[Forecast, Any]:
    """Run a stage on shapes. Return its forecast, and the result of `run`.

    - `modules` are the structures of its units by name. This call changes them: do not use them again.
    - `run` is called with the device to work on. It calls the modules' `method`.
    - `fuses` tells which attention is one kernel on the real device.

    Raises RuntimeError, among others, if the code needs values that shapes do not give.
    """
    with torch.inference_mode(), dry_card(fuses) as card:
        book = _Book(card)
        for name, module in modules.items():
            _DryModule(name, module, method, book, stand_ins or {})
        result = run(DEVICE)
        book.close_interval()
        return book.forecast(), result


def dry_run_known(
    units: Sequence[ManagedModel],
    known: Mapping[str, KnownCalls],
    run: Callable[[torch.device, Mapping[str, nn.Module]], Any],
    fuses: Fuses | None = None,
) -> tuple[Forecast, Any]:
    """Run a stage on shapes like `dry_run`, except for the calls that are `known` by the unit's name.

    `run` is also given the modules to call. New calls are added to `known`.
    """
    modules = {unit.name: unit.double() for unit in units}
    with torch.inference_mode(), dry_card(fuses) as card:
        book = _Book(card)
        for unit in units:
            vars(modules[unit.name])["forward"] = _KnownModule(unit, known[unit.name], book)
        result = run(DEVICE, modules)
        book.close_interval()
        return book.forecast(), result


def lay_weights(module: nn.Module, card: Card) -> None:
    """Put a module's weights on the card of a dry run as tensors of 0 bytes. Shared weights stay shared."""
    made: dict[int, SimTensor] = {}
    for ref in list(parameter_refs(module)):
        if id(ref.tensor) not in made:
            tensor = ref.tensor.detach()
            with _disable_current_modes():  # in the dry run's mode the shape of a large buffer would be wrapped twice
                raw = tensor if tensor.is_meta else moved(tensor)
            made[id(ref.tensor)] = wrap(raw, lambda nbytes: card.allocate(0))
        ref.holder[ref.key] = made[id(ref.tensor)]


def lay_stand_ins(module: nn.Module, stand_ins: StandIns) -> None:
    """Replace the methods that read values by stand-ins."""
    for owner in module.modules():
        for (kind, replaced), stand_in in stand_ins.items():
            if type(owner).__name__ == kind:
                vars(owner)[replaced] = functools.partial(stand_in, owner)


@dataclass(frozen=True)
class _Inside:
    """The operations and bytes inside a call. See `UnitForecast`."""

    operations: Operations
    modules: ModuleOperations
    whole: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    held: HeldBytes = ()  # beyond the bytes held when the call began
    once: tuple[OnceModule, ...] = ()
    step_bytes: int = 0
    argument_bytes: int = 0
    side_bytes: int = 0


@dataclass
class _Peaks:
    """The peaks of one unit so far, in bytes on the card, and the counts that make its forecast."""

    live: int
    peak: int = 0
    first: int = 0
    calls: int = 0
    turns: int = 0
    operations: Operations = Operations()
    modules: dict[str, Operations] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)
    once: tuple[OnceModule, ...] = ()
    step_bytes: int = 0
    argument_bytes: int = 0
    side_bytes: int = 0

    def add(self, before: int, peak: int, inside: _Inside) -> None:
        """Count a call with its peak; `before` is the bytes that were held when it began."""
        self.first = self.first or peak
        self.operations += inside.operations
        for path, operations in inside.modules:
            self.modules[path] = self.modules.get(path, Operations()) + operations
        self.whole.update(inside.whole)
        self.outside.update(inside.outside)
        self.once = inside.once or self.once
        self.step_bytes = max(self.step_bytes, inside.step_bytes)
        self.argument_bytes = max(self.argument_bytes, inside.argument_bytes)
        self.side_bytes = max(self.side_bytes, inside.side_bytes)
        for path, nbytes in (("", 0), *inside.held):
            self.held[path] = max(self.held.get(path, 0), before + nbytes - self.live)


class _Book:
    """The peaks of each unit. Each interval of the run belongs to the unit that was called last."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.units: dict[str, _Peaks] = {}
        self.idle = 0
        self.last: _Peaks | None = None

    def close_interval(self) -> int:
        """Return the peak since the last call of this, and count it for the unit that was called last."""
        peak = self.card.take_interval_peak()
        if self.last is None:
            self.idle = max(self.idle, peak)
        else:
            self.last.peak = max(self.last.peak, peak)
        return peak

    def told(self, held: int, peak: int) -> int:
        """Count a known call without running it, and return the peak on the card.

        `peak` is the call's peak beyond the `held` bytes. Its result is on the card already.
        """
        self.card.allocate(max(0, held + peak - self.card.allocated_bytes()))
        return self.close_interval()

    def enter(self, name: str) -> tuple[_Peaks, int]:
        """Note a call of a unit. Return its peaks, and the bytes held now."""
        self.close_interval()
        held = self.card.allocated_bytes()
        called = self.units.setdefault(name, _Peaks(held))
        called.calls += 1
        called.turns += called is not self.last
        self.last = called
        return called, held

    def forecast(self) -> Forecast:
        """Return the forecast of the stage. It has no steps and no result shape: callers add these."""
        units = {
            name: UnitForecast(
                live_bytes=seen.live,
                working_bytes=max(0, seen.peak - seen.live),
                first_bytes=max(0, seen.first - seen.live),
                calls=seen.calls,
                operations=seen.operations,
                modules=tuple(seen.modules.items()),
                whole=tuple(sorted(seen.whole)),
                outside=tuple(sorted(seen.outside)),
                held=tuple(seen.held.items()),
                turns=seen.turns,
                once=seen.once,
                step_bytes=seen.step_bytes,
                argument_bytes=seen.argument_bytes,
                side_bytes=seen.side_bytes,
            )
            for name, seen in self.units.items()
        }
        return Forecast(self.idle, units, kept_in_ram=self.card.kept_in_ram)


@dataclass
class _Call:
    """One kind of call: its peak beyond the bytes held when it began, and the shapes of its result.

    With `settled` later calls are answered from this record.
    """

    peak: int
    inside: _Inside
    shapes: Any
    settled: bool


class _Structure:
    """A structure on the card whose `method` can be run: its weights cost nothing, and its modules are watched."""

    def __init__(self, module: nn.Module, method: str, card: Card, stand_ins: StandIns) -> None:
        self.card = card
        tables = embedding_tables(module)
        lay_weights(module, card)
        lay_stand_ins(module, stand_ins)
        self.watch = ModuleWatch(module, [table.path for table in tables], card)
        self.forward = getattr(module, method)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, _Inside]:
        """Return the result of a call, and the operations and bytes inside."""
        before = done_by(self.card)
        watch = self.watch
        with watch.watching(named_arguments(self.forward, args, kwargs)):
            result = self.forward(*args, **kwargs)
        done = done_by(self.card) - before
        seen = watch.operations, watch.whole, watch.outside, watch.held, watch.once
        return result, _Inside(done, *seen, watch.step_bytes, watch.argument_bytes, watch.side_bytes)


class _DryModule:
    """A replacement of a module's method: it runs each kind of call once, and answers later ones from memory."""

    def __init__(self, name: str, module: nn.Module, method: str, book: _Book, stand_ins: StandIns) -> None:
        self.name, self.book = name, book
        self.calls: dict[Any, _Call] = {}
        self.structure = _Structure(module, method, book.card, stand_ins)
        self.__signature__ = inspect.signature(self.structure.forward)  # blocks hand on the arguments that it takes
        vars(module)[method] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen, held = self.book.enter(self.name)
        key = _kind_of_call(args, kwargs)
        call = self.calls.get(key)
        if call and call.settled:
            result = tree_map_only(_Shape, _Shape.make, call.shapes)
            peak = self.book.told(held, call.peak)
        else:
            result, inside = self.structure.run(args, kwargs)
            peak = self.book.close_interval()
            given = {id(t.allocation): t.allocation.nbytes for t in tree_flatten(result)[0] if isinstance(t, SimTensor)}
            # A call that leaves tables behind for later ones is run once more: the next call finds them there.
            settled = call is not None or self.book.card.allocated_bytes() <= held + sum(given.values())
            call = _Call(peak - held, inside, tree_map_only(torch.Tensor, _Shape.of, result), settled)
            self.calls[key] = call
        seen.add(held, peak, call.inside)
        return result


class _KnownModule:
    """A replacement of a unit's `forward`: it runs only unknown kinds of calls, on a structure made for them.

    Each call counts as the first one: the bytes that it leaves in the module count until the next call.
    """

    def __init__(self, unit: ManagedModel, known: KnownCalls, book: _Book) -> None:
        self.unit, self.known, self.book = unit, known, book
        self.__signature__ = inspect.signature(unit.module.forward)
        self.structure: _Structure | None = None
        self.left: Allocation | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen, _ = self.book.enter(self.unit.name)
        self.left, card = None, self.book.card
        held, (kind, tokens) = card.allocated_bytes(), kind_of(args, kwargs)
        if call := self.known.find(kind, tokens):
            result = call.given.make()
            peak = self.book.told(held, call.peak_bytes)
        else:
            call = self._seen(held, args, kwargs)
            self.known.add(kind, tokens, call)
            result, peak = call.given.make(), held + call.peak_bytes
        self.left = card.allocate(call.left_bytes)
        seen.add(held, peak, _Inside(call.operations, call.modules, call.whole, call.outside, call.held))
        return result

    def _seen(self, held: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Run a call of an unknown kind on the structure. Return the record of it."""
        card = self.book.card
        if self.structure is None:
            self.structure = _Structure(self.unit.skeleton(), "forward", card, {})
        result, inside = self.structure.run(args, kwargs)
        peak = self.book.close_interval()
        given, with_result = Given.of(result), card.allocated_bytes()
        del result
        left = max(0, card.allocated_bytes() - held)
        given, lost = given.with_objects(max(0, with_result - held - left - sum(given.storages)))
        of_modules = inside.modules, inside.whole, inside.outside, inside.held
        return Call(peak - held, left + lost, inside.operations, given, *of_modules)


@dataclass(frozen=True)
class _Shape:
    """The shape, stride and type of a tensor in a result, from which it is made again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=DEVICE)


def _kind_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """Return a key that is equal for calls alike.

    Alike are shapes, types, plain values, and the values of small masks and ids.
    """
    leaves, structure = tree_flatten((args, kwargs))
    return (str(structure), *map(_kind, leaves))


def _kind(value: Any) -> Any:
    """Return the part of a call's key that one argument makes."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str | int | float | bool | None) else type(value)
    raw = value.raw if isinstance(value, SimTensor) else value
    # Values of timesteps must not count, which are rows of numbers in some families: hence more than one dimension.
    known = not raw.is_meta and not raw.is_floating_point() and raw.ndim > 1 and raw.numel() <= _COMPARED_ELEMENTS
    return tuple(raw.shape), raw.dtype, tuple(raw.flatten().tolist()) if known else None
