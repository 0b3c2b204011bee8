"""Names of the files that a model is published in: each layer's rows go where a converter of its weights puts them.

Where one layer becomes several, such as queries, keys and values, each gets its rows of B, and all of A.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.weights.changes import Shape
from ...memory.weights.products import Runs
from ...memory.weights.stored import Stored
from ..files.checkpoint import Places
from ..files.rows import Rows, Run, Widths, whole
from ..files.single.layouts import Layout, Shapes
from ..files.single.transformers import LAYOUTS
from .layer_tensors import LayerTensors, Tensors, grouped
from .names import Place, flat, parsed, plain, targets

Converters = Mapping[str, Callable[[Places], Places]]
Taken = dict[str, list[Run]]  # by parameter of the module: the rows of which weights it is
Take = Callable[[Mapping[str, Shape]], Taken]

_FAILURES = LookupError, ValueError, RuntimeError, AttributeError, TypeError, ArithmeticError  # of converters
_MOST_BLOCKS = 999
_MOST_SPELLINGS = 4096  # of one name with underscores
_SPAN = 2**40  # bytes, more than any weight has
_NUMBER = re.compile(r"(?<![^_])\d+(?![^_])")  # between underscores
_BLOCK = re.compile(r"([a-z_]+)\.(\d+)\.")
_EMBEDDERS = ("x_embedder.weight", "x_embedder.proj.weight")  # whose width is that of the blocks
_WIDE = ("img_in.weight", "img_in.proj.bias", "x_embedder.weight")  # as files call them
# Blocks that converters take for granted; those of some models differ in the last one.
_BLOCKS = (
    "double_blocks",
    "single_blocks",
    "joint_blocks",
    "double_layers",
    "single_layers",
    "blocks",
    "distilled_guidance_layer.layers",
)
_UNET = Layout(
    "Stable Diffusion",
    ("UNet2DConditionModel",),
    (),
    (),
    "convert_ldm_unet_checkpoint",
    lambda shapes, config: {},
    frozenset(),
    prefix="model.diffusion_model.",
)


def by_weights(
    path: Path, tensors: Tensors, modules: Mapping[str, nn.Module], converters: Converters
) -> dict[Place, LayerTensors]:
    """Return the tensors named as weights in the files of these modules, by what they change.

    `converters` are those of families with code of their own. Names without a component are of the first of two
    experts.
    """
    takes = {name: take for name, module in modules.items() if (take := _take_of(name, module, converters))}
    found = {}
    for component, take in takes.items():
        others = takes.keys() - {component} if component == next(iter(takes)) else None
        named = _named(tensors, component, others)
        known = targets(modules[component])
        spelled = _spelled(grouped(path, tensors, named), take, known)
        named = {name: (spelled.get(layer, layer), role) for name, (layer, role) in named.items()}
        for target, part in _divided(path, grouped(path, tensors, named), take, known).items():
            found[component, target] = part
    return found


def _take_of(name: str, module: nn.Module, converters: Converters) -> Take | None:
    """Return the function that knows which rows of a file's weights become a parameter of the module."""
    if name in converters:
        return functools.partial(_by_places, converters[name])
    layout = next((each for each in (*LAYOUTS, _UNET) if type(module).__name__ in each.classes), None)
    if layout is None:
        return None
    own = dict(module.named_parameters())
    width = next((own[name].shape[0] for name in _EMBEDDERS if name in own), 0)
    widths = layout.widths(Shapes(dict.fromkeys(_WIDE, (width,)))) if layout.widths else None
    numbers = [int(match[2]) for name in own if (match := _BLOCK.match(name))]
    blocks = _placeholders(f"{name}.{i}" for name in _BLOCKS for i in range(1 + max(numbers, default=0)))
    convert = functools.partial(layout.convert, config=getattr(module, "config", {}))
    return functools.partial(_by_rows, convert, widths, blocks)


