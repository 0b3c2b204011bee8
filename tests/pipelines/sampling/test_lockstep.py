"""The passes of guidance share each copy of weights: the same bits, half of the bytes, and plans that say so."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from ballast.memory.engine.baton import in_turns
from ballast.memory.lockstep import passes_in_turn
from ballast.memory.lockstep.passes_in_turn import Lockstep
from ballast.memory.lockstep.shared_work import in_lockstep
from ballast.memory.planning.forecast import Operations, UnitForecast
from fault_points import FaultError
from selection import few

Folders = Callable[[str], Path]
STEPS = 4
ROOM = 180_000  # bytes beyond the least, for the pass that waits
SLOW = {"h2d_gbps": 1e-5, "tflops": 1e-3}  # of a card on which the copies of a tiny model take seconds
TWO_PASSES = ("qwenimage", "wan", "hunyuan_video15", "lumina2", "chroma", "flux2_klein")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("lockstep")


class Opened:
    """A tiny pipeline, with its prompt encoded, and the passes of its last run that were shared or missed."""

    def __init__(self, name: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, **opening: Any) -> None:
        family = tiny.FAMILIES[name]
        self.pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache, **opening)
        self.cond = self.pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
        width, height = family.size
        size = {"width": width, "height": height, "frames": family.frames}
        self.run = {**size, "steps": STEPS, "guidance": family.guidance, "strategy": "leafwise", **family.call_kwargs}
        self.seen: list[Lockstep] = []
        made = Lockstep.__init__

        def noted(lockstep: Lockstep, *args: Any) -> None:
            made(lockstep, *args)
            self.seen.append(lockstep)

        monkeypatch.setattr(Lockstep, "__init__", noted)

    def __call__(self, **more: Any) -> torch.Tensor:
        self.seen.clear()
        latents = self.pipe.sample(self.cond, **self.run | more)
        gc.collect()
        return latents

    def within_little(self) -> int:
        """Give the pipeline a budget in which it streams, and return that."""
        plan = self.pipe.plan(cond=self.cond, vram=1, **self.run)
        budget = plan.sampling.peak_vram_bytes + ROOM
        self.pipe = self.pipe.within(vram=budget)
        return budget

    @property
    def counts(self) -> tuple[int, int]:
        """Calls of the last run that were foreseen, and passes that ran in vain."""
        return sum(each.shared for each in self.seen), sum(each.missed for each in self.seen)


@pytest.fixture
def slow(sim: ModuleType) -> ModuleType:
    """The simulated accelerator with a slow bus."""
    sim.enable(total="4GB", **SLOW)
    return sim


@pytest.mark.parametrize("name", few(TWO_PASSES, "qwenimage"))
def test_bits_are_those_of_passes_alone(
    name: str, tiny_folders: Folders, cache: Path, slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed in the least room: each copy serves both passes. With modules computed once too."""
    monkeypatch.setattr("ballast.pipelines.planning.once_plans._GAIN", 1e9)  # some have more work than weights
    opened = Opened(name, tiny_folders(name), cache, monkeypatch)
    on, brought = manager("sim"), []
    before = on.device_bytes_in
    expected = opened()
    brought.append(on.device_bytes_in - before)
    for once in (False, True):
        before = on.device_bytes_in
        assert torch.equal(opened(lockstep=True, once=once), expected)
        brought.append(on.device_bytes_in - before)
        assert opened.counts == (STEPS, 0) or (once and name == "hunyuan_video15")  # which is faster without lockstep
        assert slow.stats().allocated_bytes == 0
    assert brought[1] < 0.7 * brought[0] or name == "hunyuan_video15"  # which the ring holds whole
    assert torch.equal(opened(), expected)


WAYS: dict[str, dict[str, Any]] = {"int8": {"weights": "int8"}, "from disk": {}, "two pictures": {}, "a LoRA": {}}
SHORT = [*few(list(WAYS)[:-1], "from disk"), pytest.param("a LoRA", marks=pytest.mark.long)]


