"""Division into groups, what a dry run sees of the calls inside, and tables whose rows are looked up in RAM."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.planning.dry_run import dry_run
from ballast.memory.planning.forecast import UnitForecast
from ballast.memory.weights import groups as groups
from ballast.memory.weights.embeddings import rows_of
from ballast.memory.weights.groups import CallOrder, Division, divide
from ballast.memory.weights.stored import stored_tensors
from ballast.memory.weights.structure import ParameterRef, parameter_refs
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from streamed_models import SIM, nbytes, put, resident_engine, run
from torch import nn
from torch.nn import functional

WIDTH = 32


def divided(module: nn.Module, calls: CallOrder | None = None) -> Division:
    return divide(module, list(parameter_refs(module)), calls or CallOrder())


def paths(found: Division) -> list[list[str]]:
    return [[owner.path for owner in group.owners] for group in found.groups]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Mixed(nn.Module):
    """What models have: a parameter beside modules, one read by its parent, a shared one, a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.read, self.seldom = linear(), linear(), linear()
        self.twins = nn.ModuleList([linear(), linear()])
        self.twins[1].weight = self.twins[0].weight
        self.inner = nn.ModuleDict({"a": linear(), "b": linear()})
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False)
        self.shift = Shifted()
        self.query = Query()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query()
        x = self.inner["b"](self.first(x)) * self.scale
        x = self.twins[1](self.twins[0](self.inner["a"](x)))
        x = functional.linear(x, self.read.weight)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.shift(x) + query


class Shifted(nn.Module):
    """A few weights of its own, and a module inside; reads that module's weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.layer.weight) + self.shift


class Query(nn.Module):
    """Gives a view of its weights, which is used long after its call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight.expand(4, -1)


def seen_in(module: nn.Module, *given: torch.Tensor) -> UnitForecast:
    unit = ManagedModel("dit", "transformer", lambda: module.to("meta"))
    skeleton = unit.skeleton()
    forecast, _ = dry_run({"dit": skeleton}, lambda device: skeleton(*(x.to(device) for x in given)))
    return forecast.units["dit"]


def test_a_dry_run_sees_the_order_and_who_reads_whose_weights() -> None:
    seen = seen_in(Mixed(), torch.zeros(4, WIDTH))
    order = ["query", "first", "inner.b", "inner.a", "twins.0", "twins.1", "attention", "shift"]
    assert [path for path, _ in seen.modules if path] == order
    assert set(seen.whole) == {"attention", "shift"}
    assert set(seen.outside) == {"read", "query", "twins.0", "twins.1"} - {"twins.0", "twins.1"} | _shared(seen)
    product = 2.0 * 4 * WIDTH * WIDTH
    assert dict(seen.modules)["first"].total == product
    assert dict(seen.modules)["twins.1"].total == 2 * product, "its own, and the one that nobody's call belongs to"
    assert sum(operations.total for _, operations in seen.modules) == seen.operations.total


def _shared(seen: UnitForecast) -> set[str]:
    return {path for path in seen.outside if path.startswith("twins")}


def test_groups_follow_the_calls_and_the_rest_stays(sim: ModuleType) -> None:
    module = Mixed()
    calls = seen_in(Mixed(), torch.zeros(4, WIDTH)).call_order
    found = divided(module, calls)
    assert paths(found) == [["first"], ["inner.b"], ["inner.a"], ["attention"], ["shift"], ["seldom"]]
    assert [group.called for group in found.groups] == [True] * 5 + [False]
    rest = {id(ref.tensor) for ref in found.rest}
    assert rest == {id(t) for t in (module.scale, module.twins[0].weight, module.read.weight, module.query.weight)}
    x = torch.randn(4, WIDTH)
    expected = module(x)
    placement = put(module, calls=calls)
    for _ in range(3):
        torch.testing.assert_close(run(module, x.to(SIM)).cpu(), expected)
    assert sim.stats().hazards == 0
    placement.remove()


