"""Watch a module on the card of a dry run: the order of the calls inside, and who reads whose weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..simulated.card import Allocation, Card
from ..simulated.dry import DEVICE
from ..simulated.operators import Observer, tensors_in
from ..simulated.tensor import SimTensor, wrap
from ..weights.embeddings import LookUp
from ..weights.structure import ParameterRef, is_called, own_refs, parameter_refs
from .forecast import HeldBytes, ModuleOperations, OnceModule, Operations
from .repeats import Repeats, Walked, contents, counters, has_repeats, made_again, shapes_of, storages_of
from .taint import Mark, Marks


def done_by(card: Card) -> Operations:
    """Return the operations that the card of a dry run has done so far.

    Its clock counts one operation as one second.
    """
    stats = card.stats()
    return Operations(stats.product_seconds, stats.attention_seconds)


class ModuleWatch:
    """The calls inside a module whose weights are on the card already, at no cost there.

    During each call of an inner module, its own weights are replaced by copies. So an operator that meets an original
    weight runs outside that module's call. A copy that is still alive after the call is held by someone, who may use it
    at any time. Both cases decide the groups: see `whole` and `outside` of `UnitForecast`.
    """

    def __init__(self, module: nn.Module, tables: Collection[str], card: Card, repeats: bool = False) -> None:
        """Replace the `forward` of each inner module. `tables` are the paths of embeddings whose rows are looked up.

        With `repeats` calls alike are walked once. `once` then knows the first of modules built alike only.
        """
        self._card = card
        self._operations: dict[str, Operations] = {}
        self._held: dict[str, int] = {}
        self._begun = 0
        self._at, self._since = "", Operations()
        self._stack: list[str] = []
        self._owner_of: dict[int, str] = {}
        self._whole: set[str] = set()
        self._outside: set[str] = set()
        self._marks, self._seen = Marks(), dict[str, _Seen]()
        self.step_bytes = self.argument_bytes = 0  # of the last call's arguments, see `UnitForecast`
        self.side_bytes = 0  # the most that it made without latents
        self._repeats = Repeats()
        weighty = {id(inner) for inner in module.modules() if any(True for _ in parameter_refs(inner))}
        for path, inner in module.named_modules():
            if not path or not is_called(inner):
                continue
            own = [ref for ref in own_refs(inner) if ref.key not in inner._non_persistent_buffers_set]
            self._owner_of.update((id(ref.tensor), path) for ref in own)
            run = self._called if path not in tables else self._looked_up
            vars(inner)["forward"] = functools.partial(run, path, own, inner.forward)
            if id(inner) in weighty:
                vars(inner)["forward"] = functools.partial(self._entered, path, vars(inner)["forward"])
            if repeats and has_repeats(inner):
                vars(inner)["forward"] = functools.partial(self._repeated, path, inner, vars(inner)["forward"])

    @contextmanager
    def watching(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Start counting anew, and count until the block ends. `whole`, `outside` and `once` add up over all blocks.

        `arguments` are those of the module's call, by name.
        """
        self.step_bytes, self.argument_bytes = self._marks.mark_call(arguments)
        self._marks.take_most_bytes()
        self._operations, self._held, self._begun = {}, {}, self._card.allocated_bytes()
        self._at, self._since, self._stack = "", done_by(self._card), []
        outer = self._card.observers
        self._card.observers = (_Readers(self._owner_of, self._read, self._marks), *outer)
        try:
            yield
        finally:
            self._card.observers = outer
        self.side_bytes = self._marks.take_most_bytes()
        self._next("")

    @property
    def operations(self) -> ModuleOperations:
        """Operations by path, in the order of the first calls.

        Those of a path run from the call of a module with weights until that of the next one.
        """
        return tuple(self._operations.items())

    @property
    def held(self) -> HeldBytes:
        """The most bytes at the call of each module, beyond those held when watching began."""
        return tuple(self._held.items())

    @property
    def whole(self) -> tuple[str, ...]:
        """Modules that read the weights of others inside them, so far."""
        return tuple(sorted(self._whole))

    @property
    def outside(self) -> tuple[str, ...]:
        """Modules whose weights are read elsewhere, or at other times, so far."""
        return tuple(sorted(self._outside))

    @property
    def once(self) -> tuple[OnceModule, ...]:
        """Modules with weights that saw no latents in any call so far, by their first calls."""
        return tuple(
            OnceModule(path, seen.weight_bytes, seen.row_bytes, mark.per_step, mark.per_pass, tuple(sorted(mark.needs)))
            for path, seen in self._seen.items()
            if not (mark := seen.mark).latents and path not in self._outside
        )

    def _next(self, path: str) -> None:
        """Credit the operations since the last call of this to the module before, and go on with `path`."""
        now = done_by(self._card)
        self._operations[self._at] = self._operations.get(self._at, Operations()) + (now - self._since)
        self._at, self._since = path, now

    def _repeated(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Walk a call, or answer it by an earlier one of its kind."""
        card = self._card
        key = self._repeats.key(module, card.times, args, kwargs)
        self._next(self._at)
        if walked := self._repeats.find(key):
            return self._again(path, walked, args, kwargs)
        came = storages_of((args, kwargs)).keys()
        before, known, begun = self._at, (set(self._whole), set(self._outside)), card.allocated_bytes()
        with self._apart() as inside:
            result = forward(*args, **kwargs)
            self._next(self._at)
        if not any(vars(inside.operations.get(before, Operations())).values()):
            inside.operations.pop(before, None)  # the module before, to which what runs first is credited
        here = all(_is_in(at, path) for at in (*inside.operations, *inside.held, self._at))
        left = card.allocated_bytes() - begun - sum(storages_of(result).values())
        shapes = shapes_of(result, came)
        if left or shapes is None or not here or known != (self._whole, self._outside):
            return result
        cut = len(path)
        walked = Walked(
            shapes,
            inside.peak_bytes - begun,
            {at[cut:]: done for at, done in inside.operations.items()},
            {at[cut:]: nbytes - begun + self._begun for at, nbytes in inside.held.items()},
            self._at[cut:],
            contents(args, kwargs),
        )
        self._repeats.keep(key, self._repeats.key(module, card.times, args, kwargs), walked)
        return result

    def _again(self, path: str, walked: Walked, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count a call as `walked`, and return its result."""
        card, mark = self._card, self._marks.of((args, kwargs))
        held = card.allocated_bytes() - self._begun
        for at, nbytes in walked.held.items():
            self._held[path + at] = max(held + nbytes, self._held.get(path + at, 0))
        for at, done in walked.operations.items():
            self._operations[path + at] = self._operations.get(path + at, Operations()) + done
            card.repeat(done.products, done.attention)
        self._at, self._since = path + walked.last, done_by(card)
        for counts, counted in zip(counters(args, kwargs), walked.counted, strict=True):
            counts[:] = counted
        card.allocate(walked.peak_bytes)  # and freed at once: the peak has seen them
        observers, card.observers = card.observers, ()  # to which the result would be made of nothing
        result = made_again(walked.result)
        card.observers = observers
        self._marks.add(result, mark)
        return result

    @contextmanager
    def _apart(self) -> Iterator[_Inside]:
        """Count what is called until the block ends by itself, too."""
        card, inside = self._card, _Inside()
        operations, held, peak = self._operations, self._held, card.take_interval_peak()
        self._operations, self._held = inside.operations, inside.held
        try:
            yield inside
        finally:
            self._operations, self._held = operations, held
            for at, done in inside.operations.items():
                operations[at] = operations.get(at, Operations()) + done
            for at, nbytes in inside.held.items():
                held[at] = max(nbytes, held.get(at, 0))
            inside.peak_bytes = card.take_interval_peak()
            card.allocate(max(0, max(peak, inside.peak_bytes) - card.allocated_bytes()))  # the peak until now

    def _entered(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the bytes held when a module is called."""
        held = self._card.allocated_bytes() - self._begun
        self._held[path] = max(held, self._held.get(path, 0))
        return forward(*args, **kwargs)

    def _called(
        self, path: str, own: list[ParameterRef], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a call with copies of the module's own weights in place."""
        if own:
            self._next(path)
        self._stack.append(path)
        came = [self._bring(ref) for ref in own]
        given = self._marks.of((args, kwargs))
        try:
            result = forward(*args, **kwargs)
            if own:
                self._note(path, own, given, result)
            return result
        finally:
            self._stack.pop()
            for ref in own:
                ref.restore()
            if any(allocation() is not None for allocation in came):
                self._outside.add(path)

    def _note(self, path: str, own: list[ParameterRef], given: Mark, result: Any) -> None:
        """Note what a module with weights saw and gave. It saw latents too if it gave something made of them."""
        made = {id(t.allocation): t.nbytes for t in tensors_in(result) if isinstance(t, SimTensor)}
        before = self._seen.get(path)
        mark = given | self._marks.of(result)
        self._marks.needing(result, path)
        self._seen[path] = _Seen(
            sum(ref.tensor.nbytes for ref in own),
            max(sum(made.values()), before.row_bytes if before else 0),
            replace(mark, needs=mark.needs - {path}) | (before.mark if before else mark),
        )

    def _looked_up(
        self, path: str, own: list[ParameterRef], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a call of a table, which gets rows of its weight as shapes."""
        table = own[0].tensor

        def fetch(ids: torch.Tensor) -> torch.Tensor:
            return torch.empty(ids.numel(), table.shape[1], dtype=table.dtype, device=DEVICE)

        with LookUp(table, fetch):
            return forward(*args, **kwargs)

    def _bring(self, ref: ParameterRef) -> weakref.ref[Allocation]:
        """Put a copy of a weight in its place. Return a reference that is dead once nobody holds the copy."""
        raw = ref.tensor.raw  # type: ignore[attr-defined]
        tensor = wrap(torch.empty_like(raw) if raw.is_meta else raw.clone(), lambda nbytes: self._card.allocate(0))
        ref.holder[ref.key] = tensor
        return weakref.ref(tensor.allocation)

    def _read(self, owner: str) -> None:
        """Note that the weights of the module `owner` are read while it is not called."""
        reader = self._stack[-1] if self._stack else ""
        common = _common(owner, reader)
        if common and common != owner:
            self._whole.add(common)
        else:
            self._outside.add(owner)


@dataclass
class _Inside:
    """What ran inside a call, by path, and the card's peak meanwhile."""

    operations: dict[str, Operations] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0


@dataclass(frozen=True)
class _Seen:
    """The facts of a module with weights: its bytes, those of its largest result, and what its calls saw."""

    weight_bytes: int
    row_bytes: int
    mark: Mark


class _Readers(Observer):
    """Calls `tell` with the owner of each original weight that an operator meets, and adds to the `marks` of tensors.

    Weights are known by `id`.
    """

    def __init__(self, owner_of: dict[int, str], tell: Callable[[str], None], marks: Marks) -> None:
        self._owner_of, self._tell = owner_of, tell
        self.after = marks.operator  # type: ignore[method-assign]

    def before(self, given: list[torch.Tensor]) -> None:
        for value in given:
            if id(value) in self._owner_of:
                self._tell(self._owner_of[id(value)])


def _is_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _common(first: str, second: str) -> str:
    """Return the path of the smallest module that holds both."""
    shared = []
    for one, other in zip(first.split("."), second.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)
