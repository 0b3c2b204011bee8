"""Names of the files that a model is published in: each layer's rows go where a converter of its weights puts them.

Where one layer becomes several, such as queries, keys and values, each gets its rows of B, and all of A.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...memory.units.changes import Shape
from ...memory.units.products import Runs
from ...memory.units.weights import Stored
from .checkpoint import Places
from .lora_names import ByComponent, flat, layers, plain
from .lora_parts import Found, Tensors, parsed
from .rows import Rows, Run, whole
from .single.layouts import Layout, Shapes
from .single.transformers import LAYOUTS

Converters = Mapping[str, Callable[[Places], Places]]
Taken = dict[str, list[Run]]  # by parameter of the module: the rows of which layers it is

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
_WIDE = ("img_in.weight", "img_in.proj.weight", "x_embedder.weight")  # as files call them
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
    """What is named as the weights in the files of these modules are; None if anything is not.

    ValueError, in one line, where a part of it is. `converters` are those of families with code of their own.
    """
    component, read = next(_readers(modules, converters), (None, None))  # of two experts the second has no names
    if component is None or read is None or not (given := _given(path, tensors, read)):
        return None
    rows: dict[str, Shape] = {}
    for name, found in given.items():
        if shape := found.shape():
            rows[f"{name}.weight"] = shape
        elif "diff_b" in found.tensors:
            rows[f"{name}.bias"] = tuple(found.tensors["diff_b"].shape)
    try:
        taken = read.taken(rows)
    except (LookupError, ValueError, RuntimeError, AttributeError, TypeError):
        return None
    return _divided(path, given, rows, taken, component, modules[component])


def _readers(modules: Mapping[str, nn.Module], converters: Converters) -> Iterator[tuple[str, _Reader]]:
    """Who knows the names in the files of which module."""
    for name, convert in converters.items():
        yield name, _Converting(convert)
    for name, module in modules.items():
        if layout := next((each for each in LAYOUTS if type(module).__name__ in each.classes), None):
            yield name, _Layouts(layout, module)


def _given(path: Path, tensors: Tensors, read: _Reader) -> dict[str, Found]:
    """What a file has for each layer, by the names that it has there; nothing if one name says no layer."""
    named = {name: parsed(name) for name in tensors}
    if not all(named.values()):
        return {}
    layer_of = {name: plain(what[0]) for name, what in named.items() if what}
    dotted = read.dotted({under for layer in layer_of.values() if (under := flat(layer))})
    given: dict[str, Found] = {}
    for name, tensor in tensors.items():
        layer, what = layer_of[name], named[name]
        assert what
        layer = dotted[under] if (under := flat(layer)) else layer
        given.setdefault(layer, Found()).note(path, name, what[1], tensor)
    return given


def _divided(
    path: Path,
    given: Mapping[str, Found],
    rows: Mapping[str, Shape],
    taken: Taken,
    component: str,
    module: nn.Module,
) -> ByComponent | None:
    targets, made, spent = layers(module), {}, Counter[str]()
    for parameter, runs in taken.items():
        target, kind = parameter.rpartition(".")[::2]
        sources = {run.name for run in runs}
        if target not in targets or kind not in ("weight", "bias") or len(sources) != 1 or not sources <= rows.keys():
            continue
        source = sources.pop()
        layer = source.rpartition(".")[0]
        cut: Runs = tuple((run.begin, run.end) for run in runs)
        is_all = cut == ((0, rows[source][0]),)
        made[target] = given[layer] if is_all else given[layer].taken(path, cut, rows[source][0])
        spent[source] += sum(end - begin for begin, end in cut)
    strange = [name for name in given if not any(f"{name}.{kind}" in rows for kind in ("weight", "bias"))]
    strange += [name.rpartition(".")[0] for name, shape in rows.items() if spent[name] != shape[0]]
    if strange and made:
        raise ValueError(
            f"{path} has weights that {type(module).__name__} has no place for, such as {given[strange[0]].called}. "
            "It is of another model, or changes more than can be run exactly."
        )
    return {component: made} if made else None


class _Reader(Protocol):
    """Knows the names in the files of a model."""

    def dotted(self, names: set[str]) -> dict[str, str]:
        """The names of layers that are given with underscores in the place of dots."""

    def taken(self, rows: Mapping[str, Shape]) -> Taken:
        """What weights of these shapes become."""


class _Converting:
    """Of a family with code of its own, which converts the places of weights."""

    def __init__(self, convert: Callable[[Places], Places]) -> None:
        self._convert = convert

    def dotted(self, names: set[str]) -> dict[str, str]:
        return {name: _by_words(name) for name in names}

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
    """Of a model whose single files diffusers converts."""

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        own = dict(module.named_parameters())
        width = next((own[name].shape[0] for name in _EMBEDDERS if name in own), 0)
        self._widths = layout.widths(Shapes(dict.fromkeys(_WIDE, (width,)))) if layout.widths else None
        self._words = _WORDS | _WORDS_OF.get(layout.title, frozenset())
        self._convert = functools.partial(layout.convert, config=getattr(module, "config", {}))

    def dotted(self, names: set[str]) -> dict[str, str]:
        asked = _Partial(_counted(names))
        with contextlib.suppress(LookupError, ValueError, RuntimeError, AttributeError, TypeError):
            self._convert(asked)
        known = {layer.replace(".", "_"): layer for name in asked.missing for layer in [name.rpartition(".")[0]]}
        return {name: known.get(name) or _by_words(name, self._words) for name in names}

    def taken(self, rows: Mapping[str, Shape]) -> Taken:
        given = {name: whole(name, shape, self._widths) for name, shape in rows.items()}
        made = self._convert(_Partial(_counted(rows) | given))
        return {name: list(value.runs) for name, value in made.items() if isinstance(value, Rows)}


def _counted(names: Iterable[str]) -> dict[str, _Nothing]:
    """Names without weights: some converters count the blocks by the names that there are, or look for norms there."""
    found = [match for name in names if (match := _BLOCK.match(name))]
    blocks = {f"{match[1]}.{i}" for match in found for i in range(min(int(match[2]), _MOST_BLOCKS) + 1)}
    return {f"{block}.{what}.none": _Nothing() for block in (*blocks, *_FIRST) for what in ("ln_q", "modX")}


def _by_words(name: str, known: frozenset[str] = _WORDS) -> str:
    parts, words = [], name.split("_")
    while words:
        count = next((n for n in range(min(4, len(words)), 1, -1) if "_".join(words[:n]) in known), 1)
        parts.append("_".join(words[:count]))
        words = words[count:]
    return ".".join(parts)


class _Nothing:
    """What a file has nothing for: whatever a converter makes of it is nothing too."""

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
