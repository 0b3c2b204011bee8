"""Plain weights are converted once, into an ordinary file, and run from there as from any file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.bench.models import encode
from ballast.commands.main import main
from ballast.memory.sizes import parse_bytes
from ballast.memory.weights import conversion
from ballast.memory.weights.encoding import encoding_of
from ballast.memory.weights.unit import ManagedModel
from ballast.nodes.load import LoadPipeline
from ballast.nodes.shared.folders import DEMO as DEMO_NAME
from node_runner import run_node
from places import ROOT, TESTS

SIZE: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "guidance": 2.0}
DEMO = ROOT / "demo" / "shapes"


def opened(cache: Path, weights: str = "auto", **more: Any) -> Any:
    return ballast.open_pipeline(DEMO, "sim", dtype="bf16", cache_dir=cache, weights=weights, **more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is found out of the pipeline with plain weights."""
    return tmp_path_factory.mktemp("plain")


@functools.cache
def encoded(plain: Path) -> Any:
    return opened(plain).encode("a red circle")


def files(cache: Path) -> list[Path]:
    return sorted((cache / "encoded").glob("*"))


def forget(pipe: Any) -> None:
    """As in another process: nothing of the units is known any more."""
    for unit in (*pipe.encoders, *pipe.denoisers):
        pipe.manager.evict(unit)
        unit.drop()
    pipe.manager.free()


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("int8", marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("exact12", "fp8")),
    ],
)
def test_every_placement_runs_from_the_file(weights: str, tmp_path: Path, sim: ModuleType) -> None:
    """The first run writes it, and the next opening reads it; in each placement, and from disk where RAM is short."""
    plain = opened(tmp_path / "plain")
    cond = plain.encode("a red circle")
    once = opened(tmp_path / "once", weights)
    expected = once.sample(cond, **SIZE)
    assert torch.equal(expected, plain.sample(cond, **SIZE)) == (weights == "exact12")
    forget(once)
    written: list[tuple[Path, int]] = []
    for strategies in (("resident",), ("streamed", "leafwise", "cpu", "resident")):
        pipe = opened(tmp_path, weights)
        (dit,) = pipe.denoisers
        for strategy in strategies:
            assert torch.equal(pipe.sample(cond, **SIZE, strategy=strategy), expected), strategy
            assert dit.source() is not None and not dit.unconverted_bytes
            assert sim.stats().allocated_bytes == sim.stats().hazards == 0
        short = pipe.within(vram=2 * 10**6, ram=int(0.6 * dit.size_bytes))
        forecast = short.plan(**SIZE, cond=cond).sampling
        assert torch.equal(short.sample(cond, **SIZE), expected)
        assert dit.host_bytes <= 0.6 * dit.size_bytes
        record = pipe.manager.timeline.stages[-1]
        assert 0 < record.peak_bytes <= forecast.peak_vram_bytes <= 2 * 10**6
        found = [(path, path.stat().st_mtime_ns) for path in files(tmp_path)]
        assert len(found) == 1 and written in ([], found), "written once"
        assert found[0][0].stat().st_size <= 1.05 * dit.size_bytes
        written = found
        forget(pipe)
        del pipe, dit, short


def test_a_plan_before_the_first_run_counts_on_the_file(plain: Path, tmp_path: Path, sim: ModuleType) -> None:
    within: dict[str, Any] = {"vram": 2 * 10**6, "ram": 10**6}
    pipe = opened(tmp_path, "exact12", **within)
    cond = encoded(plain)
    before = pipe.plan(**SIZE, cond=cond)
    assert before.sampling.fits and not files(tmp_path), "a plan writes nothing"
    told = re.search(r"The first run converts weights, once, into files of about ([\d.]+ MB)\.", str(before))
    pipe.sample(cond, **SIZE)
    after = pipe.plan(**SIZE, cond=cond)
    (path,) = files(tmp_path)
    assert told and parse_bytes(told[1]) == pytest.approx(path.stat().st_size, rel=0.1)
    assert "converts weights" not in str(after)
    assert after.sampling.placement == before.sampling.placement == "streamed"
    assert before.peak_vram_bytes == pytest.approx(after.peak_vram_bytes, rel=0.02)
    forget(pipe)


