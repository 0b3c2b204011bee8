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

from ..simulated.card import Allocation, Card
from ..simulated.dry import DEVICE, dry_card
from ..simulated.shapes import moved
from ..simulated.tensor import SimTensor, wrap
from ..units.structure import Slot, leafwise_slots, slots, split_blocks
from ..units.unit import ManagedModel
from .calls import Call, Given, KnownCalls, kind_of
from .forecast import Forecast, UnitForecast

StandIns = Mapping[tuple[str, str], Callable[..., Any]]  # by names of a module's class and method: what takes its place

_COMPARED_ELEMENTS = 4096  # masks and ids up to this size make a call another one when they differ


def dry_run(
    modules: Mapping[str, nn.Module],
    run: Callable[[torch.device], Any],
    stand_ins: StandIns | None = None,
    method: str = "forward",
) -> tuple[Forecast, Any]:
    """Run a stage on shapes. Returns its forecast, and what `run` returned.

    `modules` are the structures of its units by name, used up by this; `run` is called with the device to work on, and
    calls the modules' `method`. RuntimeError, among others, where the code needs values that there are none of.
    """
    with torch.inference_mode(), dry_card() as card:
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
) -> tuple[Forecast, Any]:
    """As `dry_run`, of units whose calls are `known` by the unit's name: only those that are not known are run.

    `run` is also given the modules to call. What is found out is added to `known`.
    """
    modules = {unit.name: unit.double() for unit in units}
    with torch.inference_mode(), dry_card() as card:
        book = _Book(card)
        for unit in units:
            vars(modules[unit.name])["forward"] = _KnownModule(unit, known[unit.name], book)
        result = run(DEVICE, modules)
        book.close_interval()
        return book.forecast(), result


def lay_weights(module: nn.Module, card: Card) -> None:
    """Put a module's weights on the card of a dry run, free of charge."""
    made: dict[int, SimTensor] = {}
    for slot in list(slots(module)):
        if id(slot.tensor) not in made:
            tensor = slot.tensor.detach()
            raw = tensor if tensor.is_meta else moved(tensor)
            made[id(slot.tensor)] = wrap(raw, lambda nbytes: card.allocate(0))
        slot.holder[slot.key] = made[id(slot.tensor)]


def lay_stand_ins(module: nn.Module, stand_ins: StandIns) -> None:
    """Put stand-ins in the place of a module's methods that read values."""
    for owner in module.modules():
        for (kind, replaced), stand_in in stand_ins.items():
            if type(owner).__name__ == kind:
                vars(owner)[replaced] = functools.partial(stand_in, owner)


@dataclass
class _Peaks:
    """What has been seen of one unit."""

    live: int
    plain: int = 0
    beside: int = 0
    first: int = 0
    calls: int = 0
    operations: float = 0.0
    blocks: list[float] = field(default_factory=list)

    def add(self, plain: int, operations: float, blocks: Sequence[float]) -> None:
        """Count a call with this peak."""
        self.first = self.first or plain
        self.operations += operations
        self.blocks = [a + b for a, b in zip(self.blocks or [0.0] * len(blocks), blocks, strict=True)]


