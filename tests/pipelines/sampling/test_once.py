"""Modules that see no latents are computed once: the same bits as without, fewer bytes, and plans that say so."""

from __future__ import annotations

import functools
import gc
import os
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
from ballast.memory.once.choice import Once, Schedule
from ballast.memory.once.rehearsal import Rehearsal
from ballast.memory.once.tables import Tables
from ballast.memory.planning.forecast import UnitForecast
from ballast.memory.planning.taint import Marks
from ballast.pipelines import runner
from ballast.pipelines.planning import once_plans
from fault_points import FaultError
from selection import few

Folders = Callable[[str], Path]
STEPS = 4
SLOW = {"h2d_gbps": 1e-5, "tflops": 1e-5}  # of a card on which the copies of a tiny model take seconds
SOME = ("flux", "qwenimage", "wan")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("once")


def all_that_may_be(work: UnitForecast, paths: Any, schedule: Schedule) -> Once:
    """Choose every module that sees no latents, however large its results: tiny models gain little else."""
    known = {module.path: module for module in work.once if module.path in paths}
    chosen = [known[path] for path in known if all(need in known for need in known[path].needs)]
    tables = sum(schedule.rows(module) * module.row_bytes for module in chosen)
    weights = sum(module.weight_bytes for module in chosen)
    return Once(frozenset(module.path for module in chosen), weights, tables, schedule.argument_bytes(work))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in two parts, whether that takes less time or not."""

    def best_of(forecast: Any, units: Any, steps: int, place: Any, **_: Any) -> Any:
        return once_plans.split(forecast, units, steps), [place("sample", forecast, units, steps)]

    monkeypatch.setattr(once_plans, "choose_once", all_that_may_be)
    monkeypatch.setattr(runner, "best_of", best_of)


class Opened:
    """A tiny pipeline, with its prompt encoded, and the tables of its last run."""

    def __init__(self, name: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, **opening: Any) -> None:
        family = tiny.FAMILIES[name]
        self.pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache, **opening)
        self.cond = self.pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
        width, height = family.size
        size = {"width": width, "height": height, "frames": family.frames}
        self.run = {**size, "steps": STEPS, "guidance": family.guidance, **family.call_kwargs}
        self.found: list[tuple[int, int]] = []  # for each call of the unit, 1 if it was not known; all results' bytes
        found, run = self.found, Tables._run

        def counted(tables: Tables, *args: Any) -> Any:
            before = tables.missed
            try:
                return run(tables, *args)
            finally:
                found.append((tables.missed - before, tables.nbytes))

        monkeypatch.setattr(Tables, "_run", counted)

    def __call__(self, **more: Any) -> torch.Tensor:
        self.found.clear()
        made = self.pipe.sample(self.cond, **self.run | more)
        gc.collect()
        return made

    @property
    def missed(self) -> int:
        """Calls of the last run that were not known. Some must have been."""
        assert self.found
        return sum(missed for missed, _ in self.found)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", few(tiny.FAMILIES, "qwenimage"))
def test_bits_are_those_of_a_run_with_all_weights(
    name: str, tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed in the least room. Each call is found, and nothing is left."""
    opened = Opened(name, tiny_folders(name), cache, monkeypatch)
    expected = opened(strategy="leafwise")
    assert torch.equal(opened(strategy="leafwise", once=True), expected)
    assert opened.missed == 0
    assert sim.stats().allocated_bytes == 0
    assert torch.equal(opened(strategy="leafwise"), expected)
    assert not opened.found


WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "int8": {"weights": "int8"},
    "exact12": {"weights": "exact12"},
    "from disk": {},
    "a LoRA on modulation": {},
    "two pictures": {"batch": 2},
}
LONG = ("int8", "a LoRA on modulation")


