"""Where rows of stored weights lie, as modules take them: of plain weights and of those that are stored encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ...memory.codecs.raw import Raw
from ...memory.weights.encoding import EncodedWeight, Source, extents, part_spans, split
from ...memory.weights.hostbuffer import allocate
from ...memory.weights.reader import extents_of, read
from ...memory.weights.stored import Stored
from .rows import Rows, Run


def placed(rows: Rows, weights: Mapping[str, EncodedWeight]) -> Source:
    """Where the rows lie in the file. ValueError, in one line, where they do not lie apart from others there."""
    first = weights[rows.runs[0].name]
    if _is_whole(rows, first):
        plain = first.stored()
        return replace(plain, shape=rows.shape) if plain else first
    try:
        return _taken(rows, weights)
    except ValueError as error:
        raise ValueError(f"{first.path}: {rows.runs[0].name}: {error} Get the plain file.") from error


def _is_whole(rows: Rows, weight: EncodedWeight) -> bool:
    return rows.runs == (Run(rows.runs[0].name, 0, weight.shape[0] if weight.shape else 1),)


def _taken(rows: Rows, weights: Mapping[str, EncodedWeight]) -> Source:
    first = weights[rows.runs[0].name]
    total = sum(run.end - run.begin for run in rows.runs)
    joined = len({run.name for run in rows.runs}) > 1
    found = [(weights[run.name], *weights[run.name].codec.taken(run.begin, run.end)) for run in rows.runs]
    codecs = {codec.of_rows(total) for _, codec, _ in found} if joined else {first.codec.taken(0, total)[0]}
    codec = codecs.pop()
    apart = all(codec.row_parts or (0,)) and len({weight.path for weight, *_ in found}) == 1
    if codecs or (joined and not apart):
        raise ValueError("it is joined with another weight that is stored in another way.")
    parts = []
    for number, spec in enumerate(codec.parts):
        taken = [(weight.parts[number], slices[number]) for weight, _, slices in found]
        # A part that is of all rows is there once.
        of_all = all(each == slice(0, spec.count) for _, each in taken)
        parts.append(_run(taken[:1] if of_all else taken))
        if parts[-1].shape != (spec.count,):
            raise ValueError("its rows do not lie apart.")
    weight = EncodedWeight(codec, tuple(parts))
    plain = weight.stored()
    return replace(plain, shape=rows.shape) if plain else weight


def _run(taken: Iterable[tuple[Stored, slice]]) -> Stored:
    """Return these elements of flat tensors of one file, one run after another."""
    runs: list[tuple[int, int]] = []
    for place, each in taken:
        offset, count = place.offset + each.start * place.dtype.itemsize, each.stop - each.start
        if runs and runs[-1][0] + runs[-1][1] * place.dtype.itemsize == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + count
        else:
            runs.append((offset, count))
    total = sum(count for _, count in runs)
    return replace(place, offset=runs[0][0], shape=(total,), runs=tuple(runs) if len(runs) > 1 else ())


def read_whole(source: Source) -> torch.Tensor:
    """Read a small tensor from its file."""
    codec = Raw(source.shape, source.dtype, source.dtype) if isinstance(source, Stored) else source.codec
    flat = allocate(max(1, part_spans(codec)[1]))
    read([(piece, flat) for at, begin in extents(source) for piece in extents_of(at, at.dtype, begin)])
    made = torch.empty(codec.shape, dtype=codec.dtype)
    codec.decode(split(codec, flat), made)
    return made
