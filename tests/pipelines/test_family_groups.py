"""How the models of each family are divided into groups: small ones, of all the weights, none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from ballast.memory import ManagedModel
from ballast.memory.planning.fit import sizes_of
from ballast.memory.weights.groups import divide, unique
from ballast.memory.weights.structure import parameter_refs
from selection import THREE, few

Folders = Callable[[str], Path]

# Modules that read the weights of others, and weights that are read elsewhere: none, as far as is known.
READS: dict[tuple[str, str], tuple[set[str], set[str]]] = {}


@pytest.mark.parametrize("name", few(tiny.FAMILIES, *THREE))
def test_groups_are_small_and_have_their_bytes_to_themselves(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    pipe, encode, sample, decode = tiny.stages(name, tiny_folders(name), "sim")
    decode(sample(encode()))
    for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder):
        unit.load()
        sizes = sizes_of(unit)
        largest = max(group.packed_bytes for group in sizes.groups)
        assert sizes.least_streamed_bytes <= 2 * largest + sizes.fixed_bytes
        # Of the largest models this is some megabytes, and of these tiny ones a part of each.
        assert sizes.fixed_bytes <= 0.05 * sizes.total_bytes, unit
        assert (unit.calls.whole, unit.calls.outside) == READS.get((name, unit.name), (set(), set())), unit
        check_division(unit)


def check_division(unit: ManagedModel) -> None:
    """Each weight is of one group, of the tables or of the rest, and shares no bytes with those of others."""
    places = list(parameter_refs(unit.module))
    divided = divide(unit.module, places, unit.calls)
    tables = [ref for table in divided.tables for ref in table.refs]  # several may be one
    parts = [*(group.refs for group in divided.groups), tables, divided.rest]
    assert sorted(id(ref) for part in parts for ref in part) == sorted(map(id, places))
    paths = [owner.path for group in divided.groups for owner in group.owners]
    assert not [path for path in paths if any(path.startswith(f"{other}.") for other in paths)], "one inside another"
    ranges = sorted(span for part in parts for span in spans(unique(part)))
    assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))


def spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The bytes that tensors lie in."""
    return [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes]
