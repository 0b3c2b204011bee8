"""Dry runs: what a stage will take, found by running it on shapes. No device, no weights, seconds at full size.

The stage's own code runs as it is, on a simulated card of its own (`simulated.dry`); its modules are structures
on `meta`. Code that looks at values which follow from the weights (the routing of a mixture of experts) needs a
stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ..simulated.attention import Fuses
from ..simulated.card import Allocation, Card
from ..simulated.dry import DEVICE, dry_card
from ..simulated.shapes import moved
from ..simulated.tensor import SimTensor, wrap
from ..weights.groups import CallOrder, divide
from ..weights.structure import parameter_refs
from ..weights.unit import ManagedModel
from .call_blocks import Call, Given, KnownCalls, kind_of
from .forecast import Forecast, HeldBytes, ModuleOperations, Operations, UnitForecast
from .modules import ModuleWatch, done_by

StandIns = Mapping[tuple[str, str], Callable[..., Any]]  # by names of a module's class and method: what takes its place

_COMPARED_ELEMENTS = 4096  # masks and ids up to this size make a call another one when they differ


def dry_run(
    modules: Mapping[str, nn.Module],
    run: Callable[[torch.device], Any],
    stand_ins: StandIns | None = None,
    method: str = "forward",
    fuses: Fuses | None = None,
) -> tuple[Forecast, Any]:
    """Run a stage on shapes. Returns its forecast, and what `run` returned.

    `modules` are the structures of its units by name, used up by this; `run` is called with the device to work on, and
    calls the modules' `method`. `fuses` tells which attention is one kernel on the real device. RuntimeError, among
    others, where the code needs values that there are none of.
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
    """As `dry_run`, of units whose calls are `known` by the unit's name: only those that are not known are run.

    `run` is also given the modules to call. What is found out is added to `known`.
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
    """Put a module's weights on the card of a dry run, free of charge."""
    made: dict[int, SimTensor] = {}
    for ref in list(parameter_refs(module)):
        if id(ref.tensor) not in made:
            tensor = ref.tensor.detach()
            raw = tensor if tensor.is_meta else moved(tensor)
            made[id(ref.tensor)] = wrap(raw, lambda nbytes: card.allocate(0))
        ref.holder[ref.key] = made[id(ref.tensor)]


def lay_stand_ins(module: nn.Module, stand_ins: StandIns) -> None:
    """Put stand-ins in the place of a module's methods that read values."""
    for owner in module.modules():
        for (kind, replaced), stand_in in stand_ins.items():
            if type(owner).__name__ == kind:
                vars(owner)[replaced] = functools.partial(stand_in, owner)


@dataclass(frozen=True)
class _Inside:
    """The inside of a call, see `UnitForecast`."""

    operations: Operations
    modules: ModuleOperations
    whole: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    held: HeldBytes = ()  # beyond what was when the call began


@dataclass
class _Peaks:
    """The peaks that were seen of one unit."""

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

    def add(self, before: int, peak: int, inside: _Inside) -> None:
        """Count a call with this peak, `before` which so much was held."""
        self.first = self.first or peak
        self.operations += inside.operations
        for path, operations in inside.modules:
            self.modules[path] = self.modules.get(path, Operations()) + operations
        self.whole.update(inside.whole)
        self.outside.update(inside.outside)
        for path, nbytes in (("", 0), *inside.held):
            self.held[path] = max(self.held.get(path, 0), before + nbytes - self.live)


class _Book:
    """Which unit each stretch of time belongs to, and the peaks of it."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.units: dict[str, _Peaks] = {}
        self.idle = 0
        self.last: _Peaks | None = None

    def close_interval(self) -> int:
        """Return the peak since this was last called."""
        peak = self.card.take_interval_peak()
        if self.last is None:
            self.idle = max(self.idle, peak)
        else:
            self.last.peak = max(self.last.peak, peak)
        return peak

    def told(self, held: int, peak: int) -> int:
        """Count a call that is not run, by its peak beyond what was held; its result is there. Returns the peak."""
        self.card.allocate(max(0, held + peak - self.card.allocated_bytes()))
        return self.close_interval()

    def enter(self, name: str) -> tuple[_Peaks, int]:
        """Note the call of a unit. Return its peaks, and the bytes held now."""
        self.close_interval()
        held = self.card.allocated_bytes()
        called = self.units.setdefault(name, _Peaks(held))
        called.calls += 1
        called.turns += called is not self.last
        self.last = called
        return called, held

    def forecast(self) -> Forecast:
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
            )
            for name, seen in self.units.items()
        }
        return Forecast(self.idle, units)


@dataclass
class _Call:
    """One kind of call: what it took beyond what was held when it began, and what it gave."""

    peak: int
    inside: _Inside
    shapes: Any
    settled: bool


class _Structure:
    """A structure on the card, whose `method` can be run: its weights cost nothing, its modules are told apart."""

    def __init__(self, module: nn.Module, method: str, card: Card, stand_ins: StandIns) -> None:
        self.card = card
        tables = divide(module, list(parameter_refs(module)), CallOrder()).tables
        lay_weights(module, card)
        lay_stand_ins(module, stand_ins)
        self.watch = ModuleWatch(module, [table.path for table in tables], card)
        self.forward = getattr(module, method)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, _Inside]:
        """Return the result of a call, and what happened inside."""
        before = done_by(self.card)
        with self.watch.watching():
            result = self.forward(*args, **kwargs)
        watch = self.watch
        return result, _Inside(done_by(self.card) - before, watch.operations, watch.whole, watch.outside, watch.held)


class _DryModule:
    """Takes the place of a module's method: runs each kind of call once, and later ones from memory."""

    def __init__(self, name: str, module: nn.Module, method: str, book: _Book, stand_ins: StandIns) -> None:
        self.name, self.book = name, book
        self.calls: dict[Any, _Call] = {}
        self.structure = _Structure(module, method, book.card, stand_ins)
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
            # One that leaves tables behind for later calls is run once more, to see one that finds them.
            settled = call is not None or self.book.card.allocated_bytes() <= held + sum(given.values())
            call = _Call(peak - held, inside, tree_map_only(torch.Tensor, _Shape.of, result), settled)
            self.calls[key] = call
        seen.add(held, peak, call.inside)
        return result


class _KnownModule:
    """Takes the place of a unit's `forward`: runs a kind of call that is not known, on a structure made for it.

    Each call is told as if it were the first: what it leaves in the module counts until the next, and once.
    """

    def __init__(self, unit: ManagedModel, known: KnownCalls, book: _Book) -> None:
        self.unit, self.known, self.book = unit, known, book
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
    """A tensor of a result, to be made again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=DEVICE)


def _kind_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """Return what makes two calls alike: shapes, dtypes, and the values of masks and ids."""
    leaves, structure = tree_flatten((args, kwargs))
    return (str(structure), *map(_kind, leaves))


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str | int | float | bool | None) else type(value)
    raw = value.raw if isinstance(value, SimTensor) else value
    # Not those of timesteps, which are rows of numbers too in some families.
    known = not raw.is_meta and not raw.is_floating_point() and raw.ndim > 1 and raw.numel() <= _COMPARED_ELEMENTS
    return tuple(raw.shape), raw.dtype, tuple(raw.flatten().tolist()) if known else None