def _by_places(convert: Callable[[Places], Places], rows: Mapping[str, Shape]) -> Taken:
    """Return what a converter of places makes of weights: each lies where no other could be, and is known by that."""
    names = list(rows)
    places = {name: Stored(Path(), i * _SPAN, torch.float32, rows[name]) for i, name in enumerate(names)}
    taken: Taken = {}
    for parameter, at in convert(places).items():
        i, offset = divmod(at.offset, _SPAN)
        source = names[i]
        width = at.dtype.itemsize * math.prod(rows[source][1:])
        if at.shape[1:] == rows[source][1:]:
            taken[parameter] = [Run(source, offset // width, offset // width + at.shape[0])]
    return taken


def _by_rows(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]],
    widths: Widths | None,
    blocks: Mapping[str, _Nothing],
    rows: Mapping[str, Shape],
) -> Taken:
    """Return what diffusers' converter of a whole file makes of some weights. The others are placeholders."""
    numbered = [match for name in rows if (match := _BLOCK.match(name))]
    counted = {f"{match[1]}.{i}" for match in numbered for i in range(min(int(match[2]), _MOST_BLOCKS) + 1)}
    given: dict[str, Any] = {**blocks, **_placeholders(counted)}
    given |= {name: whole(name, shape, widths) for name, shape in rows.items()}
    while True:
        try:
            made = convert(_Partial(given))
            return {name: list(value.runs) for name, value in made.items() if isinstance(value, Rows)}
        except KeyError as error:
            if (lacking := str(error.args[0])) in given:
                raise
            given[lacking] = _Nothing()


def _placeholders(blocks: Iterable[str]) -> dict[str, _Nothing]:
    """Return placeholders in blocks: some converters count these by the names that there are, or look for norms."""
    return {f"{block}.{name}.none": _Nothing() for block in blocks for name in ("ln_q", "modX")}


def _named(tensors: Tensors, component: str, others: Collection[str] | None) -> dict[str, tuple[str, str]]:
    """Return the layer and the role of each tensor for a component.

    Those are names with the component's ahead; and, with `others`, those without the name of any of these.
    """
    named = {}
    for name in tensors:
        if (found := parsed(name)) is not None:
            layer = plain(found[0])
            ahead = layer.startswith(f"{component}.")
            if ahead or (others is not None and not any(layer.startswith(f"{other}.") for other in others)):
                named[name] = layer.removeprefix(f"{component}."), found[1]
    return named


def _divided(path: Path, given: Mapping[str, LayerTensors], take: Take, known: set[str]) -> dict[str, LayerTensors]:
    """Return the tensors for each target in a module, from layers all of whose rows have a place."""
    layers = {source: layer for layer, part in given.items() for source in _sources(layer, part)}
    rows = {source: shape for layer, part in given.items() for source, shape in _sources(layer, part).items()}
    found = _rows_of(_taken(take, rows), rows, known)
    spent: Counter[str] = Counter()
    for source, runs in found.values():
        spent[source] += sum(end - begin for begin, end in runs)
    used = {layers[source] for source, shape in rows.items() if spent[source] == shape[0]}
    return {
        target: given[layers[source]].taken(path, runs, rows[source][0])
        for target, (source, runs) in found.items()
        if layers[source] in used
    }


def _sources(layer: str, part: LayerTensors) -> dict[str, Shape]:
    """Return the changed weights with their shapes. A `diff` may be of a weight with one of several names."""
    if shape := part.shape():
        names = (f"{layer}.weight", f"{layer}.scale", layer) if "diff" in part.tensors else (f"{layer}.weight",)
        return dict.fromkeys(names, shape)
    return {f"{layer}.bias": tuple(part.tensors["diff_b"].shape)} if "diff_b" in part.tensors else {}


