"""Follow what the operators of a dry run see: latents, the timestep, text, and the weights of which modules."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..simulated.card import Allocation
from ..simulated.operators import tensors_in
from ..simulated.tensor import SimTensor

if TYPE_CHECKING:
    import torch

_LATENTS = re.compile(r"(?!encoder_|output_)(.*hidden_states|.*residuals?|.*latents|.*controlnet.*|sample|x)$")
_STEP = re.compile(r"(.*timesteps?|.*sigmas?|t)$")
_INSIDE = "\0"  # begins a path that is counted from a module


@dataclass(frozen=True)
class Mark:
    """What a tensor was made of. `needs` are the paths of the modules whose weights it saw, if it saw no latents."""

    latents: bool = False
    per_step: bool = False
    per_pass: bool = False
    needs: frozenset[str] = frozenset()

    def __or__(self, other: Mark) -> Mark:
        if self.latents or other.latents:
            return OF_LATENTS
        if other in (self, UNMARKED):
            return self
        both = self.per_step or other.per_step, self.per_pass or other.per_pass
        return Mark(False, *both, self.needs | other.needs)

    def within(self, path: str) -> Mark:
        """Return the mark with the paths of the module `path` and of those inside counted from it."""
        return self._renamed(lambda name: _INSIDE + name[len(path) :] if is_in(name, path) else name)

    def at(self, path: str) -> Mark:
        """Undo `within`, for a module of another path."""
        return self._renamed(lambda name: path + name[len(_INSIDE) :] if name.startswith(_INSIDE) else name)

    def _renamed(self, rename: Callable[[str], str]) -> Mark:
        return replace(self, needs=frozenset(map(rename, self.needs))) if self.needs else self


@dataclass(frozen=True)
class Seen:
    """The facts of a module with weights: its bytes, those of its largest result, and what its calls saw."""

    weight_bytes: int
    row_bytes: int
    mark: Mark

    def __or__(self, other: Seen) -> Seen:
        return Seen(self.weight_bytes, max(self.row_bytes, other.row_bytes), self.mark | other.mark)


UNMARKED = Mark()
OF_LATENTS = Mark(latents=True)


def named_arguments(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    signature = inspect.signature(forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def is_of_latents(name: str) -> bool:
    """Return whether an argument of this name of a transformer changes with the latents, by diffusers' names."""
    return _LATENTS.match(name) is not None


def is_of_step(name: str) -> bool:
    """Return whether an argument of this name of a transformer changes with the timestep."""
    return _STEP.match(name) is not None


def is_in(path: str, outer: str) -> bool:
    """Return whether `path` is that of the module `outer` or of one inside."""
    return path == outer or path.startswith(f"{outer}.")


class Marks:
    """The marks of tensors. Tensors on a dry run's card share one with all that share their storage."""

    def __init__(self) -> None:
        self._of_storage: weakref.WeakKeyDictionary[Allocation, Mark] = weakref.WeakKeyDictionary()
        self._others: dict[weakref.ref[Allocation], int] = {}  # what operators made that saw no latents, while it lives
        self._other_bytes = self._most_bytes = 0

    def of(self, values: Any) -> Mark:
        """Return the mark of all tensors in a tree together."""
        return self._of(tensors_in(values))

    def _of(self, tensors: Sequence[torch.Tensor]) -> Mark:
        found = UNMARKED
        for tensor in tensors:
            if isinstance(tensor, SimTensor):
                found |= self._of_storage.get(tensor.allocation, UNMARKED)
            else:
                found |= vars(tensor).get("_ballast_mark", UNMARKED)
            if found is OF_LATENTS:
                break
        return found

    def add(self, values: Any, mark: Mark) -> None:
        """Add a mark to all tensors in a tree."""
        for tensor in tensors_in(values):
            known = self._of((tensor,))
            if known is OF_LATENTS:
                continue
            if isinstance(tensor, SimTensor):
                self._of_storage[tensor.allocation] = known | mark
            else:
                vars(tensor)["_ballast_mark"] = known | mark

    def mark_call(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Mark the arguments of a transformer's call by their names. All are latents where no name tells of any.

        Return the bytes of those that change with the timestep, and of the others that are not latents.
        """
        known = any(map(is_of_latents, arguments))
        others: dict[bool, dict[Allocation, int]] = {True: {}, False: {}}
        for name, value in arguments.items():
            if not known or is_of_latents(name):
                self.add(value, OF_LATENTS)
            else:
                step = is_of_step(name)
                self.add(value, Mark(per_step=step, per_pass=not step))
                storages = [each.allocation for each in tensors_in(value) if isinstance(each, SimTensor)]
                others[step] |= {storage: storage.nbytes for storage in storages}
        return sum(others[True].values()), sum(others[False].values())

    def operator(self, func: Any, args: tuple, kwargs: dict, given: Sequence[torch.Tensor], result: Any) -> None:
        """Mark the result of an operator, and the arguments that it writes to, with all that it read: `given`."""
        if not (mark := self._of(given)).latents:
            read = {id(t.allocation) for t in given if isinstance(t, SimTensor)}
            for made in tensors_in(result):
                if isinstance(made, SimTensor) and id(made.allocation) not in read:
                    self._count(made.allocation)
        if mark == UNMARKED:
            return
        self.add(result, mark)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info and argument.alias_info.is_write:
                    self.add(value, mark)
            for argument in func._schema.arguments:
                if argument.alias_info and argument.alias_info.is_write and argument.name in kwargs:
                    self.add(kwargs[argument.name], mark)

    def told(self, tensor: SimTensor) -> tuple[Mark, bool]:
        """Return the mark of a tensor, and whether its bytes count among those made without latents."""
        return self._of((tensor,)), weakref.ref(tensor.allocation) in self._others

    def tell(self, tensor: SimTensor, mark: Mark, is_other: bool) -> None:
        """Give a new tensor the mark of one that it stands for: see `told`."""
        self._of_storage[tensor.allocation] = mark
        if is_other and weakref.ref(tensor.allocation) not in self._others:
            self._count(tensor.allocation)

    def _count(self, made: Allocation) -> None:
        """Count a storage that saw no latents, for as long as it lives."""
        self._others[weakref.ref(made, self._freed)] = made.nbytes
        self._other_bytes += made.nbytes
        self.rise(0)

    def rise(self, nbytes: int) -> None:
        """Count that `nbytes` more were made without latents for a while."""
        self._most_bytes = max(self._most_bytes, self._other_bytes + nbytes)

    @property
    def other_bytes(self) -> int:
        """The bytes made without latents that live now."""
        return self._other_bytes

    def _freed(self, storage: weakref.ref[Allocation]) -> None:
        self._other_bytes -= self._others.pop(storage)

    def take_most_bytes(self) -> int:
        """Return the most bytes since the last call of this that were made without latents and lived together."""
        taken, self._most_bytes = self._most_bytes, self._other_bytes
        return taken

    def needing(self, values: Any, path: str) -> None:
        """Note that the tensors of a tree were made by the module `path`, unless they saw latents."""
        if not (mark := self.of(values)).latents:
            self.add(values, replace(mark, needs=mark.needs | {path}))
