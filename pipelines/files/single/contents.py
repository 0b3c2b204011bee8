"""The content of a single file by the names of its weights: one model, or several under prefixes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from ....memory.weights.encoded import encoded_weights
from ....memory.weights.encoding import EncodedWeight, Source
from ....memory.weights.stored import refuse_pickle, shards_of
from ..placing import placed
from ..rows import Rows, left_over, whole
from ..wrappers import unwrapped
from .layouts import Config, Layout, Shapes, layout_of

# Before the names of one model in files that ComfyUI writes, and in those of others; of all models in a whole pipeline.
_OF_TRANSFORMERS = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.model.", "net.")
_OF_VAES = ("first_stage_model.", "vae.")
_OF_OTHERS = ("text_encoders.", "text_encoder.", "cond_stage_model.", "conditioner.", "audio_vae.", "vocoder.")
_PREFIXES: Mapping[str, tuple[str, ...]] = {"transformer": _OF_TRANSFORMERS, "VAE": _OF_VAES, "ControlNet": ()}
_ANY = (*_OF_TRANSFORMERS, *_OF_VAES, *_OF_OTHERS)
log = logging.getLogger("ballast")


@dataclass(frozen=True)
class SingleFile:
    """A model in a file: what it is, where each parameter lies by the library's names, and the file's own weights."""

    path: Path
    title: str
    places: Mapping[str, Rows]
    weights: Mapping[str, EncodedWeight]
    shapes: Shapes  # by the library's names, and of what no class has a place for by the file's
    layout: Layout | None = None

    def source(self, name: str) -> Source:
        """Where a parameter lies. ValueError, in one line, where it does not lie apart from others."""
        return placed(self.places[name], self.weights)


def read_single(
    path: Path, layouts: Sequence[Layout], what: str, dtype: torch.dtype, config: Config = MappingProxyType({})
) -> SingleFile:
    """Return the model in a file, if one of the layouts knows it. Reads no weights.

    `what` is looked for: the transformer, the VAE, or a ControlNet. Quantised weights become `dtype`; `config` is for
    converters.
    FileNotFoundError, or ValueError in one line, for a file that is damaged, of an unknown kind, or lacks a weight or
    has one too many.
    """
    refuse_pickle(path)
    weights = encoded_weights(path, dtype)
    layout, own = _recognised(path, weights, layouts, what)
    if layout.whole and layout.is_original(own) and len(shards_of(path)) > 1:
        raise ValueError(
            f"{path} is a shard of {layout.title}, whose original shards have their fused projections in another order "
            "than its single files. Get the single file, or the model's diffusers folder."
        )
    elsewhere = _names_of(layout, weights).values()
    own = {name: full for name, full in own.items() if full not in elsewhere}
    return _single(path, layout, own, weights, config, elsewhere)


def parts_in(path: Path, layouts: Mapping[str, Layout]) -> list[str]:
    """Return the names of those layouts whose components lie in a transformer's file. Raises as `read_single`."""
    refuse_pickle(path)
    weights = encoded_weights(path, torch.bfloat16)
    return [name for name, layout in layouts.items() if _names_of(layout, weights)]


def read_part(path: Path, layout: Layout, dtype: torch.dtype, config: Config) -> SingleFile:
    """Return the component of `layout` that lies in a transformer's file. Raises as `read_single`."""
    weights = encoded_weights(path, dtype)
    own = _names_of(layout, weights)
    return _single(path, layout, own, weights, config, weights.keys() - set(own.values()))


def _names_of(layout: Layout, weights: Collection[str]) -> dict[str, str]:
    """Return the full names of weights whose names begin as those `apart`, by their names without a prefix."""
    if not layout.apart:
        return {}
    found = {}
    for full in weights:
        name = unwrapped(full)
        prefix = next((each for each in _OF_TRANSFORMERS if name.startswith(each)), "")
        if name.removeprefix(prefix).startswith(layout.apart):
            found[name.removeprefix(prefix)] = full
    return found