class _Book:
    """Which unit each stretch of time belongs to, and the peaks of it."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.units: dict[str, _Peaks] = {}
        self.idle = 0
        self.last: _Peaks | None = None

    def close_interval(self) -> tuple[int, int]:
        """The peaks since this was last called: as it was, and with the weights that came leaf by leaf."""
        plain, beside = self.card.take_interval_peak(), self.card.take_peak_beside()
        if self.last is None:
            self.idle = max(self.idle, plain)
        else:
            self.last.plain = max(self.last.plain, plain)
            self.last.beside = max(self.last.beside, beside)
        return plain, beside

    def told(self, held: int, plain: int, beside: int) -> int:
        """Count a call that is not run, by its peaks beyond what was held; its result is there. Returns the peak."""
        leaves = self.card.allocate_beside(max(0, beside - plain))
        self.card.allocate(max(0, held + plain - self.card.allocated_bytes()))
        del leaves
        return self.close_interval()[0]

    def enter(self, name: str) -> tuple[_Peaks, int]:
        """A unit is called. Returns its peaks, and what is held now."""
        self.close_interval()
        held = self.card.allocated_bytes()
        self.last = self.units.setdefault(name, _Peaks(held))
        self.last.calls += 1
        return self.last, held

    def forecast(self) -> Forecast:
        units = {
            name: UnitForecast(
                live_bytes=seen.live,
                working_bytes=max(0, seen.plain - seen.live),
                first_bytes=max(0, seen.first - seen.live),
                leafwise_bytes=max(0, seen.beside - seen.live),
                calls=seen.calls,
                operations=seen.operations,
                block_operations=tuple(seen.blocks),
            )
            for name, seen in self.units.items()
        }
        return Forecast(self.idle, units)


@dataclass
class _Call:
    """One kind of call: what it took beyond what was held when it began, and what it gave."""

    plain: int
    beside: int
    operations: float
    blocks: list[float]
    shapes: Any
    settled: bool


class _Structure:
    """A structure on the card, whose `method` can be run: its weights cost nothing, its blocks are told apart."""

    def __init__(self, module: nn.Module, method: str, card: Card, stand_ins: StandIns) -> None:
        self.card, self.forward = card, getattr(module, method)
        blocks, _ = split_blocks(module, list(slots(module)))
        self.blocks = [0.0] * len(blocks)
        lay_weights(module, self.card)
        lay_stand_ins(module, stand_ins)
        for index, block in enumerate(blocks):
            _wrap_forward(block.module, functools.partial(self._counted, index))
        self._bring_leaves(module)

    @property
    def operations(self) -> float:
        return self.card.stats().compute_seconds  # the card does one a second

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float, list[float]]:
        """The result of a call, its operations, and those of each block."""
        self.blocks, before = [0.0] * len(self.blocks), self.operations
        result = self.forward(*args, **kwargs)
        return result, self.operations - before, self.blocks

    def _bring_leaves(self, module: nn.Module) -> None:
        """Count the weights that would be there if each module's own came for its call, as `Leafwise` does it."""
        for owner, own in leafwise_slots(module)[1]:
            _wrap_forward(owner, functools.partial(self._with_weights, own))

    def _with_weights(self, own: list[Slot], forward: Callable[..., Any]) -> Callable[..., Any]:
        def brought(*args: Any, **kwargs: Any) -> Any:
            # Counted for as long as anything holds on to them, such as a view that the module gives.
            for slot in own:
                raw = slot.tensor.raw  # type: ignore[attr-defined]
                slot.holder[slot.key] = wrap(
                    torch.empty_like(raw) if raw.is_meta else raw.clone(), self.card.allocate_beside
                )
            try:
                return forward(*args, **kwargs)
            finally:
                for slot in own:
                    slot.restore()

        return brought

    def _counted(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.operations
            result = forward(*args, **kwargs)
            self.blocks[index] += self.operations - before
            return result

        return counted


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
            plain = self.book.told(held, call.plain, call.beside)
        else:
            result, operations, blocks = self.structure.run(args, kwargs)
            plain, beside = self.book.close_interval()
            given = {id(t.allocation): t.allocation.nbytes for t in tree_flatten(result)[0] if isinstance(t, SimTensor)}
            # One that leaves tables behind for later calls is run once more, to see one that finds them.
            settled = call is not None or self.book.card.allocated_bytes() <= held + sum(given.values())
            shapes = tree_map_only(torch.Tensor, _Shape.of, result)
            call = _Call(plain - held, beside - held, operations, blocks, shapes, settled)
            self.calls[key] = call
        seen.add(plain, call.operations, call.blocks)
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
            plain = self.book.told(held, call.plain, call.beside)
        else:
            call = self._seen(held, args, kwargs)
            self.known.add(kind, tokens, call)
            result, plain = call.given.make(), held + call.plain
        self.left = card.allocate(call.left)
        seen.add(plain, call.operations, call.blocks)
        return result

    def _seen(self, held: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        card = self.book.card
        if self.structure is None:
            self.structure = _Structure(self.unit.skeleton(), "forward", card, {})
        result, operations, blocks = self.structure.run(args, kwargs)
        plain, beside = self.book.close_interval()
        given, with_result = Given.of(result), card.allocated_bytes()
        del result
        left = max(0, card.allocated_bytes() - held)
        given, lost = given.with_objects(max(0, with_result - held - left - sum(given.storages)))
        return Call(plain - held, beside - held, left + lost, operations, tuple(blocks), given)


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


def _wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    vars(module)["forward"] = wrapper(module.forward)


def _kind_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """What makes two calls alike: shapes, dtypes, and the values of masks and ids."""
    leaves, structure = tree_flatten((args, kwargs))
    return (str(structure), *map(_kind, leaves))


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str | int | float | bool | None) else type(value)
    raw = value.raw if isinstance(value, SimTensor) else value
    # Not those of timesteps, which are rows of numbers too in some families.
    known = not raw.is_meta and not raw.is_floating_point() and raw.ndim > 1 and raw.numel() <= _COMPARED_ELEMENTS
    return tuple(raw.shape), raw.dtype, tuple(raw.flatten().tolist()) if known else None
