"""Names of the files that a model is published in: each layer's rows go where a converter of its weights puts them.

Where one layer becomes several, such as queries, keys and values, each gets its rows of B, and all of A.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...memory.weights.changes import Shape
from ...memory.weights.products import Runs
from ...memory.weights.stored import Stored
from .checkpoint import Places
from .lora_names import ByComponent, flat, plain, targets
from .lora_parts import Found, Tensors, parsed
from .rows import Rows, Run, whole
from .single.layouts import Layout, Shapes
from .single.transformers import LAYOUTS

Converters = Mapping[str, Callable[[Places], Places]]
Taken = dict[str, list[Run]]  # by parameter of the module: the rows of which layers it is

_FAILURES = LookupError, ValueError, RuntimeError, AttributeError, TypeError  # of converters
_MOST_BLOCKS = 999
_SPAN = 2**40  # bytes, more than any weight has
_EMBEDDERS = ("x_embedder.weight", "x_embedder.proj.weight")  # whose width is that of the blocks
_FIRST = (
    "double_blocks.0",
    "single_blocks.0",
    "joint_blocks.0",
    "double_layers.0",
    "single_layers.0",
    "blocks.0",
    "distilled_guidance_layer.layers.0",
)
_WIDE = ("img_in.weight", "img_in.proj.bias", "x_embedder.weight")  # as files call them
_PARTS = ("qkv", "proj", "q_norm", "k_norm")
# What is one word between the underscores of a name, where no converter asks for it by its name.
_WORDS = frozenset((
    "adaLN_modulation", "adaln_single", "attention_norm1", "attention_norm2", "c_embedder", "cap_embedder",
    "caption_projection", "clip_text_pooled_proj", "context_refiner", "cross_attn", "distilled_guidance_layer",
    "double_blocks", "double_stream_modulation_img", "double_stream_modulation_txt", "feed_forward", "ffn_norm1",
    "ffn_norm2", "final_layer", "guidance_in", "img_attn", "img_emb", "img_in", "img_mlp", "img_mod", "in_layer",
    "individual_token_refiner", "input_embedder", "k_img", "k_norm", "linear_1", "linear_2", "noise_refiner", "norm_k",
    "norm_k_img", "norm_q", "out_layer", "patch_embedding", "patchify_proj", "proj_in", "proj_out", "q_norm",
    "self_attn", "single_blocks", "single_stream_modulation", "t_embedder", "text_embedding", "time_embedding",
    "time_in", "time_projection", "time_text_embed", "timestep_embedder", "to_k", "to_out", "to_q", "to_v",
    "transformer_blocks", "txt_attn", "txt_in", "txt_mlp", "txt_mod", "v_img", "vector_in", "x_embedder",
))  # fmt: skip
_WORDS_OF = {
    "HunyuanVideo": frozenset(f"{name}_{part}" for name in ("img_attn", "txt_attn", "self_attn") for part in _PARTS)
}
_BLOCK = re.compile(r"([a-z_]+?)[_.](\d+)[_.]")


def by_weights(
    path: Path, tensors: Tensors, modules: Mapping[str, nn.Module], converters: Converters
) -> ByComponent | None:
    """Return the changes named as weights in the files of these modules, not the others; None if there are none.

    `converters` are those of families with code of their own. Of two experts the second has no names, unless the file
    puts its own ahead.
    """
    readers = dict(_readers(modules, converters))
    found: ByComponent = {}
    for component, read in readers.items():
        first = component == next(iter(readers))
        given = _given(path, tensors, component, readers.keys() - {component} if first else None, read)
        if made := _divided(path, given, read, modules[component]):
            found[component] = made
    return found or None


def _readers(modules: Mapping[str, nn.Module], converters: Converters) -> Iterator[tuple[str, _Reader]]:
    """Who knows the names in the files of which module."""
    for name, module in modules.items():
        if name in converters:
            yield name, _Converting(converters[name])
        elif layout := next((each for each in LAYOUTS if type(module).__name__ in each.classes), None):
            yield name, _Layouts(layout, module)


def _given(
    path: Path, tensors: Tensors, component: str, others: Collection[str] | None, read: _Reader
) -> dict[str, Found]:
    """Return the changes in a file for each layer of a component, by the names that it has there.

    Names with the component's ahead are for it; and, with `others`, those without the name of any of these.
    """
    layer_of = {}
    for name in tensors:
        if (named := parsed(name)) is not None:
            layer = plain(named[0])
            ahead = layer.startswith(f"{component}.")
            if ahead or (others is not None and not any(layer.startswith(f"{other}.") for other in others)):
                layer_of[name] = layer.removeprefix(f"{component}."), named[1]
    dotted = read.dotted({under for layer, _ in layer_of.values() if (under := flat(layer))})
    given: dict[str, Found] = {}
    for name, (layer, what) in layer_of.items():
        layer = dotted[under] if (under := flat(layer)) else layer
        given.setdefault(layer, Found()).note(path, name, what, tensors[name])
    return given


def _divided(path: Path, given: Mapping[str, Found], read: _Reader, module: nn.Module) -> dict[str, Found]:
    """Return the changes of each layer of a module, of those all of whose rows have a place."""
    places, made, spent = targets(module), {}, Counter[str]()
    rows = {source: shape for layer, found in given.items() for source, shape in _sources(layer, found).items()}
    layer_of = {source: layer for layer, found in given.items() for source in _sources(layer, found)}
    for parameter, runs in _taken(read, rows).items():
        target, kind = parameter.rpartition(".")[::2]
        if kind not in ("weight", "bias") or target not in places:
            target = parameter
        sources = {run.name for run in runs}
        if target not in places or len(sources) != 1 or not sources <= rows.keys():
            continue
        source = sources.pop()
        cut: Runs = tuple((run.begin, run.end) for run in runs)
        made[target] = source, cut
        spent[source] += sum(end - begin for begin, end in cut)
    whole = {layer_of[source] for source, shape in rows.items() if spent[source] == shape[0]}
    return {
        target: given[layer_of[source]].taken(path, cut, rows[source][0])
        for target, (source, cut) in made.items()
        if layer_of[source] in whole
    }


def _sources(layer: str, found: Found) -> dict[str, Shape]:
    """Return the changed weights with their shapes. A `diff` may be of a weight with one of several names."""
    if shape := found.shape():
        names = (f"{layer}.weight", f"{layer}.scale", layer) if "diff" in found.tensors else (f"{layer}.weight",)
        return dict.fromkeys(names, shape)
    return {f"{layer}.bias": tuple(found.tensors["diff_b"].shape)} if "diff_b" in found.tensors else {}


def _taken(read: _Reader, rows: Mapping[str, Shape]) -> Taken:
    """Return the converted forms of weights of these shapes. Those that a converter fails at are left out."""
    with contextlib.suppress(*_FAILURES):
        return read.taken(rows)
    good = {}
    for name, shape in rows.items():
        with contextlib.suppress(*_FAILURES):
            read.taken({name: shape})
            good[name] = shape
    with contextlib.suppress(*_FAILURES):
        return read.taken(good)
    return {}


class _Reader(Protocol):
    """Knows the names in the files of a model."""

    def dotted(self, names: set[str]) -> dict[str, str]:
        """Map names of layers with underscores in place of dots to their dotted names."""

    def taken(self, rows: Mapping[str, Shape]) -> Taken:
        """Return what weights of these shapes become."""


class _Converting:
    """The layout of a family with code of its own, which converts the places of weights."""

    def __init__(self, convert: Callable[[Places], Places]) -> None:
        self._convert = convert

    def dotted(self, names: set[str]) -> dict[str, str]:
        return {name: by_words(name) for name in names}

    def taken(self, rows: Mapping[str, Shape]) -> Taken:
        # Each lies where no other could be: what becomes of it is known by where that lies.
        names = list(rows)
        places = {name: Stored(Path(), i * _SPAN, torch.float32, rows[name]) for i, name in enumerate(names)}
        taken: Taken = {}
        for parameter, at in self._convert(places).items():
            i, offset = divmod(at.offset, _SPAN)
            source = names[i]
            width = at.dtype.itemsize * math.prod(rows[source][1:])
            if at.shape[1:] == rows[source][1:]:
                taken[parameter] = [Run(source, offset // width, offset // width + at.shape[0])]
        return taken


class _Layouts:
    """The layout of a model whose single files diffusers converts."""

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        own = dict(module.named_parameters())
        width = next((own[name].shape[0] for name in _EMBEDDERS if name in own), 0)
        self._widths = layout.widths(Shapes(dict.fromkeys(_WIDE, (width,)))) if layout.widths else None
        self._words = _WORDS | _WORDS_OF.get(layout.title, frozenset())
        self._convert = functools.partial(layout.convert, config=getattr(module, "config", {}))
        self._own = {name.replace(".", "_"): name for name in targets(module)}

    def dotted(self, names: set[str]) -> dict[str, str]:
        asked = _Partial(_counted(names))
        with contextlib.suppress(*_FAILURES):
            self._convert(asked)
        asked_for = {name.rpartition(".")[0] for name in asked.missing}
        known = self._own | {layer.replace(".", "_"): layer for layer in asked_for}
        return {name: known.get(name) or by_words(name, self._words) for name in names}

    def taken(self, rows: Mapping[str, Shape]) -> Taken:
        given = {name: whole(name, shape, self._widths) for name, shape in rows.items()}
        made = self._convert(_Partial(_counted(rows) | given))
        return {name: list(value.runs) for name, value in made.items() if isinstance(value, Rows)}


def _counted(names: Iterable[str]) -> dict[str, _Nothing]:
    """Names without weights: some converters count the blocks by the names that there are, or look for norms there."""
    found = [match for name in names if (match := _BLOCK.match(name))]
    blocks = {f"{match[1]}.{i}" for match in found for i in range(min(int(match[2]), _MOST_BLOCKS) + 1)}
    return {f"{block}.{what}.none": _Nothing() for block in (*blocks, *_FIRST) for what in ("ln_q", "modX")}


def by_words(name: str, known: frozenset[str] = _WORDS) -> str:
    """Replace underscores by dots, except within known words."""
    parts, words = [], name.split("_")
    while words:
        count = next((n for n in range(min(4, len(words)), 1, -1) if "_".join(words[:n]) in known), 1)
        parts.append("_".join(words[:count]))
        words = words[count:]
    return ".".join(parts)


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
    """Some of the weights that a converter looks for. `missing` are the names of the others."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.missing: set[str] = set()

    def __missing__(self, name: str) -> _Nothing:
        self.missing.add(name)
        return _Nothing()

    def pop(self, name: str, *default: Any) -> Any:  # type: ignore[override]
        if name not in self:
            self.missing.add(name)
        return super().pop(name, *(default or (_Nothing(),)))