def test_what_another_process_has_written_meanwhile_stays(
    plain: Path, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be reading it, and goes by its stamp."""
    pipe = opened(tmp_path, "exact12")
    cond = encoded(plain)
    expected = pipe.sample(cond, **SIZE)
    (path,) = files(tmp_path)
    whole, stamps = path.read_bytes(), []
    forget(pipe)
    path.unlink()
    replacing = conversion.replacing

    @contextlib.contextmanager
    def late(*given: Any, **named: Any) -> Iterator[Path]:
        with replacing(*given, **named) as part:
            yield part
            path.write_bytes(whole)
            stamps.append((path.stat().st_mtime_ns, path.stat().st_ino))

    monkeypatch.setattr(conversion, "replacing", late)
    assert torch.equal(pipe.sample(cond, **SIZE), expected)
    assert stamps == [(path.stat().st_mtime_ns, path.stat().st_ino)]
    assert files(tmp_path) == [path]
    forget(pipe)


@pytest.mark.long
def test_a_damaged_file_is_made_again(
    plain: Path, tmp_path: Path, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = opened(tmp_path, "exact12")
    cond = encoded(plain)
    expected = pipe.sample(cond, **SIZE)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    forget(pipe)
    damages = (whole, b""), (whole, whole[:-1]), (b"exact12", b"exact13"), (b"shape", b"shope"), (b"[768]", b"[769]")
    for before, after in damages if os.environ.get("BALLAST_SOAK") else damages[1::3]:
        path.write_bytes(whole.replace(before, after))
        caplog.clear()
        assert torch.equal(pipe.sample(cond, **SIZE), expected)
        assert "dropping damaged weights" in caplog.text
        assert path.read_bytes() == whole
        forget(pipe)


def test_stopping_leaves_no_file_and_the_next_run_writes_it(
    plain: Path, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = opened(tmp_path, "int8")
    cond = encoded(plain)
    left = [0, 3, 11]

    def stop() -> None:
        if left and left[0] == 0:
            raise KeyboardInterrupt
        if left:
            left[0] -= 1

    monkeypatch.setattr("ballast.memory.host_cache.host.throw_if_interrupted", stop)
    while left:
        with pytest.raises(KeyboardInterrupt):
            pipe.sample(cond, **SIZE)
        assert not files(tmp_path) and pipe.denoisers[0].host_bytes == 0 and sim.stats().allocated_bytes == 0
        left.pop(0)
    pipe.sample(cond, **SIZE)
    assert len(files(tmp_path)) == 1
    forget(pipe)


@pytest.mark.parametrize("trouble", ["no room", "no folder", "full in the middle"])
def test_a_file_that_cannot_be_written_is_one_line(
    trouble: str, plain: Path, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that it takes. Nothing stays behind, and the next run writes it once there is room."""
    cond = encoded(plain)
    pipe = opened(tmp_path, "int8")
    if trouble == "no room":
        few = shutil.disk_usage(tmp_path)._replace(free=2**30 + 1000)
        monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: few)
    elif trouble == "no folder":
        (tmp_path / "encoded").write_bytes(b"")
    else:

        def full(*given: Any) -> Any:
            raise OSError(28, "No space left on device")
            yield

        monkeypatch.setattr(conversion, "_converted", full)
    with pytest.raises(
        OSError, match=r"^the converted weights, 9\d\d KB, cannot be written to .*encoded \(.*\)\. Make"
    ) as why:
        pipe.sample(cond, **SIZE)
    assert "\n" not in str(why.value) and sim.stats().allocated_bytes == 0 and not pipe.denoisers[0].host_bytes
    monkeypatch.undo()
    (tmp_path / "encoded").unlink() if trouble == "no folder" else None
    assert not files(tmp_path)
    pipe.sample(cond, **SIZE)
    assert len(files(tmp_path)) == 1
    forget(pipe)


@pytest.mark.parametrize(
    ("damage", "ram", "keep"),
    [
        ("folder deleted", None, True),
        pytest.param("deleted", 0.6, False, marks=pytest.mark.soak),
        pytest.param("cut", None, False, marks=pytest.mark.soak),
        pytest.param("emptied", 0.6, True, marks=pytest.mark.soak),
        ("written again", 0.6, False),
        pytest.param("replaced", None, False, marks=pytest.mark.soak),
    ],
)
def test_a_file_that_is_gone_or_another_is_made_again(
    damage: str, ram: float | None, keep: bool, plain: Path, tmp_path: Path, sim: ModuleType
) -> None:
    """In the same process and pipeline, whatever was in RAM, on the device, or being run from disk."""
    cond = encoded(plain)
    pipe = opened(tmp_path, "int8", keep=keep)
    expected = pipe.sample(cond, **SIZE)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    if ram:
        forget(pipe)
        pipe = pipe.within(vram=2 * 10**6, ram=int(ram * pipe.denoisers[0].size_bytes), keep=keep)
        assert torch.equal(pipe.sample(cond, **SIZE), expected)
    if damage == "folder deleted":
        shutil.rmtree(path.parent)
    elif damage == "deleted":
        path.unlink()
    elif damage == "replaced":
        path.rename(path.with_suffix(".old"))
        path.write_bytes(whole[:100])
    else:
        path.write_bytes({"cut": whole[:-100], "emptied": b"", "written again": whole}[damage])
    for _ in range(2):
        assert torch.equal(pipe.sample(cond, **SIZE), expected)
        assert path.read_bytes() == whole
    pipe.plan(**SIZE)
    pipe.manager.free()
    assert sim.stats().allocated_bytes == 0
    forget(pipe)


