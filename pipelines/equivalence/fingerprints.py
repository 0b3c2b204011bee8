"""Echoes: modules without weights, whose results have their true shapes and made-up values.

The values follow from all that a call was given, tensors and plain values. So two runs through echoes end alike only
where they called the same modules with the same things.
"""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ...memory.planning.dry_run import StandIns, lay_stand_ins, lay_weights
from ...memory.planning.known_calls import kind_of
from ...memory.simulated.dry import DEVICE, dry_card
from ...memory.simulated.tensor import SimTensor
from ...memory.weights.batch import BatchDims, batch_of, in_parts, joined
from ..stock.answers import closed, opened

_LARGEST = 10.0  # of a value that counts: masks hold minus infinity
_MOST_ELEMENTS = 2**24  # of a result that has values of its own
_PEEKED = 64  # numbers
_KEPT = 256  # rows of noise, of 0.5 MB at most: an encoder gives as many states as it has layers
_FILLED = "diffusers.models.transformers."  # where the classes of objects are that calls fill
_ROW = 2**16  # of noise: of more there are rows, each as much louder or softer, which costs no sine for each


class Echo:
    """Answers for a module: `face` is one like it, on the CPU, in float32.

    `build` makes its structure with parameters on `meta`, which each kind of call runs once, on shapes. `methods` are
    those of the module, beside `forward`, that are answered as one call. `calls` tells what came to the module itself:
    the method, and a number that follows from its tensors. `parts_called` names modules in it that were called alone.
    `draws` says that a call drew noise of a generator that it was given.
    """

    def __init__(self, build: Callable[[], nn.Module], stand_ins: StandIns, methods: Sequence[str] = ()) -> None:
        self.face, self._inner = build().float(), build().float()
        vars(self.face)["_runs_on"] = torch.device("cpu")
        self.calls: list[tuple[str, float]] = []
        self.parts_called = set[str]()
        self.draws = False
        self._shapes: dict[Any, Any] = {}
        self._told: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()  # to objects that calls fill
        self._noise = functools.lru_cache(maxsize=_KEPT)(_noise)
        lay_stand_ins(self._inner, stand_ins)
        with dry_card() as card:
            lay_weights(self._inner, card)
        for name, module in self.face.named_modules():
            for method in ("forward", *(methods if not name else ())):
                original = getattr(module, method)
                answer = functools.partial(self._answer, name, method)
                vars(module)[method] = functools.update_wrapper(answer, original)

    def _answer(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return closed(self._opened_answer(name, method, args, kwargs))

    def _opened_answer(self, name: str, method: str, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, {name: value for name, value in kwargs.items() if name != "return_dict"}))
        heard = self._digest([value for value in leaves if isinstance(value, torch.Tensor)])
        heard += _number_of([value for value in leaves if isinstance(value, str | int | float)])
        hooked = tuple(within for within, module in self.face.named_modules() if within and module._forward_hooks)
        key = name, method, hooked, kind_of(args, kwargs)
        filled = [value for value in leaves if type(value).__module__.startswith(_FILLED)]
        heard += sum(self._told.get(one, 0.0) for one in filled)
        self._told.update(dict.fromkeys(filled, heard))
        if filled or key not in self._shapes:  # a cache of keys and values is filled by each run anew
            called = getattr(self._inner.get_submodule(name), method)
            self._shapes[key] = self._run(called, hooked, args, kwargs)
        answer, within, draws = self._shapes[key]
        if draws:
            heard += self._digest([_peek(one) for one in leaves if isinstance(one, torch.Generator)])
        if not name:
            self.calls.append((method, heard))
        self.parts_called |= {name} if name else set()
        numbers = itertools.count(1 + len(tree_leaves(answer)))  # the answer has the first, with hooks and without
        for hooked_name, calls in within.items():
            for call in calls:
                given, result = self._made(call, heard, numbers)
                changed = _tell(self.face.get_submodule(hooked_name), given, result)
                heard += self._digest([each for each in tree_leaves(changed) if isinstance(each, torch.Tensor)])
        return self._made(answer, heard, itertools.count(1))

    def _made(self, shapes: Any, heard: float, numbers: Iterator[int]) -> Any:
        """Return values for all shapes of a tree, each with a number of its own."""
        return tree_map_only(torch.Tensor, lambda raw: self._made_up(raw, heard, next(numbers)), shapes)

    def _run(self, called: Callable[..., Any], hooked: Sequence[str], args: Any, kwargs: Any) -> Any:
        """Return the shapes of the answer, and of each hooked module's input and output, and whether it drew noise."""
        within: dict[str, list[Any]] = {}
        with ExitStack() as hooks, torch.inference_mode(), dry_card():
            for name in hooked:

                def keep(module: nn.Module, args: Any, made: Any, name: str = name) -> None:
                    within.setdefault(name, []).append((args, made))

                hooks.enter_context(_removed(self._inner.get_submodule(name).register_forward_hook(keep)))
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), (args, kwargs))
            before = tree_leaves((args, kwargs))
            args, kwargs = tree_map_only(torch.Generator, torch.Generator.clone_state, (args, kwargs))
            made = opened(called(*args, **kwargs)), within
            pairs = [
                pair
                for pair in zip(before, tree_leaves((args, kwargs)), strict=True)
                if isinstance(pair[0], torch.Generator)
            ]
            draws = any(not torch.equal(one.get_state(), other.get_state()) for one, other in pairs)
            self.draws |= draws
            return *tree_map_only(SimTensor, lambda tensor: tensor.raw, made), draws

    def _digest(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return a number that depends smoothly on every value, so that rounding hardly changes it."""
        total = 0.0
        for place, tensor in enumerate(tensors, 1):
            if tensor.numel() > _MOST_ELEMENTS:
                total += place * float(tensor.sum(dtype=torch.float64)) / tensor.numel() ** 0.5
                continue
            values = tensor.detach().double().flatten().nan_to_num().clamp(-_LARGEST, _LARGEST)
            size = max(1, len(values)) ** 0.5
            if len(values) <= _ROW:
                total += float(values @ self._noise(len(values), place)) / size
            else:
                rows = nn.functional.pad(values, (0, -len(values) % _ROW)).view(-1, _ROW)
                total += float(rows @ self._noise(_ROW, place) @ self._loudness(len(rows), place)) / size
        return total

    def _made_up(self, raw: torch.Tensor, heard: float, number: int) -> torch.Tensor:
        if not raw.is_floating_point():
            return torch.zeros((), dtype=raw.dtype).expand(raw.shape).clone() if raw.is_meta else raw.clone()
        if raw.numel() > _MOST_ELEMENTS:  # the logits of a text encoder, which nobody reads
            return torch.tensor(heard + number).sin().to(raw.dtype).expand(raw.shape)
        count = raw.numel()
        made = torch.sin(4 * self._noise(min(count, _ROW), number) + heard).to(raw.dtype)
        if count > _ROW:
            loudness = self._loudness(-(-count // _ROW), number).to(raw.dtype)
            made = torch.outer(loudness, made).flatten()[:count]
        return made.reshape(raw.shape)

    def _loudness(self, rows: int, number: int) -> torch.Tensor:
        """By how much each row of noise is louder than another, in 0.5..1."""
        return 0.75 + self._noise(rows, -number) / 8


class EchoOfEach(Echo):
    """Answers for a module whose results for a sample follow from this sample alone, as those of transformers do.

    Which part of a call belongs to which sample `memory.weights.batch` tells; `dims` as there.
    """

    dims: BatchDims = {}

    def _opened_answer(self, name: str, method: str, args: Any, kwargs: Any) -> Any:
        parts = in_parts(args, kwargs, self.dims, batch_of(args, kwargs, self.dims))
        return joined([super(EchoOfEach, self)._opened_answer(name, method, tuple(some), of) for some, of in parts])


def _peek(generator: torch.Generator) -> torch.Tensor:
    """Return noise that a generator would draw next, and leave it as it is."""
    return torch.randn(_PEEKED, generator=generator.clone_state())


@contextmanager
def _removed(hook: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def _tell(module: nn.Module, given: tuple[Any, ...], result: Any) -> Any:
    """Call the forward hooks of a module that is not run itself. Return what the last gives in place of its result.

    Of another shape than the result, raises RuntimeError.
    """
    changed = None
    for number, hook in module._forward_hooks.items():
        more: tuple[Any, ...] = ({},) if number in module._forward_hooks_with_kwargs else ()
        made = hook(module, given, *more, result if changed is None else changed)
        changed = changed if made is None else made
    if changed is not None and getattr(changed, "shape", None) != getattr(result, "shape", ()):
        raise RuntimeError("a hook changes what a module gives")
    return changed


def _number_of(words: Sequence[Any]) -> float:
    """Hash plain values to a number from 0 to 1."""
    return zlib.crc32(repr(words).encode()) / 2**32


def _noise(count: int, number: int) -> torch.Tensor:
    """Return `count` numbers in -2..2 that look random and are always the same."""
    return 2 * (torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + number) * 43758.5453).frac()