def _single(
    path: Path,
    layout: Layout,
    own: Mapping[str, str],
    weights: Mapping[str, EncodedWeight],
    config: Config,
    elsewhere: Collection[str],
) -> SingleFile:
    """Return the model whose weights have the full names of `own`; those `elsewhere` are read as another's."""
    rows = {name: whole(full, weights[full].codec.shape) for name, full in own.items()}
    try:
        places = layout.places(rows, config)
    except KeyError as error:  # of one that tells how wide others are
        raise ValueError(
            f"{path} is no whole {layout.title}: it lacks {error.args[0]}. Get the whole model."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no whole {layout.title}: {error}. Get the whole model.") from error
    shapes = Shapes({name: at.shape for name, at in places.items()})
    shapes.update({name: rows[name].shape for name in layout.unread if name in rows})
    spent = {own[name] for name in layout.unread if name in own}
    left = left_over({name: weight.codec.shape for name, weight in weights.items()}, places.values())
    _refuse_left(path, layout, sorted(set(left) - spent - set(elsewhere)), set(own.values()))
    return SingleFile(path, layout.title, places, weights, shapes, layout)


def holds_vae(path: Path) -> bool:
    """Return whether a transformer's file has a VAE beside it, as whole models have. ValueError for a damaged one."""
    refuse_pickle(path)
    return any(name.startswith(_OF_VAES) for name in encoded_weights(path, torch.bfloat16))


def _recognised(
    path: Path, weights: Mapping[str, EncodedWeight], layouts: Sequence[Layout], what: str
) -> tuple[Layout, dict[str, str]]:
    """Return the layout of a file, and its weights' full names by their names without the prefix."""
    plain = {name: unwrapped(name) for name in weights}
    for prefix in ("", *_PREFIXES[what]):
        own = {
            name.removeprefix(prefix): full
            for full, name in plain.items()
            if name.startswith(prefix) and (prefix or not name.startswith(_ANY))
        }
        if layout := layout_of(own, layouts):
            return layout, own
        # With all layers renamed, HunyuanVideo has those names of FLUX too: what is renamed most is tried first.
        for layout in sorted((each for each in layouts if each.renamed), key=lambda each: -len(each.renamed)):
            if layout.is_original(named := {layout.original_name(name): full for name, full in own.items()}):
                return layout, named
    known, first = ", ".join(layout.title for layout in layouts), ", ".join(sorted(weights)[:2]) or "nothing"
    raise ValueError(f"{path} holds no {what} that is known here: it has {first}. Known are {known}.")


def _refuse_left(path: Path, layout: Layout, left: Sequence[str], own: Collection[str]) -> None:
    """Raise ValueError for weights of the model that nothing reads, and say which other models are not read."""
    others = [name for name in left if name not in own and name.startswith(_ANY)]
    if surplus := [name for name in left if name not in others]:
        raise ValueError(
            f"{path} holds {len(surplus)} weights that {layout.title} has no place for, such as {surplus[0]}. "
            "It is of another model: get the plain one."
        )
    if others:
        parts = ", ".join(sorted({name.partition(".")[0] for name in others}))
        log.info("Ballast: of %s only the %s is read, not its %s", path, layout.title, parts)


def type_of(path: Path) -> torch.dtype:
    """Return the default dtype of a file's weights: that of most bytes, bf16 if any are quantized.

    float32 for float64, in which nothing runs: diffusers' own default.

    Raises FileNotFoundError, or ValueError in one line, for a file that is damaged, or of a format that is not known.
    """
    refuse_pickle(path)
    sizes: Counter[torch.dtype] = Counter()
    for weight in encoded_weights(path, torch.bfloat16).values():
        plain = weight.stored()
        if plain is None:
            return torch.bfloat16
        if plain.dtype.is_floating_point:
            sizes[plain.dtype] += weight.codec.encoded_bytes
    most = sizes.most_common(1)[0][0] if sizes else torch.float32
    return torch.float32 if most == torch.float64 else most