def test_a_file_that_goes_while_it_is_run_from_is_made_again(plain: Path, tmp_path: Path, sim: ModuleType) -> None:
    cond = encoded(plain)
    pipe = opened(tmp_path, "int8")
    expected = pipe.sample(cond, **SIZE)
    (path,) = files(tmp_path)
    forget(pipe)
    short = pipe.within(vram=2 * 10**6, ram=int(0.6 * pipe.denoisers[0].size_bytes))
    with contextlib.suppress(OSError):  # it may have been read ahead
        short.sample(cond, **SIZE, on_step=lambda *_: path.unlink(missing_ok=True))
    assert torch.equal(short.sample(cond, **SIZE), expected) and path.is_file()
    forget(pipe)


def test_all_files_together_are_bounded(
    plain: Path, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not used for longest goes; what is in use here, or was within an hour, and files of others stay."""
    cond = encoded(plain)
    folder = tmp_path / "encoded"
    folder.mkdir()
    long_ago, names = time.time() - 10**6, []
    for at, name in enumerate(("oldest", "older", "old", "another")):
        names.append(
            folder / f"transformer-int8-{at:032x}.safetensors" if name != "another" else folder / "my.safetensors"
        )
        names[-1].write_bytes(bytes(1000))
        os.utime(names[-1], (long_ago + at, long_ago + at))
    recent = folder / f"transformer-int8-{9:032x}.safetensors"
    recent.write_bytes(bytes(1000))
    os.utime(recent, (time.time() - 60, long_ago - 1))
    pipe = opened(tmp_path, "int8")
    expected = pipe.sample(cond, **SIZE)
    mine = pipe.denoisers[0].conversion.path
    assert all(path.exists() for path in (*names, recent, mine)), "they are far below the bound"
    os.utime(mine, (long_ago - 5, mine.stat().st_mtime))  # as if its time were not noted
    monkeypatch.setattr(conversion, "MAX_BYTES", mine.stat().st_size + 1000 + 2000)
    other = opened(tmp_path, "exact12")
    before = mine.stat().st_mtime_ns
    other.sample(cond, **SIZE)
    assert [path.exists() for path in names] == [False, False, False, True]
    assert recent.exists() and mine.exists() and other.denoisers[0].conversion.path.exists()
    assert caplog.text.count("removed ") == 3
    assert torch.equal(pipe.sample(cond, **SIZE), expected)
    assert mine.stat().st_mtime_ns == before and mine.stat().st_atime > time.time() - 600
    forget(pipe)
    forget(other)


def test_loader_and_command(tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"pipeline": DEMO_NAME, "device": "sim", "weights": "int8"}
    for more in ({}, {"cache_encoded": True}):  # which had a meaning once, and is still taken
        kept = run_node(LoadPipeline, **asked, **more).result[0]
        assert kept.open().denoisers[0].conversion is not None
        assert kept.holding("fp8").open().model.claims.weights == "fp8"
    assert kept.holding("auto").open().denoisers[0].conversion is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = ["--steps", "1", "--device", "sim", "--vram", "64MB", "--weights", "int8", "--cache-encoded"]
    assert (
        main(["generate", "--model", str(DEMO), "--prompt", "a red circle", *given, "--out", str(tmp_path / "a.png")])
        == 0
    )
    assert len(files(tmp_path / "ballast" / "embeddings")) == 2, "encoder and transformer"


def test_a_module_that_is_encoded_in_memory_stays_so() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    encode(layer, "int8")
    unit = ManagedModel.from_module("layer", "transformer", layer)
    assert encoding_of(unit.module.get_parameter("0.weight")) and unit.size_bytes == 64 * 64 + 4 * 64


_WRITE = """
import json, pathlib, sys
import conftest, torch
from ballast.bench.rss import peak_rss_bytes
from ballast.memory.codecs.converters import CONVERTERS
from ballast.memory.weights.conversion import Conversion
from ballast.memory.weights.unit import ManagedModel
from ballast.memory.weights.stored import stored_tensors
from safetensors.torch import save_file
folder, count, width = pathlib.Path(sys.argv[1]), 60, 2048
for i in range(count):
    save_file({f"{i}.weight": torch.full((width, width), 0.5, dtype=torch.bfloat16)}, folder / f"{i}.safetensors")
def build():
    with torch.device("meta"):
        layers = (torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
        return torch.nn.Sequential(*layers)
places = stored_tensors(folder.glob("*.safetensors"))
unit = ManagedModel("dit", "transformer", build, lambda: None, stored=lambda: places)
unit.conversion = Conversion(CONVERTERS["exact12"], folder / "made" / "dit")
unit.module, torch.zeros(1)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak_rss_bytes()
unit.convert(lambda *_: lambda _: None)
print(json.dumps([peak_rss_bytes() - before, unit.conversion.path.stat().st_size, unit.size_bytes]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there RAM of a process is told so")
def test_writing_holds_a_few_weights_in_ram(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WRITE, str(tmp_path)], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rose, wrote, size = json.loads(done.stdout)
    one = 2048 * 2048 * 2
    assert wrote == pytest.approx(60 * 0.75 * one, rel=0.01) and size == pytest.approx(wrote, rel=0.01)
    assert rose < 25 * one, f"{rose / one:.1f} of 60 weights"
