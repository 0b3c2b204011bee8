"""Faults in the midst of runs: out of memory, errors, interrupts, a host that takes everything away at any time."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import manager
from ballast.memory.host.patcher import HostPatcher
from ballast.memory.weights.structure import block_lists
from fault_points import DEMO, KINDS, STAGES, FaultError, InterruptProcessingException, Run
from selection import few

Folders = Callable[[str], Path]
SOAK = bool(os.environ.get("BALLAST_SOAK"))
FAST = "auraflow"  # all that a run does, in a few hundred operators
ERRORS = (FaultError, InterruptProcessingException, KeyboardInterrupt)
LATER = {"encode": pytest.mark.soak, "decode": pytest.mark.long}
POINTS = 50 if SOAK else 15  # of each error in each stage
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "kept": {"keep": True},
    "streamed": {"strategy": "streamed", "tight": True},
    "from disk": {"from_disk": True, "tight": True},
    "leafwise": {"strategy": "leafwise"},
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


# Out of memory


@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.soak), True])
def test_out_of_memory_at_every_allocation_of_a_whole_run(keep: bool, tiny_folders: Folders, sim: ModuleType) -> None:
    """Each stage finishes, with the same bits; nothing stays that should not, and the next run is the same.

    The stages before the one that fails are undisturbed, and those after it get what it gave: they are not run.
    """
    run = Run.of(FAST, tiny_folders(FAST), keep=keep)
    tried, step = 0, 1 if SOAK else 71 if keep else 5  # keeping is much the same
    for stage in STAGES:
        run(stage)
        sim.reset_stats()
        run(stage)
        for count in range(1, sim.stats().allocation_count + 1, step):
            with sim.fail_after(count):
                result = run(stage)
            if stage == "decode":  # in stripes or on the CPU, sums may come in another order
                torch.testing.assert_close(result, run.expected[stage], atol=1e-5, rtol=0)
            else:
                assert run.is_same(stage, result), (stage, count)
            assert not run.left_over(), (stage, count)
            assert keep or sim.stats().allocated_bytes == 0, (stage, count)
            if tried % 50 == 0:
                assert run.is_same("decode", run.whole()), (stage, count)
            tried += 1
    assert tried > 700 / step
    assert run.is_same("decode", run.whole())
    manager("sim").free()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_out_of_memory_at_any_allocation_of_streamed_encoders_and_transformers(
    tiny_folders: Folders, sim: ModuleType
) -> None:
    """From RAM and from disk, on the bundled model: the ring, the windows and the readers give up what they hold."""
    tried: Counter[str] = Counter()
    for way in ("streamed", "from disk"):
        run = Run.of("demo", DEMO, **WAYS[way])
        assert run.sat.startswith("streamed, "), run.sat
        for stage in ("encode", "sample"):
            sim.reset_stats()
            run(stage)
            allocations = sim.stats().allocation_count
            for count in random.Random(way).sample(range(1, allocations + 1), 8 if SOAK else 2):
                with sim.fail_after(count):
                    result = run(stage)
                assert run.is_same(stage, result), (way, stage, count)
                assert not run.left_over(), (way, stage, count)
                assert sim.stats().allocated_bytes == 0
                tried[way] += 1
        assert run.is_same("decode", run.whole())
    assert set(tried) == {"streamed", "from disk"} and min(tried.values()) == (16 if SOAK else 4)


# Errors and interrupts


@pytest.mark.parametrize("stage", [pytest.param(s, marks=LATER[s]) if s in LATER else s for s in STAGES])
def test_error_at_any_point_comes_out_as_itself_and_leaves_nothing(
    stage: str, tiny_folders: Folders, sim: ModuleType
) -> None:
    """Out of the device's operators, allocations and copies, of file reads, of the host's question at each block."""
    random_ = random.Random(stage)
    ended: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    turns = [(error, way, kind) for error in ERRORS for way in WAYS for kind in KINDS]
    for way in WAYS if SOAK else ("auto", "streamed", "from disk"):
        opening = WAYS[way]
        run = Run.of(FAST, tiny_folders(FAST), **opening)
        assert run.sat.startswith("resident" if way in ("auto", "kept") else "streamed, "), run.sat
        totals: dict[str, int] = {}
        for error, _, kind in (turn for turn in turns if turn[1] == way):
            manager("sim").free()
            totals[kind] = totals.get(kind) or run.passes(stage, kind)
            for _ in range(2 * POINTS // len(KINDS) // len(WAYS)):
                if totals[kind] == 0:  # only from disk are weights read at each run
                    continue
                at = random_.randint(1, totals[kind])
                if run.pipe.keep:
                    manager("sim").free()
                tried[error.__name__] += 1
                ended[f"{error.__name__} {run.broken(stage, kind, at, error)}"] += 1
                where = (way, kind, at, error.__name__)
                assert not run.left_over(), where
                if not run.pipe.keep:
                    assert sim.stats().allocated_bytes == 0, where
                if at % 3 == 0:
                    assert run.is_same(stage, run(stage)), where
        assert run.is_same("decode", run.whole()), way
        manager("sim").free()
        assert sim.stats().allocated_bytes == 0, way
    assert ended.keys() <= {f"{error.__name__} {how}" for error in ERRORS for how in ("raised", "not needed")}
    # What has room in RAM is not read from disk, so that a stage may have fewer points.
    assert all(tried[error.__name__] >= 0.75 * POINTS for error in ERRORS), tried
    assert all(ended[f"{error.__name__} raised"] >= 0.8 * tried[error.__name__] for error in ERRORS), ended


@pytest.mark.parametrize("way", few(WAYS, "kept", "from disk"))
@pytest.mark.parametrize("error", few(ERRORS, FaultError))
def test_error_out_of_on_step(way: str, error: type[BaseException], tiny_folders: Folders, sim: ModuleType) -> None:
    run = Run.of(FAST, tiny_folders(FAST), **WAYS[way])
    raised = error("stop")

    def stop(step: int, steps: int, latents: torch.Tensor) -> None:
        raise raised

    with pytest.raises(error) as caught:
        run("sample", on_step=stop)
    assert caught.value is raised
    assert not run.left_over()
    assert sim.stats().allocated_bytes == 0
    assert run.is_same("sample", run("sample"))


# A host that evicts everything


@pytest.fixture
def evicting() -> Iterator[Callable[[Run, str], Counter[str]]]:
    """Let the host ask every unit of a run to go, wholly or as far as possible, before and after each of its blocks."""
    undo: list[Callable[[], None]] = []

    def evict_at_blocks(run: Run, how: str) -> Counter[str]:
        asked: Counter[str] = Counter()
        patchers = [HostPatcher(manager("sim"), unit, torch.device("sim:0")) for unit in run.units]

        def ask() -> None:
            with torch.inference_mode(False):
                for patcher in patchers:
                    if how == "detach":
                        patcher.detach()
                    else:
                        patcher.partially_unload(torch.device("cpu"), 1e30)
            asked["calls"] += 1

        def ask_somehow() -> None:
            if asked["calls"] % 3:
                ask()
                return
            elsewhere = threading.Thread(target=ask)
            elsewhere.start()
            elsewhere.join()

        for unit in run.units:
            blocks = {block for _, found in block_lists(unit.module) for block in found}
            for block in blocks or {next(unit.module.children())}:
                before, forward = vars(block).get("forward"), block.forward

                def disturbed(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                    ask_somehow()
                    result = forward(*args, **kwargs)
                    ask_somehow()
                    return result

                vars(block)["forward"] = disturbed
                undo.append(functools.partial(_put_back, vars(block), before))
        return asked

    yield evict_at_blocks
    for back in undo:
        back()


def _put_back(own: dict[str, Any], forward: Any) -> None:
    own.pop("forward")
    if forward is not None:
        own["forward"] = forward


@pytest.mark.parametrize("way", few(["auto", "kept", "streamed", "from disk"], "kept", "from disk"))
@pytest.mark.parametrize(
    ("name", "how"),
    [(FAST, "detach"), (FAST, "partially_unload"), pytest.param("demo", "detach", marks=pytest.mark.soak)],
)
def test_host_that_evicts_everything_between_any_two_blocks(
    name: str, way: str, how: str, tiny_folders: Folders, sim: ModuleType, evicting: Callable[[Run, str], Counter[str]]
) -> None:
    run = Run.of(name, DEMO if name == "demo" else tiny_folders(name), **WAYS[way])
    asked = evicting(run, how)
    for _ in range(2):
        before = asked["calls"]
        assert run.is_same("decode", run.whole())
        assert asked["calls"] - before >= 16
    gc.collect()
    manager("sim").free()
    assert sim.stats().allocated_bytes == 0
    assert not any(unit.leases or unit in manager("sim")._residency.leaving for unit in run.units)
