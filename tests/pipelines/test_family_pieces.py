"""How the models of each family are divided into pieces: small ones, of all the weights, none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from ballast.memory import ManagedModel
from ballast.memory.planning.fit import sizes_of
from ballast.memory.units.pieces import divide, unique
from ballast.memory.units.structure import slots

Folders = Callable[[str], Path]

# Modules that read the weights of others, and weights that are read elsewhere: none, as far as is known.
READS: dict[tuple[str, str], tuple[set[str], set[str]]] = {}


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_pieces_are_small_and_have_their_bytes_to_themselves(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    pipe, encode, sample, decode = tiny.stages(name, tiny_folders(name), "sim")
    decode(sample(encode()))
    for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder):
        unit.load()
        sizes = sizes_of(unit)
        largest = max(piece.packed_bytes for piece in sizes.pieces)
        assert sizes.least_streamed_bytes <= 2 * largest + sizes.fixed_bytes
        # Of the largest models this is some megabytes, and of these tiny ones a part of each.
        assert sizes.fixed_bytes <= 0.05 * sizes.total_bytes, unit
        assert (unit.calls.whole, unit.calls.outside) == READS.get((name, unit.name), (set(), set())), unit
        check_division(unit)


def check_division(unit: ManagedModel) -> None:
    """Each weight is of one piece, of the tables or of the rest, and shares no bytes with those of others."""
    places = list(slots(unit.module))
    divided = divide(unit.module, places, unit.calls)
    tables = [slot for table in divided.tables for slot in table.slots]  # several may be one
    parts = [*(piece.slots for piece in divided.pieces), tables, divided.rest]
    assert sorted(id(slot) for part in parts for slot in part) == sorted(map(id, places))
    paths = [owner.path for piece in divided.pieces for owner in piece.owners]
    assert not [path for path in paths if any(path.startswith(f"{other}.") for other in paths)], "one inside another"
    ranges = sorted(span for part in parts for span in spans(unique(part)))
    assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))


def spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The bytes that tensors lie in."""
    return [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes]
