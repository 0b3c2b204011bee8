"""LoRA branches beside the modules of a unit: peft's arithmetic in every placement, and nothing left of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ballast.memory import ManagedModel, manager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.planner import least_weights
from ballast.memory.weights.branches import ActiveAdapters, Adapter, attach, detach
from ballast.memory.weights.changes import LowRank
from ballast.memory.weights.groups import CallOrder, divide
from ballast.memory.weights.stored import stored_tensors
from ballast.memory.weights.structure import parameter_refs
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from selection import few
from streamed_models import WIDTH, Blocks, noise
from torch import nn

RANKS, ALPHAS, STRENGTHS = (4, 32), (8.0, None), (0.8, -0.3)


def adapters(module: nn.Module, ranks: tuple[int, ...] = RANKS, seed: int = 0, **more: object) -> list[Adapter]:
    generator = torch.Generator().manual_seed(seed)

    def part(inner: nn.Module, rank: int, alpha: float | None) -> LowRank:
        out, into, *kernel = inner.weight.shape
        down, up = torch.randn(rank, into, *kernel, generator=generator), torch.randn(out, rank, generator=generator)
        up = up.reshape(out, rank, *(1 for _ in kernel))
        return LowRank(0.05 * down, 0.05 * up, alpha=alpha, **more).like(inner)

    layers = {name: inner for name, inner in module.named_modules() if isinstance(inner, nn.Linear | nn.Conv2d)}
    return [
        Adapter((seed, rank), {name: (part(inner, rank, alpha),) for name, inner in layers.items()})
        for rank, alpha in zip(ranks, ALPHAS, strict=False)
    ]


def worn(module: nn.Module, **more: object) -> ActiveAdapters:
    return list(zip(adapters(module, **more), STRENGTHS, strict=False))


def pefts(module: nn.Module, given: ActiveAdapters) -> nn.Module:
    """The module as peft makes it of the same adapters."""
    for i, (adapter, _) in enumerate(given):
        (first,) = next(iter(adapter.parts.values()))
        alpha = first.rank if first.alpha is None else first.alpha
        config = LoraConfig(
            r=first.rank, lora_alpha=alpha, target_modules=list(adapter.parts), use_rslora=first.rank_stabilized
        )
        inject_adapter_in_model(config, module, adapter_name=f"lora{i}")
    for name in given[0][0].parts:
        layer = module.get_submodule(name)
        layer.set_adapter([f"lora{i}" for i, _ in enumerate(given)])
        for i, (adapter, strength) in enumerate(given):
            layer.set_scale(f"lora{i}", strength)
            layer.lora_A[f"lora{i}"].weight.data = adapter.parts[name][0].down
            layer.lora_B[f"lora{i}"].weight.data = adapter.parts[name][0].up
    return module.eval().requires_grad_(False)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).movedim(1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stabilized", [False, True])
def test_the_arithmetic_is_pefts(dtype: torch.dtype, stabilized: bool) -> None:
    """To the bit, in half precision and beside convolutions too, and where inputs are of another type."""
    x = torch.randn(2, 4, 8, 8).to(dtype)
    ours, theirs = Convolved().to(dtype).requires_grad_(False), Convolved().to(dtype)
    given = worn(ours, rank_stabilized=stabilized)
    plain = ours(x)
    attach(ours, given)
    expected = pefts(theirs, given)(x)
    assert torch.equal(ours(x), expected)
    assert not torch.allclose(expected, plain)
    detach(ours)
    assert torch.equal(ours(x), plain)
    assert type(ours.first) is nn.Conv2d and type(ours.second) is nn.Linear
    assert not list(ours.buffers()) and vars(ours.second).keys() == vars(nn.Linear(8, 4)).keys()


def stored_unit(folder: Path, depth: int = 16) -> ManagedModel:
    """Blocks whose weights lie in a file."""
    path = folder / "blocks.safetensors"
    save_file(dict(Blocks(depth).named_parameters()), path)

    def build() -> nn.Module:
        with torch.device("meta"):
            return Blocks(depth)

    def read() -> nn.Module:
        raise AssertionError("the file names all weights")

    return ManagedModel("blocks", "transformer", build, read, stored=lambda: stored_tensors([path]))


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("strategy", few(["resident", "streamed", "leafwise", "cpu"], "resident", "leafwise", "cpu"))
def test_every_placement_gives_the_same(strategy: str, from_disk: bool, sim: ModuleType, tmp_path: Path) -> None:
    """A unit wears its adapters wherever its weights are: they count, they leave, and no weight comes back."""
    x = noise().cpu()
    given = worn(Blocks())
    expected, plain = pefts(Blocks(), given)(x), Blocks()(x)
    unit, on = stored_unit(tmp_path), manager("sim")
    on.adopt(unit)
    bare = unit.size_bytes
    on.set_adapters(unit, given)
    assert (
        unit.size_bytes - bare
        == unit.branch_bytes
        == sum(t.nbytes for adapter, _ in given for (part,) in adapter.parts.values() for t in (part.down, part.up))
    )
    on.limit(ram="64KB" if from_disk and strategy != "cpu" else None)

    def output() -> torch.Tensor:
        with on.use(unit, strategy) as module:
            assert unit.resident_bytes <= sizes_of(unit).resident_bytes
            return module(x.to(module.device)).cpu()

    sim.reset_stats()
    torch.testing.assert_close(output(), expected, atol=1e-6, rtol=0)
    assert sim.stats().d2h_bytes == (0 if strategy == "cpu" else x.nbytes)
    assert unit.in_ram != (from_disk and strategy != "cpu")
    read = on.disk_bytes_read
    on.evict(unit)
    assert sim.stats().allocated_bytes == 0
    on.set_adapters(unit, given[:1])
    torch.testing.assert_close(output(), pefts(Blocks(), given[:1])(x), atol=1e-6, rtol=0)
    on.set_adapters(unit, ())
    assert unit.placement is None and unit.size_bytes == bare
    torch.testing.assert_close(output(), plain, atol=0 if strategy == "cpu" else 1e-6, rtol=0)
    if not from_disk:
        assert on.disk_bytes_read == read, "the weights are read again"
    on.evict(unit)


def test_another_strength_moves_nothing(sim: ModuleType, tmp_path: Path) -> None:
    """Nor does strength 0, where the result is that of no adapter at all, to the bit."""
    x = noise().cpu()
    unit, on, both = stored_unit(tmp_path), manager("sim"), adapters(Blocks())
    with on.use(unit, "resident") as module:
        plain = module(x.to(module.device)).cpu()
    on.set_adapters(unit, [(adapter, 1.0) for adapter in both])
    with on.use(unit, "resident"):
        pass
    for strengths in ((0.5, 2.0), (-0.3, 0.0), (0.0, 0.0)):
        moved, read = on.device_bytes_in, on.disk_bytes_read
        given = list(zip(both, strengths, strict=True))
        on.set_adapters(unit, given)
        with on.use(unit, "resident") as module:
            found = module(x.to(module.device)).cpu()
        torch.testing.assert_close(found, pefts(Blocks(), given)(x), atol=1e-6, rtol=0)
        assert (on.device_bytes_in, on.disk_bytes_read) == (moved, read)
    assert torch.equal(found, plain)
    on.evict(unit)


def test_strength_zero_computes_nothing() -> None:
    """So that what would overflow does no harm."""
    module, x = Blocks(2), noise().cpu()
    plain = module(x)
    up, down = torch.full((WIDTH, 4), 1e30), torch.full((4, WIDTH), 1e30)
    attach(module, [(Adapter("large", {"blocks.0.up": (LowRank(down, up),)}), 0.0)])
    assert torch.equal(module(x), plain)


def test_branches_divide_nothing_anew() -> None:
    """Groups are those of the bare module, so that what RAM holds of them, and in what buffers, stays as it is."""
    module = Blocks(12)
    before = divide(module, list(parameter_refs(module)), CallOrder())
    attach(module, worn(module, ranks=(32, 64)))
    after = divide(module, list(parameter_refs(module)), CallOrder())
    sizes = [[(p.stored_bytes, [owner.path for owner in p.owners]) for p in each.groups] for each in (before, after)]
    assert sizes[0] == sizes[1] and all(p.stored_bytes == p.packed_bytes for p in before.groups)
    assert len(after.rest) == len(before.rest)
    assert sum(len(group.branches()) for group in after.groups) == 4 * 24


@pytest.mark.parametrize("paged", [False, True])
def test_branches_pass_through_the_ring_with_their_module(
    paged: bool, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take as little room as the weights do, and are copied with these; from RAM, which holds them once.

    Through windows as well, where RAM could not be pinned.
    """
    if paged:
        monkeypatch.setattr("ballast.memory.weights.hostbuffer.wants_pinned", lambda device: True)
        monkeypatch.setattr("ballast.memory.weights.hostbuffer.pin", lambda flat, device: True)
        monkeypatch.setattr("ballast.memory.engine.ring.pin", lambda flat, device: False)
    x, module = noise().cpu(), Blocks(12)
    given = worn(module, ranks=(32, 64))
    unit, on = stored_unit(tmp_path, 12), manager("sim")
    on.adopt(unit)
    bare = sizes_of(unit)
    least = least_weights(bare)["streamed"]
    on.set_adapters(unit, given)
    sizes, expected = sizes_of(unit), pefts(Blocks(12), given)(x)
    assert sizes.fixed_bytes == bare.fixed_bytes
    assert 0 < least_weights(sizes)["streamed"] - least < unit.branch_bytes / 3
    assert sum(p.held_bytes for p in sizes.groups) - sum(p.held_bytes for p in bare.groups) == unit.branch_bytes
    for ram in (None, "150KB"):
        on.limit("600KB", ram)
        before = on.device_bytes_in
        with on.use(unit, "leafwise") as placed:
            torch.testing.assert_close(placed(x.to(placed.device)).cpu(), expected, atol=1e-6, rtol=0)
            assert unit.resident_bytes < unit.branch_bytes
        assert on.device_bytes_in - before > unit.branch_bytes
        on.evict(unit)
        assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0
    for adapter, _ in given:
        for path, parts in adapter.parts.items():
            held = vars(unit.module.get_submodule(path))["_buffers"].values()
            assert all(any(each is tensor for each in held) for tensor in parts[0].tensors().values())


