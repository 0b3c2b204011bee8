"""Nodes with random models, budgets, strategies and faults: in the end all is as it was in the beginning."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import psutil
import pytest
import tiny
import torch
from ballast.memory import DoesNotFitError, manager
from ballast.memory.errors import is_out_of_memory
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from ballast.nodes.shared import reference
from fault_points import KINDS, FaultError, InterruptProcessingException, raised_at
from node_runner import run_node

FAMILIES = ("auraflow", "zimage", "chroma")
RUNS, WARM_UP = (200, 30) if os.environ.get("BALLAST_SOAK") else (40, 20)
STRATEGIES = ("auto", "resident", "streamed", "leafwise", "cpu")


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[None]:
    """The families in the host's models/diffusers."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    root.mkdir(parents=True, exist_ok=True)
    for name in FAMILIES:
        (root / f"mix_{name}").symlink_to(tiny_folders(name), target_is_directory=True)
    yield
    for name in FAMILIES:
        (root / f"mix_{name}").unlink()


class Graph:
    """Runs one random graph after another, and remembers what each must give."""

    def __init__(self, seed: int, sim: ModuleType) -> None:
        self.random, self.sim = random.Random(seed), sim
        self.expected: dict[tuple, torch.Tensor] = {}
        self.loaded: dict[tuple, Any] = {}
        self.ended: Counter[str] = Counter()

    def run(self) -> None:
        """A graph of a loader and the stages, one of which may be broken off."""
        choose = self.random.choice
        name, prompt = choose(FAMILIES), choose(["a boat", "a tree"])
        family = tiny.FAMILIES[name]
        loading = (f"mix_{name}", choose([True, False]), choose([0, 0.002]))
        if loading not in self.loaded:  # as the host keeps what nodes gave
            given = dict(zip(("pipeline", "keep_loaded", "vram_gb"), loading, strict=True))
            self.loaded[loading] = run_node(LoadPipeline, device="sim", **given).result[0]
        pipeline = self.loaded[loading]
        if choose([True, False]):
            pipeline.open().cache.clear()
        broken = choose([None, None, "encode", "sample", "decode"])
        size = {"width": family.size[0], "height": family.size[1], "steps": 1, "guidance": family.guidance}
        if self.random.random() < 0.1 and name != "zimage":  # whose tiny one takes no prompt of usual length
            run_node(VramPlan, pipeline=pipeline, **size)
        strategy = choose(STRATEGIES)

        def stage(name: str, node: type, **inputs: Any) -> Any:
            fault = self._fault() if name == broken else nullcontext()
            with fault:
                return run_node(node, pipeline=pipeline, **inputs).result[0]

        cond = stage("encode", TextEncode, prompt=prompt, negative_prompt="")
        latent = stage("sample", Sampler, conditioning=cond, strategy=strategy, **size)
        picture = stage("decode", VaeDecode, latent=latent)
        expected = self.expected.setdefault((name, prompt), picture)
        torch.testing.assert_close(picture, expected, atol=1e-4, rtol=0)
        if choose([True, False]):
            run_node(VramReport, after=picture)
        if choose([True, False, False]):
            run_node(FreeVram, value=picture)

    def _fault(self) -> Any:
        at = self.random.randint(1, 250)
        kind = self.random.choice([*KINDS, "out of memory", "out of memory"])
        if kind == "out of memory":
            return self.sim.fail_after(at)
        error = self.random.choice([FaultError, InterruptProcessingException])
        return raised_at(kind, at, error("fault"))

    def end(self) -> None:
        """Run one, whatever becomes of it."""
        try:
            self.run()
            self.ended["finished"] += 1
        except DoesNotFitError as error:
            assert "\n" not in str(error)
            self.ended["does not fit"] += 1
        except (FaultError, InterruptProcessingException) as error:
            self.ended[type(error).__name__] += 1
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, FaultError | DoesNotFitError):
                cause = cause.__cause__
            if cause is None and not is_out_of_memory(error):
                raise
            assert "\n" not in str(error), error
            self.ended["wrapped"] += 1


def held(graph: Graph) -> dict[str, int]:
    run_node(FreeVram)
    graph.loaded.clear()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # what is free between what is held is no leak
        trim(0)
    return {
        "bytes on the device": manager("sim").accelerator.allocated_bytes(),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "pipelines": len(reference._open),
        "leases": sum(unit.leases for unit in manager("sim").units()),
    }


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_many_random_runs_leave_nothing(sim: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    graph, process = Graph(2024, sim), psutil.Process()
    for _ in range(WARM_UP):
        graph.end()
    before, resident = held(graph), process.memory_info().rss
    for _ in range(RUNS - WARM_UP):
        graph.end()
    after = held(graph)
    # Less is no leak: a worker that ran other tests before may close a file of theirs meanwhile.
    assert all(after[what] <= count for what, count in before.items()), (before, after)
    assert after["bytes on the device"] == after["leases"] == 0
    assert process.memory_info().rss <= 1.02 * resident
    assert sum(graph.ended.values()) == RUNS
    assert graph.ended["finished"] > RUNS / 3, graph.ended
    assert graph.ended["FaultError"] + graph.ended["wrapped"] > RUNS / 25, graph.ended
    assert graph.ended["InterruptProcessingException"] > RUNS / 25, graph.ended
