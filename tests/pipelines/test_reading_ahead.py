"""What a run knows to come next is read to RAM while something else runs."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.commands.main import main
from ballast.memory import manager
from ballast.memory.host_cache import HostCache
from ballast.memory.memory_manager import MemoryManager
from ballast.memory.reports.timeline import Event
from ballast.memory.weights import reader
from ballast.memory.weights.reader import Job, Reading
from ballast.memory.weights.structure import parameter_refs
from ballast.memory.weights.unit import ManagedModel
from ballast.pipelines import Pipeline
from ballast.pipelines.stages.batch_runs import Item
from selection import few

Folders = Callable[[str], Path]
SECONDS = 20.0  # after which a test has failed
DISK = 0.01  # GB/s
RUN = {"width": 16, "height": 16, "steps": 1, "guidance": tiny.FAMILIES["sd3"].guidance}
PROMPTS = ["a red boat", "two boats", "a car", "a house by the sea"]


@pytest.fixture
def mgr(sim: ModuleType) -> Iterator[MemoryManager]:
    gc.collect()
    found = manager("sim")
    found.schedule(None)
    yield found
    assert_at_rest(found)


def assert_at_rest(mgr: MemoryManager) -> None:
    """Nothing is read any more, and nothing is known to come."""
    for unit in mgr.units():
        assert unit.reading is None or unit.reading.done, unit.name
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("ballast-reader")]:
        thread.join(SECONDS)
        assert not thread.is_alive(), "it reads on"
    assert mgr._residency.schedule.uses(mgr.work.working_bytes) is None


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins to be read has come: only the virtual clock says when."""
    begin = Reading.begin

    def begun(reading: Reading) -> None:
        begin(reading)
        for thread in [thread for thread in threading.enumerate() if thread.name.startswith("ballast-reader")]:
            thread.join(SECONDS)

    monkeypatch.setattr(Reading, "begin", begun)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """Folders whose files give nothing until the test ends or their reading is given up."""
    folders, ends, fill, close = set[Path](), threading.Event(), reader.fill_batch, Reading.close

    def filled(batch: list[Job], room: int) -> bool:
        if batch[0][0].path.parent in folders:
            ends.wait(SECONDS)
        return fill(batch, room)

    def closed(reading: Reading) -> None:
        if not reading.done:
            ends.set()
        close(reading)
        ends.clear()

    monkeypatch.setattr(reader, "fill_batch", filled)
    monkeypatch.setattr(Reading, "close", closed)
    yield folders
    ends.set()


def opened(folders: Folders, cache: Path, name: str = "sd3", **budgets: Any) -> Any:
    """A pipeline whose prompts are not known yet; its dry runs are, from the first test on."""
    pipe = ballast.open_pipeline(folders(name), device="sim", cache_dir=cache, **budgets)
    pipe.model.claims.forecasts = folders(name).parent / "forecasts"
    return pipe


def units_of(pipe: Any) -> list[ManagedModel]:
    return [*pipe.encoders, *pipe.denoisers, pipe.decoder]


def emptied(pipe: Any) -> Any:
    """The pipeline with nothing in RAM."""
    for unit in units_of(pipe):
        pipe.manager.evict(unit)
        unit.drop()
    pipe.manager.timeline.clear()
    return pipe


def read_in(mgr: MemoryManager) -> list[tuple[str, str]]:
    """In which stages models were begun to be read."""
    return [(s.name, e.unit) for s in mgr.timeline.stages for e in s.events if e.kind == "read"]


def drawn(pipe: Any, prompts: list[str] = PROMPTS, **run: Any) -> list[torch.Tensor]:
    return list(pipe.run(prompts, **{"seeds": range(len(prompts)), **RUN, **run}))


