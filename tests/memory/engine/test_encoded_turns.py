"""Encoded weights while budgets change, the host calls, runs are interrupted, blocks are compiled: as plain ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel, manager, simulated
from ballast.memory.planning.fit import sizes_of
from ballast.memory.weights.groups import CallOrder
from ballast.pipelines.sampling.kernels import kernels
from encoded_folders import Pair
from fault_points import KINDS, FaultError, InterruptProcessingException, raised_at
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from selection import few
from streamed_models import least_bytes, streamed_engine

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0}
BLOCKS, CPU = CallOrder(blocks=True), torch.device("cpu")  # as `compile` wants it
WEIGHTS = [
    pytest.param("q8_0", marks=pytest.mark.long),
    *(pytest.param(how, marks=pytest.mark.soak) for how in ("int8", "4 bit")),
]


class Bench:
    """A tiny Flux with an encoded transformer, the least and the whole of its budgets, and what plain weights give."""

    def __init__(self, how: str, folder: Path, where: Path) -> None:
        self.pair = Pair(folder, ["transformer"], how, where)
        plain = self.pair.open(encoded=False)
        self.cond = plain.encode("a red boat")
        self.expected = plain.sample(self.cond, **SIZE)
        pipe = self.pair.open()
        pipe.sample(self.cond, **SIZE)
        plans = [pipe.plan(**SIZE, cond=self.cond, vram=1, strategy=how) for how in ("auto", "resident")]
        self.least, self.whole = (plan.sampling.peak_vram_bytes for plan in plans)
        sizes = sizes_of(pipe.denoisers[0])
        self.windows = 3 * max(group.packed_bytes for group in sizes.groups) + 20_000
        self.size = pipe.denoisers[0].size_bytes

    def open(self, vram_share: float, ram_share: float, keep: bool) -> Any:
        vram = int(self.least + vram_share * 1.6 * (self.whole - self.least))
        ram = None if ram_share > 0.9 else int(self.windows + ram_share * self.size)
        return self.pair.open(vram=vram, ram=ram, keep=keep)


@pytest.fixture(scope="module", params=WEIGHTS)
def bench(request: pytest.FixtureRequest, tiny_folders: Callable[[str], Path], tmp_path_factory: Any) -> Bench:
    simulated.enable(total="1GB", tflops=1.0, h2d_gbps=25)
    return Bench(request.param, tiny_folders("flux"), tmp_path_factory.mktemp("encoded"))


RUN = st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(-200_000, 200_000))
# Of what comes in turn some lies in RAM, some comes from the disk, and a copy fails.
HALF_IN_RAM = [
    ((0.71, 0.51, True, -244), None),
    ((0.0, 0.58, True, -1169), ("copy", 52, True)),
]
# More VRAM and less RAM, in which an allocation and a read fail.
LESS_RAM = [
    ((0.4, 1.0, False, 150_000), ("allocation", 90, False)),
    ((1.0, 0.2, True, -200_000), ("read", 7, False)),
]
FAULT = st.none() | st.tuples(st.sampled_from(KINDS), st.integers(1, 400), st.booleans())


@settings(
    max_examples=6,
    phases=tuple(Phase) if os.environ.get("BALLAST_SOAK") else (Phase.explicit,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(runs=st.lists(st.tuples(RUN, FAULT), min_size=2, max_size=5))
@example(runs=HALF_IN_RAM)
@example(runs=LESS_RAM)
def test_budgets_host_calls_and_interrupts(bench: Bench, sim: ModuleType, runs: list[Any]) -> None:
    """One run after another: the latents of plain weights, or the error that was raised; books are bytes."""
    mgr = manager("sim")
    for (vram_share, ram_share, keep, change), fault in runs:
        pipe = bench.open(vram_share, ram_share, keep)
        (dit,) = pipe.denoisers

        def move(*_: Any, dit: ManagedModel = dit, change: int = change) -> None:
            (mgr.shrink if change < 0 else mgr.grow)(dit, abs(change))

        raised = None
        if fault is not None:
            kind, at, stops = fault
            raised = (InterruptProcessingException if stops else FaultError)("fault")
        try:
            if raised is None:
                latents = pipe.sample(bench.cond, **SIZE, on_step=move)
            else:
                with raised_at(kind, at, raised):
                    latents = pipe.sample(bench.cond, **SIZE, on_step=move)
            assert torch.equal(latents, bench.expected)
        except (FaultError, InterruptProcessingException) as error:
            assert error is raised
        assert mgr.report().resident_bytes == sim.stats().allocated_bytes
        assert sim.stats().hazards == 0
        if not keep:
            assert sim.stats().allocated_bytes == 0
        assert torch.equal(pipe.sample(bench.cond, **SIZE), bench.expected)
        assert pipe.ram_bytes is None or dit.host_bytes <= pipe.ram_bytes
    mgr.free()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("how", few(["q8_0", "int8"], "q8_0"))
def test_compiled_blocks_give_the_same_from_as_many_graphs(
    how: str, tiny_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """KeptDequantized outside of what is compiled, wherever the blocks come."""
    pair, found, counts = Pair(tiny_folders("flux"), ["transformer"], how, tmp_path), [], []
    for encoded in (False, True):
        torch._dynamo.reset()
        pipe, arguments, graphs = pair.open(encoded=encoded, device="cpu"), {}, []

        def compiler(graph: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        (dit,) = pipe.denoisers
        noted = dit.module.register_forward_pre_hook(
            lambda _, given, named, arguments=arguments: arguments.update(named), with_kwargs=True
        )
        pipe.sample(pipe.encode("a red boat"), **SIZE)
        noted.remove()
        dit.load()
        for share in (0.0, 0.5):
            with kernels([dit.module], compile=True, backend=compiler), torch.inference_mode():
                least = least_bytes(dit.module, BLOCKS)
                placement = streamed_engine(dit.module, CPU, least + int(share * dit.size_bytes), calls=BLOCKS)
                placement.place()
                found.append(dit.module(**arguments)[0])
                first = len(graphs)
                assert torch.equal(dit.module(**arguments)[0], found[-1]) and len(graphs) == first, "compiled anew"
                placement.end_call()
                placement.remove()
            counts.append(first)
        manager("cpu").free()
    assert all(torch.equal(one, found[0]) for one in found)
    assert len(set(counts)) == 1 and counts[0] > 0
    torch._dynamo.reset()