def test_view_of_weights_that_nobody_foresaw_is_kept_apart(sim: ModuleType) -> None:
    module = nn.Module()
    module.query, module.layers = Query(), nn.ModuleList(linear() for _ in range(12))
    module.requires_grad_(False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        query = module.query()
        for layer in module.layers:
            x = layer(x)
        return x + query

    x = torch.randn(4, WIDTH)
    expected = forward(x)
    placement = put(module)
    assert placement._ring is not None
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(forward(x.to(SIM)).cpu(), expected)
    placement.remove()


def test_members_of_a_list_are_called_if_one_of_them_was() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.ModuleDict({"up": linear(), "down": linear()}) for _ in range(3))
    module.head, module.other = linear(), linear()
    found = divided(module, CallOrder(("blocks.0.up", "blocks.0.down", "blocks.2.up", "blocks.2.down", "head")))
    called = [owner.path for group in found.groups if group.called for owner in group.owners]
    assert called[:2] == ["blocks.0.up", "blocks.0.down"]
    assert set(called) == {f"blocks.{i}.{part}" for i in range(3) for part in ("up", "down")} | {"head"}
    assert [owner.path for group in found.groups if not group.called for owner in group.owners] == ["other"]


def test_members_that_were_not_seen_come_one_after_the_other() -> None:
    """Experts that the dry run did not route to: an expert's weights are called together, and behind those seen."""
    module = nn.Module()
    for name in ("first", "second"):
        experts = nn.ModuleList(nn.ModuleDict({part: linear() for part in "abc"}) for _ in range(12))
        setattr(module, name, nn.ModuleDict({"experts": experts, "shared": linear()}))
    seen = [f"experts.{i}.{part}" for i in (0, 1) for part in "acb"]
    order = [f"{name}.{path}" for name in ("first", "second") for path in (*seen, "shared")]
    called = [owner.path for group in divided(module, CallOrder(tuple(order))).groups for owner in group.owners]
    experts = [f"experts.{i}.{part}" for i in range(12) for part in "acb"]
    assert called == [f"{name}.{path}" for name in ("first", "second") for path in (*experts, "shared")]


def test_compiled_blocks_are_whole() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(20))
    assert paths(divided(module, CallOrder(blocks=True))) == [[f"blocks.{i}"] for i in range(20)]
    assert paths(divided(module))[:2] == [["blocks.0.0"], ["blocks.0.2"]]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_every_weight_is_in_one_place_and_no_run_is_too_large(widths: list[int]) -> None:
    module = nn.Sequential(*(nn.Linear(width, 4, device="meta") for width in widths))
    found = divided(module)
    limit = groups.largest_run_bytes(nbytes(module))
    assert all(group.held_bytes <= limit or len(group.owners) == 1 for group in found.groups)
    assert all(group.packed_bytes >= group.held_bytes for group in found.groups)
    held = [id(ref.tensor) for group in found.groups for ref in group.refs]
    assert sorted(held) == sorted(id(p) for p in module.parameters())


# Tables


class Encoder(nn.Module):
    """A large table of tokens, whose ids the model shifts, and a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Scaled(500, WIDTH)
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids=ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids + 2) * torch.tensor(WIDTH**0.5).to(self.weight.dtype)


@pytest.mark.parametrize("how", ["resident", "streamed", "from disk"])
def test_rows_of_a_table_are_looked_up_bit_for_bit(how: str, sim: ModuleType, tmp_path: Path) -> None:
    module, ids = Encoder(), torch.tensor([[3, 9, 3], [0, 497, 1]])
    expected = module(ids)
    source: Any = None
    if how == "from disk":
        save_file(module.state_dict(), tmp_path / "a.safetensors")
        source = stored_tensors([tmp_path / "a.safetensors"])
        module.to("meta")
    if how == "resident":
        placement: Any = resident_engine(module, torch.device(SIM))
        placement.place()
    else:
        placement = put(module, source=source)
    table = 500 * WIDTH * 4
    assert sim.stats().allocated_bytes == placement.resident_bytes <= nbytes(module) - table
    sim.reset_stats()
    for _ in range(2):
        assert torch.equal(run(module, ids.to(SIM)).cpu(), expected)
    assert sim.stats().peak_bytes < placement.resident_bytes + 20 * ids.numel() * WIDTH * 4
    placement.remove()
    if source is None:
        assert torch.equal(module(ids), expected), "whole again"


def test_id_out_of_range_is_an_error_from_disk_too(tmp_path: Path) -> None:
    table = torch.randn(10, 4)
    save_file({"table": table}, tmp_path / "a.safetensors")
    stored = stored_tensors([tmp_path / "a.safetensors"])["table"]
    ids = torch.tensor([9, 0, 9, 4])
    on_disk, in_ram = (ParameterRef({}, "weight", each) for each in (table.to("meta"), table))
    assert torch.equal(rows_of(on_disk, stored, ids), table[ids])
    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            rows_of(on_disk, stored, torch.tensor([wrong]))
        with pytest.raises(IndexError):
            rows_of(in_ram, None, torch.tensor([wrong]))