@pytest.mark.usefixtures("always")
@pytest.mark.long
@pytest.mark.parametrize("way", few(WAYS, *LONG))
@pytest.mark.parametrize("name", few(SOME, "flux"))
def test_bits_are_the_same_however_weights_are_kept(
    name: str,
    way: str,
    tiny_folders: Folders,
    cache: Path,
    tmp_path: Path,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = dict(WAYS[way])
    batch = given.pop("batch", 1)
    opened = Opened(name, tiny_folders(name), cache, monkeypatch, **given)
    if "LoRA" in way:
        module = lora_files.transformer_of(tiny_folders(name))
        weights = lora_files.weights(module, 4)
        assert any("norm1.linear" in key or "mod" in key or "attn2.to_k" in key for key in weights)
        opened.pipe.set_loras([(lora_files.write(tmp_path / "lora.safetensors", weights), 0.8)])
    if way == "from disk":
        opened.pipe = opened.pipe.within(ram=opened.pipe.denoisers[0].size_bytes // 2)
    run = {"strategy": "auto" if way == "resident" else "leafwise", "batch": batch}
    expected = opened(**run)
    for _ in range(2):
        assert torch.equal(opened(**run, once=True), expected)
        assert opened.missed == 0
    assert sim.stats().allocated_bytes == 0
    assert torch.equal(opened(**run), expected)


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_lists_and_two_experts(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt has tables of its own, and so has each expert, which leaves with them."""
    folder = tmp_path / "wan"
    pipe: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(folder)
    opened = Opened("wan", folder, tmp_path / "cache", monkeypatch)
    prompts, settings = ["a red boat", "two birds above a wide lake"], {**opened.run, "strategy": "leafwise"}
    expected = list(opened.pipe.run(prompts, negative_prompt="blurry", **settings))
    made = list(opened.pipe.run(prompts, negative_prompt="blurry", once=True, **settings))
    assert all(map(torch.equal, made, expected))
    assert opened.missed == 0 and len(opened.found) == len(prompts) * STEPS * 2


@pytest.mark.parametrize("name", few(SOME, SOME[0]))
def test_plans_are_kept_and_bytes_are_spared(
    name: str, tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that takes less time: peaks, the bytes of each step, and the reason."""
    sim.enable(total="4GB", **SLOW)
    opened = Opened(name, tiny_folders(name), cache, monkeypatch)
    plan = functools.partial(opened.pipe.plan, cond=opened.cond, **opened.run)
    least = plan(vram=1, strategy="leafwise").sampling.peak_vram_bytes
    opened.pipe = opened.pipe.within(vram=least + 60_000)
    plain, planned = (opened.pipe.plan(cond=opened.cond, **opened.run, once=once) for once in (False, True))
    first, loop = planned.stages[:2]
    assert [stage.name for stage in planned.stages] == ["precompute", "sample", "decode"]
    assert first.seconds + loop.seconds < plain.stages[0].seconds
    assert "of the weights are computed once, into" in loop.main.reason
    expected = opened()
    manager("sim").timeline.clear()
    assert torch.equal(opened(once=True), expected)
    records = manager("sim").timeline.stages
    assert [record.name for record in records] == ["precompute", "sample"]
    for stage, record in zip((first, loop), records, strict=True):
        assert record.peak_bytes <= stage.peak_vram_bytes <= opened.pipe.vram_bytes
    assert loop.peak_vram_bytes <= 1.05 * records[1].peak_bytes
    once_bytes = sum(module.weight_bytes for module in chosen_for(opened))
    brought = []
    for once in (False, True):
        before = manager("sim").device_bytes_in
        opened(once=once, strategy="leafwise")
        brought.append(manager("sim").device_bytes_in - before)
    loop = manager("sim").timeline.stages[-1].units["transformer"].bytes_in
    calls = len(opened.found)
    assert loop <= 1.02 * (brought[0] - calls * once_bytes) and once_bytes > 0.05 * brought[0] / calls
    assert brought[1] - loop < 2 * once_bytes, "some come again for what needs them"


def chosen_for(opened: Opened) -> list[Any]:
    """The modules that a plan of a run chooses."""
    chosen, found = once_plans.choose_once, list[Any]()

    def noted(work: UnitForecast, paths: Any, schedule: Schedule) -> Once:
        once = chosen(work, paths, schedule)
        found.extend(module for module in work.once if module.path in once.paths)
        return once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(once_plans, "choose_once", noted)
        opened.pipe.plan(cond=opened.cond, **opened.run, once=True)
    assert found
    return found


def test_where_all_is_resident_nothing_is_computed_once(
    tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened("flux", tiny_folders("flux"), cache, monkeypatch)
    opened(once=True)
    assert not opened.found
    plan = opened.pipe.plan(cond=opened.cond, vram="1GB", once=True, **opened.run)
    assert [stage.name for stage in plan.stages] == ["sample", "decode"]


@pytest.mark.usefixtures("always")
def test_calls_that_were_not_foreseen_run_with_all_weights(
    tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of timesteps that change in mid-run."""
    opened = Opened("flux", tiny_folders("flux"), cache, monkeypatch)
    expected = opened(strategy="leafwise")
    add = Tables.add

    def other(tables: Tables, arguments: Any) -> None:
        add(tables, {**arguments, "timestep": arguments["timestep"] * 0.5})

    monkeypatch.setattr(Tables, "add", other)
    assert torch.equal(opened(strategy="leafwise", once=True), expected)
    assert opened.missed == STEPS
    assert sim.stats().allocated_bytes == 0


@pytest.mark.usefixtures("always")
def test_a_row_of_another_step_shows(
    tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened("flux", tiny_folders("flux"), cache, monkeypatch)
    expected = opened(strategy="leafwise")
    monkeypatch.setattr(Tables, "_find", lambda tables, arguments: tables.calls[0])
    assert not torch.equal(opened(strategy="leafwise", once=True), expected)


@pytest.mark.usefixtures("always")
def test_a_module_that_sees_latents_after_all_is_noticed(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a dry run loses the trace, the rehearsal finds no values there, and all weights come."""
    opened = Opened("flux", tiny_folders("flux"), tmp_path, monkeypatch)
    monkeypatch.setattr(Marks, "operator", lambda *_: None)
    size = {"height": 2 * opened.run["height"], "strategy": "leafwise"}  # of which no forecast is known yet
    made = opened(once=True, **size)
    assert not opened.found
    assert torch.equal(made, opened(**size))


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_faults_leave_nothing_and_the_next_run_is_the_same(
    tiny_folders: Folders, cache: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory at some allocations, and an interrupt at some modules that are computed once. Streamed: what runs
    out in the least room, between calls of the transformer, has nowhere to go."""
    opened = Opened("flux", tiny_folders("flux"), cache, monkeypatch)
    run = functools.partial(opened, strategy="streamed", once=True)
    expected = run()
    sim.reset_stats()
    run()
    allocations = sim.stats().allocation_count
    for count in range(1, allocations, 7 if os.environ.get("BALLAST_SOAK") else allocations // 2):
        with sim.fail_after(count):
            assert torch.equal(run(), expected), count
        assert sim.stats().allocated_bytes == 0
    compute = Rehearsal._compute
    for error in (KeyboardInterrupt, FaultError):
        for at in (0, 5) if os.environ.get("BALLAST_SOAK") else (5,):
            seen: list[str] = []

            def stopped(rehearsal: Rehearsal, path: str, uses: Any) -> None:
                seen.append(path)  # noqa: B023
                if len(seen) > at:  # noqa: B023
                    raise error("stop")  # noqa: B023
                compute(rehearsal, path, uses)

            with monkeypatch.context() as patch:
                patch.setattr(Rehearsal, "_compute", stopped)
                with pytest.raises(error):
                    run()
            assert sim.stats().allocated_bytes == 0
            assert torch.equal(run(), expected)