def _rows_of(taken: Taken, rows: Mapping[str, Shape], known: set[str]) -> dict[str, tuple[str, Runs]]:
    """Return the weight that each target is made of, and its rows."""
    found = {}
    for parameter, runs in taken.items():
        layer, _, kind = parameter.rpartition(".")
        target = layer if kind in ("weight", "bias") and layer in known else parameter
        sources = {run.name for run in runs}
        if target in known and len(sources) == 1 and sources <= rows.keys():
            found[target] = sources.pop(), tuple((run.begin, run.end) for run in runs)
    return found


def _taken(take: Take, rows: Mapping[str, Shape]) -> Taken:
    """Return what becomes of weights, without those that the converter fails at."""
    with contextlib.suppress(*_FAILURES):
        return take(rows)
    good = {}
    for name, shape in rows.items():
        with contextlib.suppress(*_FAILURES):
            take({name: shape})
            good[name] = shape
    with contextlib.suppress(*_FAILURES):
        return take(good)
    return {}


# Names with underscores in place of dots


def _spelled(given: Mapping[str, LayerTensors], take: Take, known: set[str]) -> dict[str, str]:
    """Map names of layers with underscores to those with dots: of all ways to put them, the one that has a place."""
    alike: dict[str, list[str]] = {}  # but for numbers, the lowest first
    for layer in sorted(given, key=lambda layer: (len(layer), layer)):
        if (name := flat(layer)) and _sources(layer, given[layer]):
            alike.setdefault(_NUMBER.sub("0", name), []).append(layer)
    spelled: dict[str, str] = {}
    for together, before_numbers in ((True, "."), (False, "."), (False, "_.")):
        left = [layers for layers in alike.values() if layers[0] not in spelled]
        for batch in [left] if together else [[layers] for layers in left]:
            ways = {
                _joined(words, way): (layers, way)
                for layers in batch
                for words in [str(flat(layers[0])).split("_")]
                for way in _ways(words, before_numbers)
            }
            sources = {layer: _sources(layer, given[layers[0]]) for layer, (layers, _) in ways.items()}
            rows = {name: shape for each in sources.values() for name, shape in each.items()}
            layer_of = {name: layer for layer, each in sources.items() for name in each}
            found = {layer_of[source] for source, _ in _rows_of(_taken(take, rows), rows, known).values()}
            times = Counter(ways[layer][0][0] for layer in found)
            for layers, way in (ways[layer] for layer in found):
                if times[layers[0]] == 1:
                    spelled |= {layer: _joined(str(flat(layer)).split("_"), way) for layer in layers}
    return spelled


def _ways(words: list[str], before_numbers: str) -> Iterator[tuple[str, ...]]:
    """Yield what may stand between words: a dot or an underscore, but always a dot after a number."""
    pairs = itertools.pairwise(words)
    marks = ["." if word.isdigit() else before_numbers if after.isdigit() else "_." for word, after in pairs]
    if math.prod(map(len, marks)) <= _MOST_SPELLINGS:
        yield from itertools.product(*marks)


def _joined(words: list[str], way: tuple[str, ...]) -> str:
    return "".join(itertools.chain(*zip(words, (*way, ""), strict=True)))


class _Nothing:
    """A placeholder for weights that a file lacks. Whatever a converter makes of it is a placeholder too."""

    shape = (0, 0)

    def chunk(self, count: int, dim: int = 0) -> list[_Nothing]:
        return [self] * count

    def split(self, sizes: Any, dim: int = 0) -> list[_Nothing]:
        return [self] * len(sizes)

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args and isinstance(args[0], list | tuple) else args
        if any(isinstance(value, Rows) for value in given):
            raise ValueError("a part of what is joined is not there")
        if func.__name__ in ("chunk", "split"):
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        return cls()


class _Partial(dict[str, Any]):
    """Some of the weights that a converter looks for."""

    def __missing__(self, name: str) -> _Nothing:
        return _Nothing()

    def pop(self, name: str, *default: Any) -> Any:  # type: ignore[override]
        return super().pop(name, *(default or (_Nothing(),)))
