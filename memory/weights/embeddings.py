"""Embedding tables: their rows are looked up in RAM or in the file, and only the rows of a call go to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..codecs.codec import Codec
from ..codecs.raw import Raw
from .encoding import Source, split
from .hostbuffer import allocate
from .reader import Job, batches, extent_of, read_batch
from .stored import Stored
from .structure import ParameterRef

Fetch = Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> rows on the device [n, width]


class LookUp(TorchFunctionMode):
    """While entered, `functional.embedding` of `table` returns the rows that `fetch` gives for its ids."""

    def __init__(self, table: torch.Tensor, fetch: Fetch) -> None:
        super().__init__()
        self._table, self._fetch = table, fetch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.embedding:
            return func(*args, **(kwargs or {}))
        # The module's own forward passes its weight, which is on the CPU, on `meta`, or encoded.
        ids, table = _of(*args, **(kwargs or {}))
        if table is not self._table:
            return func(*args, **(kwargs or {}))
        return self._fetch(ids.reshape(-1)).view(*ids.shape, table.shape[1])


def _of(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return input, weight


def rows_of(table: ParameterRef, source: Source | None, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table for ids [n], on the CPU [n, width]: from RAM or, for a table on `meta`, from its file.

    Raises OSError or ValueError, in one line that names the file. IndexError for an id beyond the table.
    """
    shown = table.tensor if table.shown is None else table.shown
    count, width = shown.shape
    if not table.tensor.is_meta and table.codec is None:
        return functional.embedding(ids, table.tensor)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise IndexError(f"an id is out of the range of {count} rows.")
    wanted, places = ids.unique(return_inverse=True)  # padding repeats one id many times
    stored = table.codec or Raw(
        (count, width), shown.dtype, source.dtype if isinstance(source, Stored) else shown.dtype
    )
    codec = stored.of_rows(wanted.numel())
    if table.tensor.is_meta:
        assert source is not None
        parts = _read_rows(stored, source, wanted.tolist())
    else:
        parts = _rows(stored, split(stored, table.tensor), wanted)
    rows = torch.empty(codec.shape, dtype=codec.dtype)
    with torch.no_grad():
        codec.decode(parts, rows)
    return rows[places]


def _rows(codec: Codec, parts: Sequence[torch.Tensor], wanted: torch.Tensor) -> list[torch.Tensor]:
    """Return the wanted rows of each stored part of a table in RAM, flat."""
    assert codec.row_parts is not None
    pairs = zip(parts, codec.row_parts, strict=True)
    return [part.view(-1, each)[wanted].view(-1) if each else part for part, each in pairs]


def _read_rows(codec: Codec, source: Source, wanted: Sequence[int]) -> list[torch.Tensor]:
    """Return the wanted rows of each stored part of a table, flat, read from its file."""
    assert codec.row_parts is not None
    jobs: list[Job] = []
    found = []
    places = (source,) if isinstance(source, Stored) else source.parts
    for place, part, each in zip(places, codec.parts, codec.row_parts, strict=True):
        assert not place.runs, "rows of a table lie in one run"
        nbytes = each * part.dtype.itemsize
        flat = allocate(max(1, nbytes * len(wanted) if each else part.nbytes))
        runs = [(row * nbytes, i * nbytes) for i, row in enumerate(wanted)] if each else [(0, 0)]
        for begin, at in runs:
            size = nbytes if each else part.nbytes
            one = replace(place, offset=place.offset + begin, dtype=torch.uint8, shape=(size,))
            jobs.append((extent_of(one, torch.uint8, at), flat))
        count = each * len(wanted) if each else part.count
        found.append(flat[: count * part.dtype.itemsize].view(part.dtype))
    for batch in batches(jobs):
        read_batch(batch)
    return found