@pytest.mark.parametrize("way", SHORT)
def test_bits_are_the_same_however_weights_are_kept(
    way: str,
    tiny_folders: Folders,
    cache: Path,
    tmp_path: Path,
    slow: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Opened("qwenimage", tiny_folders("qwenimage"), cache, monkeypatch, **WAYS[way])
    if way == "a LoRA":
        opened.pipe.set_loras(lora_files.two(tiny_folders("qwenimage"), tmp_path))
    if way == "from disk":
        opened.pipe = opened.pipe.within(ram=opened.pipe.denoisers[0].size_bytes // 2)
    run = {"batch": 2} if way == "two pictures" else {}
    expected = opened(**run)
    assert torch.equal(opened(lockstep=True, once=True, **run), expected)
    assert opened.counts == (STEPS, 0)
    assert slow.stats().allocated_bytes == 0


@pytest.mark.parametrize("name", few(("chroma", "lumina2"), "lumina2"))  # whose weights are more than their work
def test_plans_are_kept(
    name: str, tiny_folders: Folders, cache: Path, slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(name, tiny_folders(name), cache, monkeypatch)
    run = {**opened.run, "strategy": "auto"}
    budget = opened.within_little()
    plain, planned = (opened.pipe.plan(cond=opened.cond, **run, lockstep=each).stages[0] for each in (False, True))
    assert planned.seconds < plain.seconds
    assert "2 passes share each copy" in planned.main.reason
    opened(strategy="auto", lockstep=True)
    record = manager("sim").timeline.stages[-1]
    assert record.peak_bytes <= planned.peak_vram_bytes <= budget


def test_a_range_of_guidance_costs_one_pass(
    tiny_folders: Folders, cache: Path, slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are not guided have one pass: after the first of them nothing is foreseen any more."""
    opened = Opened("qwenimage", tiny_folders("qwenimage"), cache, monkeypatch)
    monkeypatch.setattr("ballast.pipelines.planning.once_plans.passes_in", lambda forecast: 2)
    run = {"guidance_range": (0.0, 0.5)}
    expected = opened(**run)
    assert torch.equal(opened(lockstep=True, **run), expected)
    assert opened.counts == (STEPS // 2, 1)


def test_another_pass_than_was_foreseen_is_run(
    tiny_folders: Folders, cache: Path, slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened("qwenimage", tiny_folders("qwenimage"), cache, monkeypatch)
    expected = opened()
    foreseen = passes_in_turn.passes_of

    def other(calls: Any) -> Any:
        first, second = foreseen(calls)
        text = second["encoder_hidden_states"]
        return [first, {**second, "encoder_hidden_states": text * 2}]

    monkeypatch.setattr("ballast.pipelines.stages.sample.passes_of", other)
    assert torch.equal(opened(lockstep=True), expected)
    assert opened.counts == (0, 1)


def test_libraries_of_further_threads_are_planned() -> None:
    work = UnitForecast(0, 100, 90, 6, Operations(), held=(("", 7), ("a", 20), ("b", 30)))
    found = in_lockstep(work, 3, thread_bytes=1000)
    more = 2 * (30 + 1000)
    assert (found.calls, found.working_bytes, found.first_bytes) == (2, 100 + more, 90 + more)
    assert found.held == (("", 7), ("a", 20 + more), ("b", 30 + more))


def test_each_pass_has_a_thread_that_stays() -> None:
    """Libraries keep plans of their kernels for each thread: a new one would make them anew in each step."""
    device = torch.device("cpu")
    runs = [in_turns(device, [threading.get_ident] * 3) for _ in range(4)]
    assert all(run == runs[0] for run in runs)
    first, others = runs[0]
    assert first == threading.get_ident() and len({first, *others}) == 3


@pytest.mark.long
def test_faults_leave_nothing_and_the_next_run_is_the_same(
    tiny_folders: Folders, cache: Path, slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory at some allocations of either pass, and an interrupt as weights come."""
    opened = Opened("lumina2", tiny_folders("lumina2"), cache, monkeypatch)
    opened.within_little()
    run = functools.partial(opened, strategy="auto", lockstep=True)
    expected = run()
    assert opened.counts == (STEPS, 0)
    slow.reset_stats()
    run()
    allocations = slow.stats().allocation_count
    for count in range(1, allocations, 13 if os.environ.get("BALLAST_SOAK") else allocations * 2 // 3):
        with slow.fail_after(count):
            assert torch.equal(run(), expected), count
        assert slow.stats().allocated_bytes == 0, count
    for error in (KeyboardInterrupt, FaultError) if os.environ.get("BALLAST_SOAK") else (KeyboardInterrupt,):

        def stopped(step: int, steps: int, latents: torch.Tensor) -> None:
            if step == 2:
                raise error("stop")  # noqa: B023

        with pytest.raises(error):
            run(on_step=stopped)
        assert slow.stats().allocated_bytes == 0
        assert torch.equal(run(), expected)
