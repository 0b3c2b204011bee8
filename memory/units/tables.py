"""Tables of embeddings: their rows are looked up in RAM, and only those that a call asks for come to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .hostbuffer import allocate
from .reader import batches, piece_of, read_batch
from .weights import Stored

Fetch = Callable[[torch.Tensor], torch.Tensor]  # rows on the device, by ids on one dimension


class LookUp(TorchFunctionMode):
    """While it is entered, the rows of a table come by `fetch` where `functional.embedding` asks for them."""

    def __init__(self, table: torch.Tensor, fetch: Fetch) -> None:
        super().__init__()
        self._table, self._fetch = table, fetch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.embedding:
            return func(*args, **(kwargs or {}))
        ids, table = _of(*args, **(kwargs or {}))
        if table is not self._table:
            return func(*args, **(kwargs or {}))
        return self._fetch(ids.reshape(-1)).view(*ids.shape, table.shape[1])


def _of(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return input, weight


def rows_of(table: torch.Tensor, stored: Stored | None, ids: torch.Tensor) -> torch.Tensor:
    """The rows of a table on the CPU, by ids on one dimension: from RAM or, of a table on `meta`, from its file.

    Raises OSError or ValueError, in one line that names the file; IndexError for an id that there is no row of.
    """
    if not table.is_meta:
        return functional.embedding(ids, table)
    assert stored is not None
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.shape[0]:
        raise IndexError(f"an id is out of the range of {table.shape[0]} rows.")
    wanted, places = ids.unique(return_inverse=True)
    flat = allocate(max(1, wanted.numel() * table.shape[1] * table.dtype.itemsize))
    row_bytes = table.shape[1] * stored.dtype.itemsize
    jobs = []
    for i, row in enumerate(wanted.tolist()):
        one = replace(stored, offset=stored.offset + row * row_bytes, shape=(1, table.shape[1]))
        jobs.append((piece_of(one, table.dtype, i * table.shape[1] * table.dtype.itemsize), flat))
    for batch in batches(jobs):
        read_batch(batch)
    rows = flat[: wanted.numel() * table.shape[1] * table.dtype.itemsize].view(table.dtype)
    return rows.view(-1, table.shape[1])[places]