@pytest.mark.parametrize(("count", "tflops"), [pytest.param(1, 0.01, marks=pytest.mark.long), (4, 0.002)])
def test_reading_hides_behind_computing(
    count: int,
    tflops: float,
    mgr: MemoryManager,
    sim: ModuleType,
    at_once: None,
    tiny_folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the disk sets the pace it does not rest; where computing does, nothing but the first encoder is waited for.

    Without, each model is read when it is to run, beside its own first call at best.
    """
    seconds, made = {}, {}
    read_ahead = HostCache.read_ahead
    for ahead in (False, True):
        monkeypatch.setattr(HostCache, "read_ahead", read_ahead if ahead else lambda cache: None)
        pipe = emptied(opened(tiny_folders, tmp_path / str(ahead)))
        sim.enable(total="4GB", disk_gbps=DISK, h2d_gbps=1.0, tflops=tflops)
        before = mgr.disk_bytes_read
        made[ahead] = drawn(pipe, PROMPTS[:count])
        in_files = sum(p.nbytes for unit in units_of(pipe) for p in unit.module.parameters())
        assert mgr.disk_bytes_read - before == in_files, "each once"
        stats = sim.stats()
        seconds[ahead] = stats.clock_seconds
        assert stats.hazards == 0
    assert all(map(torch.equal, made[False], made[True]))
    reads = read_in(mgr)
    assert reads[: len(pipe.encoders)] == [("encode", unit.name) for unit in pipe.encoders]
    assert ("encode", "transformer") in reads
    reading = sum(unit.size_bytes for unit in units_of(pipe)) / DISK / 1e9
    computing = stats.product_seconds + stats.attention_seconds + stats.h2d_seconds
    first = pipe.encoders[0].size_bytes / DISK / 1e9
    if count == 1:
        assert seconds[True] <= 1.01 * reading and seconds[True] < seconds[False] - 0.3 * computing
    else:
        assert seconds[True] <= 1.01 * (first + computing) and seconds[True] < seconds[False] - 0.5 * (reading - first)


@pytest.mark.parametrize("spare", [-1, pytest.param(0, marks=pytest.mark.long)])
def test_only_where_ram_has_room(
    spare: int, mgr: MemoryManager, at_once: None, tiny_folders: Folders, tmp_path: Path
) -> None:
    """The encoders stay in RAM until others need the room; what they leave must hold the transformer."""
    pipe = opened(tiny_folders, tmp_path)
    expected = drawn(pipe, PROMPTS[:2])
    (dit,) = pipe.denoisers
    ram = sum(unit.size_bytes for unit in pipe.encoders) + dit.size_bytes + spare
    pipe = emptied(opened(tiny_folders, tmp_path / "other", ram=ram))
    held: list[int] = []
    with mgr.timeline.watched(lambda event, unit: held.append(sum(each.host_bytes for each in mgr.units()))):
        found = drawn(pipe, PROMPTS[:2])
    assert all(map(torch.equal, found, expected))
    assert (("encode", "transformer") in read_in(mgr)) == (spare == 0)
    assert max(held) <= ram


def test_one_stage_reads_what_follows_where_it_is_told(
    mgr: MemoryManager, at_once: None, tiny_folders: Folders, tmp_path: Path
) -> None:
    pipe = emptied(opened(tiny_folders, tmp_path))
    (dit,) = pipe.denoisers
    cond = pipe.encode("a boat")
    assert [unit for _, unit in read_in(mgr)] == [unit.name for unit in pipe.encoders], "nobody knows what follows"
    expected = pipe.decode(pipe.sample(cond, **RUN))
    pipe = emptied(opened(tiny_folders, tmp_path / "other"))
    cond = pipe.followed_by("sample", "decode").encode("a boat")
    assert dit.in_ram and dit.placement is None
    latents = pipe.followed_by("decode").sample(cond, **RUN)
    assert pipe.decoder.in_ram
    assert torch.equal(pipe.decode(latents), expected)
    assert ("encode", "transformer") in read_in(mgr) and ("decode", "vae") not in read_in(mgr)
    with pytest.raises(ValueError, match="unknown stage 'paint'. Use encode, sample, decode."):
        pipe.followed_by("paint")


@pytest.mark.long
def test_what_is_read_lies_as_it_will_be_called(
    mgr: MemoryManager, at_once: None, tiny_folders: Folders, tmp_path: Path
) -> None:
    """The order of calls is known from the last run of any size, in whatever process: nothing is laid out anew."""
    pipe = opened(tiny_folders, tmp_path)
    drawn(pipe, PROMPTS[:1])
    known = pipe.denoisers[0].calls
    del pipe
    gc.collect()
    mgr.free()  # what is cached, too
    pipe = opened(tiny_folders, tmp_path / "other")
    (dit,) = pipe.denoisers
    assert not dit.calls.order, "a new one"
    assert pipe.followed_by("decode").denoisers[0].calls is dit.calls and not dit.calls.order
    cond = pipe.followed_by("sample").encode("a boat")
    assert dit.in_ram and dit.calls == known
    pages = {ref.tensor.data_ptr() for ref in parameter_refs(dit.module)}
    pipe.sample(cond, **RUN | {"width": 32, "height": 32}, strategy="leafwise")
    assert {ref.tensor.data_ptr() for ref in parameter_refs(dit.module)} == pages


@pytest.mark.long
@pytest.mark.parametrize("seed", few(range(3), 0))
def test_whatever_the_budgets_and_wherever_it_ends(
    seed: int, mgr: MemoryManager, sim: ModuleType, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Runs one after the other in other budgets, some interrupted: the same pictures, within RAM, nothing left over."""
    pipe = opened(tiny_folders, tmp_path / "expected")
    expected = dict(zip(PROMPTS, drawn(pipe, seeds=[3] * len(PROMPTS)), strict=True))
    largest = max(unit.size_bytes for unit in units_of(pipe))
    whole = sum(unit.size_bytes for unit in units_of(pipe))
    chance = random.Random(seed)
    for turn in range(4):
        ram = chance.choice([None, chance.randrange(largest, 2 * whole)])
        sim.enable(total=2**22 + chance.choice([largest // 2, 2 * largest, 2**30]), disk_gbps=DISK, tflops=0.01)
        run = opened(tiny_folders, tmp_path / str(turn), ram=ram)
        held: list[int] = []
        stop = chance.choice([None, chance.randrange(60)])

        def look(event: Event, unit: ManagedModel, held: list[int] = held, stop: int | None = stop) -> None:
            held.append(sum(each.host_bytes for each in units_of(pipe)))
            if stop is not None and len(held) > stop:
                raise KeyboardInterrupt

        chosen = chance.choices(PROMPTS, k=chance.randint(1, 3))
        try:
            with mgr.timeline.watched(look):
                made = list(run.run(chosen, seeds=[3] * len(chosen), **RUN))
            assert all(torch.equal(picture, expected[prompt]) for prompt, picture in zip(chosen, made, strict=True))
        except KeyboardInterrupt:
            assert stop is not None
        assert ram is None or max(held[1:], default=0) <= ram
        assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0
        assert_at_rest(mgr)


@pytest.mark.long
def test_each_run_knows_its_own_and_the_graph_keeps_its(
    mgr: MemoryManager, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Two runs taken in turn, in a node of a graph that has told what comes."""
    pipes = [opened(tiny_folders, tmp_path, name) for name in ("sd3", "flux")]
    graph = [*pipes[1].encoders, *pipes[1].denoisers]
    mgr.schedule(graph)
    known: list[tuple[int, list[ManagedModel]]] = []

    def look(which: int) -> Callable[..., None]:
        return lambda *_: known.append((which, mgr._residency.schedule.units()))

    runs = [
        pipe.run(PROMPTS[:2], **{**RUN, "width": 32, "height": 32, "guidance": 1.0}, on_step=look(which))
        for which, pipe in enumerate(pipes)
    ]
    for _ in range(2):
        for run in runs:
            next(run)
            assert mgr._residency.schedule.units() == graph
    for run in runs:
        assert next(run, None) is None
    for which, pipe in enumerate(pipes):
        own = [units for number, units in known if number == which]
        assert own == [[*pipe.denoisers, pipe.decoder, *graph], [pipe.decoder, *graph]]
    mgr.schedule(None)


@pytest.mark.long
def test_what_is_needed_next_stays_in_ram(
    mgr: MemoryManager, at_once: None, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM for the transformer, the VAE and one encoder: an encoder that has run makes room for the next one.

    The least recently used is the transformer, of which each encoder would take some.
    """
    pipe = opened(tiny_folders, tmp_path)
    ram = sum(u.size_bytes for u in (*pipe.denoisers, pipe.decoder)) + max(u.size_bytes for u in pipe.encoders)
    read = {}
    for known in (True, False):
        if not known:
            monkeypatch.setattr(Pipeline, "followed_by", lambda pipe, *stages: pipe)
        pipe = emptied(opened(tiny_folders, tmp_path / str(known), ram=ram))
        expected = drawn(pipe, PROMPTS[:2])
        before = mgr.disk_bytes_read
        again = drawn(opened(tiny_folders, tmp_path / f"again {known}", ram=ram), PROMPTS[:2])
        read[known] = mgr.disk_bytes_read - before
        assert all(map(torch.equal, again, expected))
    in_files = sum(parameter.nbytes for unit in pipe.encoders for parameter in unit.module.parameters())
    assert read[True] < in_files < read[False], "nothing but encoders, and not all of these"


@pytest.mark.long
def test_a_picture_is_seen_before_the_transformer_runs(
    mgr: MemoryManager, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = opened(tiny_folders, tmp_path, "flux")
    known: dict[str, list[ManagedModel]] = {}
    acquire = MemoryManager.acquire

    def acquired(manager: MemoryManager, unit: ManagedModel, *given: Any, **named: Any) -> None:
        known.setdefault(f"{manager.timeline.stages[-1].name} {unit.name}", manager._residency.schedule.units())
        acquire(manager, unit, *given, **named)

    monkeypatch.setattr(MemoryManager, "acquire", acquired)
    picture = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    settings = {"width": 32, "height": 32, "steps": 2, "strength": 0.9, "image": picture}
    (made,) = (m for m in pipe.run_items([Item("a boat", sampling=lambda: settings)]) if m.stage == "decode")
    assert made.images is not None, made.error
    dit, vae = pipe.denoisers[0], pipe.decoder
    assert known["encode picture vae"] == [dit, vae]
    assert known["sample transformer"] == [vae] and known["decode vae"] == []
    known.clear()
    assert torch.equal(made.images, pipe.decode(pipe.sample(pipe.encode("a boat"), **settings)))
    assert len(known) == 3 and not any(known.values()), "nobody has told what comes"


@pytest.mark.long
def test_what_fails_or_is_left_reads_no_more(
    mgr: MemoryManager, stuck: set[Path], tiny_folders: Folders, tmp_path: Path
) -> None:
    """Before a stage, between two, and in one: what was read for what does not come any more is given up."""
    pipe = opened(tiny_folders, tmp_path)
    drawn(pipe, PROMPTS[:1])
    (dit,), vae = pipe.denoisers, pipe.decoder

    def begin(*names: str) -> None:
        emptied(pipe)
        stuck.clear()
        for unit in units_of(pipe):
            if unit.name not in names:
                unit.load()
        stuck.update(tiny_folders("sd3") / name for name in names)

    def check(*units: ManagedModel) -> None:
        assert all(unit.reading is None and unit.host_bytes == 0 for unit in units)
        assert mgr._residency.schedule.uses(mgr.work.working_bytes) is None
        assert {unit for _, unit in read_in(mgr)} >= {unit.name for unit in units}, "it was being read"

    begin("transformer")
    with pytest.raises(ValueError, match="steps is 0"):
        list(pipe.run(["a new boat"], **RUN | {"steps": 0}))
    check(dit)
    begin("vae")
    making = pipe.run_items([Item(prompt, sampling=lambda: RUN) for prompt in PROMPTS[:2]])
    while next(making).stage != "sample":
        pass
    assert vae.reading
    making.close()
    check(vae)
    begin("vae")
    with pytest.raises(KeyboardInterrupt):
        list(pipe.run(PROMPTS[:1], **RUN, on_step=_interrupt))
    check(vae)
    begin("vae")
    other = opened(tiny_folders, tmp_path, "flux")
    with mgr.stage("other", [*other.encoders[:1]], then=[vae]):
        other.encoders[0].module(torch.zeros(1, 77, dtype=torch.long, device="sim"))
    assert vae.reading
    drawn(other, PROMPTS[:1], width=32, height=32, guidance=1.0)
    assert vae.reading, "which is none of the other run's"
    mgr.stop_reading()
    check(vae)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_the_command_knows_what_comes_next(
    mgr: MemoryManager, at_once: None, tiny_folders: Folders, tmp_path: Path
) -> None:
    """`generate` reads the transformer while it encodes, and the VAE while it samples."""
    given = ["generate", "--model", str(tiny_folders("sd3")), "--prompt", "a boat", "--device", "sim"]
    given += ["--width", "16", "--height", "16", "--steps", "2", "--out", str(tmp_path / "boat.png")]
    kept = opened(tiny_folders, tmp_path)  # whose models it shares
    for stage, model in (("encode", "transformer"), ("sample", "vae")):  # the second time the prompt is known
        emptied(kept)
        assert main(given) == 0
        assert (stage, model) in read_in(mgr) and ("decode", "vae") not in read_in(mgr)


def test_a_command_that_fails_reads_no_more(
    mgr: MemoryManager, stuck: set[Path], tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kept = emptied(opened(tiny_folders, tmp_path))
    (dit,) = kept.denoisers
    stuck.add(tiny_folders("sd3") / "transformer")
    given = ["generate", "--model", str(tiny_folders("sd3")), "--prompt", "a boat", "--device", "sim", "--steps", "0"]
    assert main([*given, "--out", str(tmp_path / "boat.png")]) == 1
    assert "ballast: steps is 0" in capsys.readouterr().err
    assert ("encode", "transformer") in read_in(mgr) and dit.reading is None and dit.host_bytes == 0
