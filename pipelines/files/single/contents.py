"""What a single file holds, by the names of its weights: one model, or several under prefixes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from ....memory.codecs.raw import Raw
from ....memory.units.encoded import EncodedWeight, encoded_weights
from ....memory.units.weights import Stored, refuse_pickle, stored_dtype
from .layouts import Layout, Shapes, layout_of
from .rows import Rows, left_over, whole

# Before the names of a transformer in files that ComfyUI writes, and in those of others.
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.")
_OTHERS = (  # before those of the other models in a file that holds a whole pipeline
    "first_stage_model.", "vae.", "text_encoders.", "text_encoder.", "cond_stage_model.", "conditioner.", "audio_vae.",
    "vocoder.",
)  # fmt: skip
log = logging.getLogger("ballast")


@dataclass(frozen=True)
class SingleFile:
    """A model in a file: its layout, where each parameter lies by diffusers' names, and the weights by the file's."""

    path: Path
    layout: Layout
    places: Mapping[str, Rows]
    weights: Mapping[str, EncodedWeight]
    shapes: Shapes  # by diffusers' names, and of what no class has a place for by the file's

    def stored(self, name: str) -> Stored:
        """Where a parameter lies. ValueError for one that is quantised."""
        return placed(self.places[name], self.weights)


def read_single(path: Path, layouts: Sequence[Layout], what: str, dtype: torch.dtype) -> SingleFile:
    """The model in a file that one of the layouts knows. Reads no weights.

    `what` says in errors what was looked for, and `dtype` is what quantised weights become. FileNotFoundError, or
    ValueError in one line, for a file that is damaged, of an unknown kind, or lacks a weight or has one too many.
    """
    refuse_pickle(path)
    weights = encoded_weights(path, dtype)
    for prefix in _PREFIXES:
        own = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
        layout = layout_of(own, layouts)
        if layout is not None:
            break
    else:
        known = ", ".join(layout.title for layout in layouts)
        first = ", ".join(sorted(weights)[:2]) or "nothing"
        raise ValueError(f"{path} holds no {what} that is known here: it has {first}. Known are {known}.")
    own = {name: full for name, full in own.items() if not full.startswith(_OTHERS)}
    rows = {name: whole(full, weights[full].codec.shape) for name, full in own.items()}
    try:
        places = layout.places(rows)
    except ValueError as error:
        raise ValueError(f"{path} is no whole {layout.title}: {error}. Get the whole model.") from error
    unread = {own[name] for name in layout.unread if name in own}
    _note_others(path, layout, left := [name for name in _left(weights, places) if name not in unread])
    if surplus := sorted(name for name in left if not name.startswith(_OTHERS)):
        raise ValueError(
            f"{path} holds {len(surplus)} weights that {layout.title} has no place for, such as {surplus[0]}. "
            "It is of another model: get the plain one."
        )
    shapes = Shapes({name: at.shape for name, at in places.items()})
    shapes.update({name: rows[name].shape for name in layout.unread if name in rows})
    return SingleFile(path, layout, places, weights, shapes)


def type_of(path: Path) -> torch.dtype:
    """The type that the weights of a file run in where none is given: that of most of them, if it is one to run in."""
    found = torch.bfloat16 if path.suffix.lower() == ".gguf" else stored_dtype([path])
    return found if found in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16


def placed(rows: Rows, weights: Mapping[str, EncodedWeight]) -> Stored:
    """Where the rows lie in the file. ValueError for quantised ones."""
    runs: list[tuple[int, int]] = []
    for name, begin, end in rows.runs:
        codec, (at, *_) = weights[name].codec, weights[name].parts
        if not isinstance(codec, Raw) or not at.dtype.is_floating_point:
            raise ValueError(f"{at.path}: {name} is quantised")
        columns = prod(codec.shape[1:])
        offset, count = at.offset + begin * columns * at.dtype.itemsize, (end - begin) * columns
        if runs and runs[-1][0] + runs[-1][1] * at.dtype.itemsize == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + count
        else:
            runs.append((offset, count))
    first = weights[rows.runs[0].name].parts[0]
    if len({weights[run.name].parts[0].dtype for run in rows.runs}) > 1:
        raise ValueError(f"{first.path}: {rows.runs[0].name} is joined with weights of another type")
    return replace(first, offset=runs[0][0], shape=rows.shape, runs=tuple(runs) if len(runs) > 1 else ())


def _left(weights: Mapping[str, EncodedWeight], places: Mapping[str, Rows]) -> Iterable[str]:
    return left_over({name: weight.codec.shape for name, weight in weights.items()}, places.values())


def _note_others(path: Path, layout: Layout, left: Iterable[str]) -> None:
    if parts := sorted({name.partition(".")[0] for name in left if name.startswith(_OTHERS)}):
        log.info("Ballast: of %s only the %s is read, not its %s", path, layout.title, ", ".join(parts))
