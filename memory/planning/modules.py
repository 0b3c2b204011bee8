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
from ..weights.structure import ParameterRef, empty_on_meta, is_called, own_refs, parameter_refs
from .forecast import HeldBytes, ModuleOperations, OnceModule, Operations
from .repeats import Repeats, Result, Walked, contents, counters, has_repeats, storages_of
from .taint import Mark, Marks, Seen, is_in


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
    at any time. Both cases decide the groups: see `whole` and `outside` of `UnitForecast`. Calls alike are walked once:
    see `Repeats`.
    """

    def __init__(self, module: nn.Module, tables: Collection[str], card: Card) -> None:
        """Replace the `forward` of each inner module. `tables` are the paths of embeddings whose rows are looked up."""
        self._card = card
        self._operations: dict[str, Operations] = {}
        self._held: dict[str, int] = {}
        self._begun = 0
        self._at, self._since = "", Operations()
        self._stack: list[str] = []
        self._owner_of: dict[int, str] = {}
        self._whole: set[str] = set()
        self._outside: set[str] = set()
        self._marks, self._seen = Marks(), dict[str, Seen]()
        self.step_bytes = self.argument_bytes = 0  # of the last call's arguments, see `UnitForecast`
        self.side_bytes = 0  # the most that it made without latents
        self._repeats = Repeats(module, self._marks.of)
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
            if has_repeats(inner):
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
        unlike, before = self._repeats.unlike, self._at
        begun, side, kept_in_ram = card.allocated_bytes(), self._marks.other_bytes, card.kept_in_ram
        with self._apart() as inside:
            result = forward(*args, **kwargs)
            self._next(self._at)
        if not any(vars(inside.operations.get(before, Operations())).values()):
            inside.operations.pop(before, None)  # the module before, to which what runs first is credited
        here = all(is_in(at, path) for at in (*inside.operations, *inside.held, self._at))
        told = Result.of(result, args, kwargs)
        if told is None or not here or unlike != self._repeats.unlike:
            return result
        came, cut = storages_of((args, kwargs)), len(path)
        made = [t for t in tensors_in(result) if isinstance(t, SimTensor) and id(t.allocation) not in came]
        if card.allocated_bytes() - begun != sum(storages_of(made).values()):
            return result
        marks = [self._marks.told(tensor) for tensor in made]
        walked = Walked(
            told,
            [(mark.within(path), counts) for mark, counts in marks],
            inside.peak_bytes - begun,
            inside.side_bytes - side,
            card.kept_in_ram - kept_in_ram,
            {at[cut:]: done for at, done in inside.operations.items()},
            {at[cut:]: nbytes - begun + self._begun for at, nbytes in inside.held.items()},
            {at[cut:]: replace(seen, mark=seen.mark.within(path)) for at, seen in inside.seen.items()},
            self._at[cut:],
            contents(args, kwargs),
        )
        self._repeats.keep(key, self._repeats.key(module, card.times, args, kwargs), walked)
        return result

    def _again(self, path: str, walked: Walked, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count a call as `walked`, and return its result."""
        card = self._card
        held = card.allocated_bytes() - self._begun
        for at, nbytes in walked.held.items():
            self._held[path + at] = max(held + nbytes, self._held.get(path + at, 0))
        for at, done in walked.operations.items():
            self._operations[path + at] = self._operations.get(path + at, Operations()) + done
            card.repeat(done.products, done.attention)
        for at, seen in walked.seen.items():
            self._note(path + at, replace(seen, mark=seen.mark.at(path)))
        self._at, self._since = path + walked.last, done_by(card)
        for counts, counted in zip(counters(args, kwargs), walked.counted, strict=True):
            counts[:] = counted
        card.kept_in_ram += walked.kept_in_ram
        card.allocate(walked.peak_bytes)  # and freed at once: the peak has seen them
        self._marks.rise(walked.side_bytes)
        result, made = walked.result.make(args, kwargs)
        for tensor, (mark, is_other) in zip(made, walked.marks, strict=True):
            self._marks.tell(tensor, mark.at(path), is_other)  # type: ignore[arg-type]
        return result

    @contextmanager
    def _apart(self) -> Iterator[_Inside]:
        """Count what is called until the block ends by itself, too."""
        card, marks, inside = self._card, self._marks, _Inside()
        operations, held, seen = self._operations, self._held, self._seen
        peak, side = card.take_interval_peak(), marks.take_most_bytes()
        self._operations, self._held, self._seen = inside.operations, inside.held, inside.seen
        try:
            yield inside
        finally:
            self._operations, self._held, self._seen = operations, held, seen
            for at, done in inside.operations.items():
                operations[at] = operations.get(at, Operations()) + done
            for at, nbytes in inside.held.items():
                held[at] = max(nbytes, held.get(at, 0))
            for at, one in inside.seen.items():
                self._note(at, one)
            inside.peak_bytes, inside.side_bytes = card.take_interval_peak(), marks.take_most_bytes()
            card.allocate(max(0, max(peak, inside.peak_bytes) - card.allocated_bytes()))  # the peak until now
            marks.rise(max(side, inside.side_bytes) - marks.other_bytes)

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
                self._note(path, self._saw(path, own, given, result))
            return result
        finally:
            self._stack.pop()
            for ref in own:
                ref.restore()
            if any(allocation() is not None for allocation in came):
                self._outside.add(path)
                self._repeats.unlike += 1

    def _saw(self, path: str, own: list[ParameterRef], given: Mark, result: Any) -> Seen:
        """Return what a call of a module with weights saw and gave. It saw latents if its result was made of them."""
        made = {id(t.allocation): t.nbytes for t in tensors_in(result) if isinstance(t, SimTensor)}
        mark = given | self._marks.of(result)
        self._marks.needing(result, path)
        mark = replace(mark, needs=mark.needs - {path})
        return Seen(sum(ref.tensor.nbytes for ref in own), sum(made.values()), mark)

    def _note(self, path: str, seen: Seen) -> None:
        """Add a call to those of a module with weights."""
        self._seen[path] = seen | self._seen[path] if path in self._seen else seen

    def _looked_up(
        self, path: str, own: list[ParameterRef], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a call of a table, which gets rows of its weight as shapes."""
        table = own[0].tensor

        def fetch(ids: torch.Tensor) -> torch.Tensor:
            return torch.empty(ids.numel(), table.shape[1], dtype=table.dtype, device=DEVICE)

        with LookUp(table, fetch):
            result = forward(*args, **kwargs)
        self._marks.add(result, self._marks.of((args, kwargs)))
        return result

    def _bring(self, ref: ParameterRef) -> weakref.ref[Allocation]:
        """Put a copy of a weight in its place. Return a reference that is dead once nobody holds the copy."""
        raw = ref.tensor.raw  # type: ignore[attr-defined]
        tensor = wrap(empty_on_meta(raw) if raw.is_meta else raw.clone(), lambda nbytes: self._card.allocate(0))
        ref.holder[ref.key] = tensor
        return weakref.ref(tensor.allocation)

    def _read(self, owner: str) -> None:
        """Note that the weights of the module `owner` are read while it is not called."""
        self._repeats.unlike += 1
        reader = self._stack[-1] if self._stack else ""
        common = _common(owner, reader)
        if common and common != owner:
            self._whole.add(common)
        else:
            self._outside.add(owner)


@dataclass
class _Inside:
    """What ran inside a call, by path, the card's peak meanwhile, and the most bytes made without latents."""

    operations: dict[str, Operations] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    peak_bytes: int = 0
    side_bytes: int = 0


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


def _common(first: str, second: str) -> str:
    """Return the path of the smallest module that holds both."""
    shared = []
    for one, other in zip(first.split("."), second.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)