def test_a_leased_unit_keeps_its_adapters(sim: ModuleType) -> None:
    module = Blocks(2)
    unit, on, given = ManagedModel.from_module("blocks", "transformer", module), manager("sim"), worn(module)
    with on.use(unit, "resident"):
        with pytest.raises(RuntimeError, match="blocks is in use, and keeps its LoRAs"):
            on.set_adapters(unit, given)
        assert not unit.active_adapters
    on.set_adapters(unit, given)
    with on.use(unit, "resident"):
        on.set_adapters(unit, [(adapter, 0.0) for adapter, _ in given])
    on.evict(unit)


@pytest.mark.parametrize(
    ("part", "inner", "why"),
    [
        (LowRank(torch.ones(4, 8), torch.ones(8, 4)), nn.LayerNorm(8), "is of a LayerNorm, which takes none"),
        (LowRank(torch.ones(4, 7), torch.ones(8, 4)), nn.Linear(8, 8), r"is \[4, 7\] where it must be \[4, 8\]"),
        (LowRank(torch.ones(4, 8), torch.ones(8, 5)), nn.Linear(8, 8), r"is \[8, 5\] where it must be \[8, 4\]"),
        (LowRank(torch.ones(4, 8, 1, 1), torch.ones(8, 4)), nn.Conv2d(8, 8, 3), r"must be \[4, 8, 3, 3\]"),
        (LowRank(torch.ones(4, 8), torch.ones(8, 4)), nn.Conv2d(8, 8, 3, groups=2), "convolution with groups"),
        (LowRank(torch.ones(4, 8), torch.ones(8, 4), torch.ones(3)), nn.Linear(8, 8), r"is \[3\] where .* \[8\]"),
    ],
)
def test_what_cannot_be_beside_a_module_says_why(part: LowRank, inner: nn.Module, why: str) -> None:
    assert re.search(why, part.why_not(inner))


def test_compiled_blocks_meet_branches_that_come_later() -> None:
    """torch compiles a layer with branches anew: it never runs what it compiled without them."""
    module = Blocks(2)
    fast = torch.compile(module, backend="eager")
    x = torch.randn(2, WIDTH)
    plain = fast(x)
    for strengths in ((0.8, -0.3), (0.4, 1.5)):
        given = list(zip(adapters(module), strengths, strict=True))
        attach(module, given)
        torch.testing.assert_close(fast(x), pefts(Blocks(2), given)(x), atol=1e-6, rtol=0)
        detach(module)
        assert torch.equal(fast(x), plain)
