"""One model, one copy: whatever changes between runs, no weights are held twice, read twice or left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import psutil
import pytest
import torch
from ballast.memory import DoesNotFitError, manager, ram, simulated
from ballast.memory import manager as manager_of
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.planner import least_ram_on_cpu
from ballast.memory.weights.structure import parameter_refs
from ballast.pipelines import Pipeline
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from places import ROOT
from safetensors.torch import load_file, save_file
from selection import few
from streamed_models import weight_pages

SIZE: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "guidance": 2.0}
TRANSFORMER = 3949536  # bytes of the demo's


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's model, and another of the same structure with other weights."""
    root = tmp_path_factory.mktemp("models")
    found = {name: Path(shutil.copytree(ROOT / "demo" / "shapes", root / name)) for name in ("shapes", "other")}
    (file,) = (found["other"] / "transformer").glob("*.safetensors")
    save_file({name: value * 0.9 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return found


def rooms(pipe: Pipeline, **size: Any) -> dict[str, int]:
    """The least VRAM of each placement, as it is planned, and something between."""
    plan = pipe.plan(**size, cond=pipe.encode("a red circle"), vram=1).sampling
    least = {"streamed": 2**60, "resident": 2**60}
    for candidate in (plan, *plan.rejected):
        least[candidate.placement] = min(least[candidate.placement], candidate.peak_vram_bytes)
    return least | {"some": (2 * least["streamed"] + least["resident"]) // 3, "most": least["resident"] - 1}


@pytest.fixture(scope="module")
def room(models: dict[str, Path]) -> dict[str, int]:
    simulated.enable(total="4GB")
    return rooms(ballast.open_pipeline(models["shapes"], device="sim"), **SIZE)


_elsewhere: set[int] = set()  # buffers that were there before a test began


@pytest.fixture(autouse=True)
def clean(sim: ModuleType) -> Iterator[None]:
    """Without the collector: nothing here may wait for it."""
    manager("sim").free()
    gc.collect()
    gc.disable()
    _elsewhere.update(weight_pages())
    yield
    gc.enable()
    assert sim.stats().allocated_bytes == 0, "what no pipeline refers to has left the device"
    manager("sim").free()
    assert set(weight_pages()) <= _elsewhere, "no copy is left in RAM"
    assert not manager("sim").report().units
    _elsewhere.clear()


def pages_in_ram() -> int:
    """All that lies in RAM, windows included, but for what other tests have left there."""
    return sum(nbytes for address, nbytes in weight_pages().items() if address not in _elsewhere)


def check_books(sim: ModuleType) -> None:
    """What the manager says is what there is, between runs."""
    report = manager("sim").report()
    assert report.resident_bytes == sim.stats().allocated_bytes
    gaps = 256 * sum(len(list(parameter_refs(unit.module))) for unit in manager("sim").units())
    assert report.host_bytes <= pages_in_ram() <= report.host_bytes + gaps
    keys = [unit.key for unit in manager("sim").units()]
    assert len(set(keys)) == len(keys)
    assert not any(unit.leased for unit in report.units)


@pytest.fixture
def expected(models: dict[str, Path], sim: ModuleType) -> dict[str, torch.Tensor]:
    """The latents of each model, resident."""
    found = {}
    for name, folder in models.items():
        pipe = ballast.open_pipeline(folder, device="sim")
        found[name] = pipe.sample(pipe.encode("a red circle"), **SIZE)
        del pipe
    manager("sim").free()
    assert not torch.equal(found["shapes"], found["other"])
    return found


def placed(pipe: Pipeline) -> str | None:
    (unit,) = pipe.denoisers
    return unit.placement.name if unit.placement else None


def encoded(pipe: Pipeline) -> Any:
    """A prompt, encoded in any VRAM: the budgets here are for sampling, which takes less."""
    return pipe.within(ram=pipe.ram_bytes, keep=pipe.keep).encode("a red circle")


class Run:
    """Samples, and says what that took."""

    def __init__(self, pipe: Pipeline, **more: Any) -> None:
        mgr = pipe.manager
        cond = encoded(pipe)
        read = mgr.disk_bytes_read
        self.latents = pipe.sample(cond, **{**SIZE, **more})
        self.read = mgr.disk_bytes_read - read
        self.peak = mgr.timeline.stages[-1].peak_bytes
        self.placement = mgr.timeline.stages[-1].units["transformer"].placement


# The rows of what went wrong


@pytest.mark.parametrize("drop_first", few([True, False], False))
def test_changed_vram_budget_changes_the_placement_and_reads_nothing(
    models: dict[str, Path], room: dict[str, int], expected: dict[str, torch.Tensor], sim: ModuleType, drop_first: bool
) -> None:
    pipe, reads = None, []
    for named, placement in [
        ("all", "resident"), ("streamed", "streamed"), ("resident", "resident"), ("most", "streamed"),
        ("streamed", "streamed"), ("some", "streamed"), ("all", "resident"), ("some", "streamed"),
    ]:  # fmt: skip
        if drop_first:
            del pipe
        pipe = ballast.open_pipeline(models["shapes"], device="sim", vram=room.get(named), keep=True)
        run = Run(pipe)
        assert placed(pipe) == run.placement == placement
        assert run.peak <= room.get(named, sim.stats().total_bytes)
        assert torch.equal(run.latents, expected["shapes"])
        reads.append(run.read)
        check_books(sim)
    assert reads == [TRANSFORMER] + [0] * 7
    assert [unit.role for unit in manager("sim").report().units].count("transformer") == 1
    report = manager("sim").report()
    assert report.host_bytes <= TRANSFORMER + 458564 + 1023500, "one copy"
    del pipe, run


def test_another_model_that_fits_whole_is_resident(
    models: dict[str, Path], room: dict[str, int], expected: dict[str, torch.Tensor], sim: ModuleType
) -> None:
    sim.enable(total=room["resident"] + 500_000)
    first = ballast.open_pipeline(models["shapes"], device="sim", keep=True)
    assert Run(first).placement == "resident"
    for drop in (False, True, False):
        if drop:
            del first
        second = ballast.open_pipeline(models["other"], device="sim", keep=True)
        run = Run(second)
        assert run.placement == "resident"
        assert torch.equal(run.latents, expected["other"])
        check_books(sim)
        if drop:
            first = ballast.open_pipeline(models["shapes"], device="sim", keep=True)
    run = Run(first)
    assert (run.placement, run.read) == ("resident", 0)
    assert torch.equal(run.latents, expected["shapes"])
    check_books(sim)
    sim.enable(total="4GB")


@pytest.mark.parametrize("extra", few([0, 1_234_567], 1_234_567))
def test_what_other_runs_have_kept_makes_room_for_a_stated_budget(
    models: dict[str, Path], room: dict[str, int], sim: ModuleType, extra: int
) -> None:
    """Before the stage begins, not only when its model is called."""
    pipes = [ballast.open_pipeline(models[name], device="sim", keep=True) for name in ("shapes", "other")]
    for pipe in pipes:
        assert Run(pipe).placement == "resident"
    assert sim.stats().allocated_bytes == 2 * TRANSFORMER
    vram = room["resident"] + extra
    run = Run(pipes[0].within(vram=vram, keep=True))
    assert (run.placement, run.read) == ("resident", 0)
    assert run.peak <= vram
    check_books(sim)
    assert sim.stats().allocated_bytes > TRANSFORMER or not extra, "what there is room for stays"
    del pipe, pipes, run


@pytest.mark.parametrize("strategy", few(["auto", "leafwise", "resident", "streamed"], "streamed"))
def test_ram_budget_holds_in_every_placement(
    models: dict[str, Path], expected: dict[str, torch.Tensor], sim: ModuleType, strategy: str
) -> None:
    rich = ballast.open_pipeline(models["shapes"], device="sim", keep=True)
    assert torch.equal(Run(rich).latents, expected["shapes"])
    assert manager("sim").report().host_bytes >= TRANSFORMER
    pipe = ballast.open_pipeline(models["shapes"], device="sim", ram=2_500_000, keep=True)
    held: list[int] = []

    def note(*_: Any) -> None:
        held.append(pages_in_ram())
        assert manager("sim").report().host_bytes <= 2_500_000

    for _ in range(2):
        run = Run(pipe, strategy=strategy, on_step=note)
        assert torch.equal(run.latents, expected["shapes"])
    assert max(held) <= 2_500_000
    check_books(sim)
    pipe.runner = pipe.runner.set(ram_bytes=None)
    assert torch.equal(Run(pipe, strategy=strategy).latents, expected["shapes"])
    assert manager("sim").report().host_bytes >= TRANSFORMER, "it is in RAM again"
    assert Run(pipe, strategy=strategy).read == 0
    del rich, pipe, run


def test_ram_budget_holds_over_all_models_together(models: dict[str, Path], sim: ModuleType) -> None:
    ram = TRANSFORMER + 600_000
    pipes = [ballast.open_pipeline(models[name], device="sim", ram=ram, keep=True) for name in ("shapes", "other")]
    for pipe in (*pipes, *pipes):
        pipe.encode(f"a red circle {time.monotonic_ns()}")
        assert manager("sim").report().host_bytes <= ram
        pipe.decode(Run(pipe, on_step=lambda *_: None).latents)
        assert manager("sim").report().host_bytes <= ram
        check_books(sim)
    del pipe, pipes


def test_ram_budget_holds_over_all_devices_together(models: dict[str, Path], sim: ModuleType) -> None:
    ram = TRANSFORMER + 600_000
    on_cpu = ballast.open_pipeline(models["shapes"], device="cpu", ram=ram)
    pipe = ballast.open_pipeline(models["other"], device="sim", ram=ram)
    for each in (on_cpu, pipe, on_cpu):
        Run(each)
        assert sum(manager_of(device).report().host_bytes for device in ("cpu", "sim")) <= ram
    del on_cpu, pipe, each
    manager_of("cpu").free()


def test_too_little_ram_runs_from_disk_and_is_refused_below_windows_on_the_cpu(
    models: dict[str, Path], expected: dict[str, torch.Tensor], sim: ModuleType
) -> None:
    pipe = ballast.open_pipeline(models["shapes"], device="sim", ram=500_000)
    cond = ballast.open_pipeline(models["shapes"], device="sim").encode("a red circle")
    assert torch.equal(pipe.sample(cond, **SIZE, strategy="leafwise"), expected["shapes"])
    with pytest.raises(DoesNotFitError, match=r"^transformer: On the CPU: nothing fits .* of RAM.*") as why:
        pipe.sample(cond, **SIZE, strategy="cpu")
    assert "\n" not in str(why.value)
    why.value.__traceback__ = None
    least = least_ram_on_cpu(sizes_of(pipe.denoisers[0]))
    pipe = ballast.open_pipeline(models["shapes"], device="sim", ram=least)
    held: list[int] = []
    sim.reset_stats()
    latents = pipe.sample(
        cond, **SIZE, strategy="cpu", on_step=lambda *_: held.append(manager("sim").report().host_bytes)
    )
    torch.testing.assert_close(latents, expected["shapes"], atol=1e-5, rtol=0)
    assert max(held) <= least < TRANSFORMER
    assert sim.stats().h2d_bytes < 10_000, "no weight comes to the card"
    check_books(sim)
    del why, pipe


def test_other_workflow_in_between_costs_nothing(
    models: dict[str, Path], expected: dict[str, torch.Tensor], sim: ModuleType
) -> None:
    for name in ("shapes", "other", "shapes", "other"):
        pipe = ballast.open_pipeline(models[name], device="sim", keep=True)
        run = Run(pipe)
        assert torch.equal(run.latents, expected[name])
        del pipe
        assert sim.stats().allocated_bytes == 0
        assert all(unit.cached for unit in manager("sim").report().units)
        check_books(sim)
    assert run.read == 0
    manager("sim").free()
    assert not manager("sim").report().units


def test_deleted_pipeline_is_gone_at_once(models: dict[str, Path], room: dict[str, int], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(models["shapes"], device="sim", keep=True, vram=room["some"])
    pipe.decode(Run(pipe).latents)
    pipe.plan(**SIZE, vram=room["some"])
    gone = [weakref.ref(pipe), *(weakref.ref(unit) for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder))]
    twin = pipe.within()
    del pipe
    assert gone[0]() is None and gone[1]() is not None
    assert not any(unit.cached for unit in manager("sim").report().units), "the twin refers to them"
    del twin
    assert all(unit.cached for unit in manager("sim").report().units)
    manager("sim").free()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_replaced_files_are_another_model(models: dict[str, Path], sim: ModuleType, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models["shapes"], tmp_path / "model"))
    before = ballast.open_pipeline(folder, device="sim", keep=True)
    first = Run(before).latents
    (file,) = (folder / "transformer").glob("*.safetensors")
    shutil.copy(next((models["other"] / "transformer").glob("*.safetensors")), file)
    os.utime(file, ns=(1, 1))
    after = ballast.open_pipeline(folder, device="sim", keep=True)
    assert after.denoisers[0] is not before.denoisers[0] and after.encoders[0] is before.encoders[0]
    run = Run(after)
    assert not torch.equal(run.latents, first)
    del before
    check_books(sim)
    del after, run


def test_folders_that_are_links_share_their_models(models: dict[str, Path], sim: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(models["shapes"], target_is_directory=True)
    pipes = [ballast.open_pipeline(folder, device="sim") for folder in (models["shapes"], tmp_path / "linked")]
    assert pipes[0].denoisers == pipes[1].denoisers and pipes[0].decoder is pipes[1].decoder
    half = ballast.open_pipeline(models["shapes"], device="sim", dtype="bfloat16")
    assert half.denoisers[0] is not pipes[0].denoisers[0] and half.decoder is pipes[0].decoder
    del pipes, half


def test_another_device_takes_a_cached_copy_over(models: dict[str, Path], sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(models["shapes"], device="sim", keep=True)
    Run(pipe)
    (unit,) = pipe.denoisers
    other = ballast.open_pipeline(models["shapes"], device="cpu")
    assert other.denoisers[0] is not unit, "it is in use here"
    del other, pipe
    other = ballast.open_pipeline(models["shapes"], device="cpu")
    assert other.denoisers[0] is unit and unit.in_ram
    assert unit not in manager("sim").units() and unit in manager_of("cpu").units()
    other.sample(other.encode("a red circle"), **SIZE)
    del other, unit
    manager_of("cpu").free()


def test_cached_copies_go_before_others(models: dict[str, Path], sim: ModuleType) -> None:
    """When RAM is short, although they were used last."""
    used = ballast.open_pipeline(models["shapes"], device="sim")
    Run(used)
    cached = ballast.open_pipeline(models["other"], device="sim")
    Run(cached)
    del cached
    mgr = manager("sim")
    held = mgr.report().host_bytes
    for less in (1, held // 4):
        limit_ram(held - less)
        assert used.denoisers[0].in_ram and used.encoders[0].in_ram
        assert any(unit.label == "other" for unit in mgr.report().units if unit.host_bytes), "no more than must"
    limit_ram(used.denoisers[0].size_bytes + used.encoders[0].size_bytes)
    assert [unit.label for unit in mgr.report().units if unit.host_bytes] == ["shapes"] * 2
    check_books(sim)
    mgr.limit()
    del used


def test_cached_copies_go_when_others_want_the_ram(
    models: dict[str, Path], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being asked, soon."""
    mgr = manager("sim")
    pipe = ballast.open_pipeline(models["shapes"], device="sim")
    Run(pipe)
    del pipe
    assert mgr.report().host_bytes >= TRANSFORMER
    monkeypatch.setattr(ram, "available_bytes", lambda: 2**30)
    wait_for(lambda: mgr.report().host_bytes == 0)
    assert not mgr.report().units


def limit_ram(nbytes: int) -> None:
    """Set a RAM budget, and wait until it is kept."""
    manager("sim").limit(ram=nbytes)
    wait_for(lambda: manager("sim").report().host_bytes <= nbytes)


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.soak
def test_ram_of_the_process_is_level_over_fifty_changes(
    models: dict[str, Path], sim: ModuleType, tmp_path: Path
) -> None:
    """A model of 60 MB, so that a copy would show above the noise; BALLAST_SOAK=1 takes one of 1 GB."""
    from diffusers import Lumina2Transformer2DModel

    folder = Path(shutil.copytree(models["shapes"], tmp_path / "model"))
    shutil.rmtree(folder / "transformer")
    config = json.loads((models["shapes"] / "transformer" / "config.json").read_text())
    wide = {"ffn_dim_multiplier": 400.0 if os.environ.get("BALLAST_SOAK") else 22.0}
    Lumina2Transformer2DModel.from_config(config | wide).save_pretrained(folder / "transformer")
    size = {**SIZE, "width": 32, "height": 32, "steps": 1}
    room = rooms(ballast.open_pipeline(folder, device="sim"), **size)
    process, seen = psutil.Process(), []
    for change in range(50):
        vram = room.get(("all", "streamed", "streamed", "some", "most", "resident", "some")[change * 4 % 7])
        pipe = ballast.open_pipeline(folder, device="sim", vram=vram, keep=bool(change % 3))
        pipe.sample(encoded(pipe), **size)
        check_books(sim)
        if change >= 10:
            trim()
            seen.append(process.memory_info().rss - sim.stats().allocated_bytes)
    assert pipe.denoisers[0].size_bytes > 50e6
    assert max(seen) - min(seen) < 0.05 * max(seen), [round(rss / 1e6) for rss in seen]
    del pipe


def trim() -> None:
    """Have the C library give back what has been freed."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


# Any sequence


class Changes(RuleBasedStateMachine):
    """Runs with whatever budget, RAM limit, `keep`, strategy and model, in any order."""

    models: dict[str, Path]
    expected: dict[str, torch.Tensor]
    room: dict[str, int]
    sim: ModuleType

    @initialize()
    def begin(self) -> None:
        self.pipes: list[Pipeline] = []
        manager("sim").free()

    @rule(
        name=st.sampled_from(["shapes", "other"]),
        vram=st.sampled_from(["all", "streamed", "some", "most", "resident"]),
        ram=st.sampled_from([None, 1_700_000, 2_500_001, 4_500_000, 7_000_000]),
        keep=st.booleans(),
    )
    def open(self, name: str, vram: str, ram: int | None, keep: bool) -> None:
        limits: dict[str, Any] = {"vram": self.room.get(vram), "ram": ram, "keep": keep}
        self.pipes.append(ballast.open_pipeline(self.models[name], device="sim", **limits))

    @precondition(lambda self: self.pipes)
    @rule(data=st.data(), strategy=st.sampled_from(["auto", "auto", "auto", "leafwise", "cpu"]))
    def run(self, data: st.DataObject, strategy: str) -> None:
        pipe = self.pipes[data.draw(st.integers(0, len(self.pipes) - 1))]
        cond = encoded(pipe)
        held: list[int] = []
        try:
            latents = pipe.sample(
                cond, **SIZE, strategy=strategy, on_step=lambda *_: held.append(manager("sim").report().host_bytes)
            )
        except DoesNotFitError as error:
            assert "\n" not in str(error) and "RAM" in str(error) and strategy == "cpu" and pipe.ram_bytes is not None
            error.__traceback__ = None
            return
        if strategy != "cpu":
            assert torch.equal(latents, self.expected[pipe.folder.name])
        else:
            torch.testing.assert_close(latents, self.expected[pipe.folder.name], atol=1e-5, rtol=0)
        assert pipe.manager.timeline.stages[-1].peak_bytes <= (pipe.vram_bytes or self.sim.stats().total_bytes)
        assert max(held) <= (pipe.ram_bytes or 2**60)
        if strategy != "cpu" and not pipe.keep:
            assert self.sim.stats().allocated_bytes == 0

    @precondition(lambda self: self.pipes)
    @rule(data=st.data(), vram=st.sampled_from(["all", "streamed", "some", "resident"]), keep=st.booleans())
    def change(self, data: st.DataObject, vram: str, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.pipes) - 1))
        self.pipes[at] = self.pipes[at].within(vram=self.room.get(vram), keep=keep)

    @precondition(lambda self: self.pipes)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        pipe = self.pipes[data.draw(st.integers(0, len(self.pipes) - 1))]
        if pipe.ram_bytes is None:
            pipe.decode(self.expected[pipe.folder.name])

    @precondition(lambda self: self.pipes)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.pipes[data.draw(st.integers(0, len(self.pipes) - 1))]

    @rule(bytes=st.sampled_from([None, None, 1, 3_000_000]))
    def free(self, bytes: int | None) -> None:
        manager("sim").free(bytes=bytes)
        if bytes is None:
            assert self.sim.stats().allocated_bytes == 0
            assert not any(unit.cached for unit in manager("sim").report().units)

    @invariant()
    def registry(self) -> None:
        check_books(self.sim)
        labels = {pipe.folder.name for pipe in self.pipes} if hasattr(self, "pipes") else set()
        assert all(unit.cached == (unit.label not in labels) for unit in manager("sim").report().units)

    def teardown(self) -> None:
        self.pipes.clear()


@pytest.mark.long
def test_any_sequence_of_changes(
    models: dict[str, Path], room: dict[str, int], expected: dict[str, torch.Tensor], sim: ModuleType
) -> None:
    machine = type("Machine", (Changes,), {"models": models, "room": room, "expected": expected, "sim": sim})
    machine.TestCase.settings = settings(  # type: ignore[attr-defined]
        max_examples=20 if os.environ.get("BALLAST_SOAK") else 4,
        stateful_step_count=10,
        suppress_health_check=list(HealthCheck),
    )
    test: Callable[[], None] = machine.TestCase("runTest").runTest  # type: ignore[attr-defined]
    test()
