"""The bench on the simulated device: within the bound on its virtual clock, and no rival skipped in silence."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast.commands.main
import pytest
import torch
from ballast import bench
from ballast.bench import harness, load, measure, models, plans, published
from ballast.memory import simulated
from ballast.memory.planning.solver import GroupLoad, Loads
from ballast.memory.rates import ASSUMED
from PIL import Image
from safetensors.torch import load_file
from streamed_models import least_bytes

needs_sim = pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported()))


def results(out: Path, stem: str) -> dict[str, Any]:
    """What was written, once it is sure that it names no folder and that the picture is one."""
    text = (out / f"{stem}.json").read_text("utf-8")
    assert str(out) not in text
    assert str(Path.home()) not in text
    assert Image.open(out / f"{stem}.png").width == 1080
    return json.loads(text)


@needs_sim
@pytest.mark.soak
def test_stream_comes_near_the_bound_in_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "stream", "--models", "none", "--device", "sim", "--size", "tiny", "--out", str(tmp_path)]
    assert ballast.commands.main.main(arguments) == 0
    assert [path.name for path in tmp_path.glob("*.json")] == ["stream-sim-tiny.json"]
    found = results(tmp_path, "stream-sim-tiny")
    assert (found["machine"], found["device"], found["torch"]) == ("sim", "sim", torch.__version__)
    assert list(found["overhead_us_per_group"]) == ["cpu"]
    assert found["overhead_us_per_group"]["cpu"] < 300, "ten times what the committed results hold to"
    assert [row["share"] for row in found["rows"]] == 3 * [None, 0, 0.25, 0.5, 0.75, 1]
    for row in found["rows"]:
        assert row["is_equal"] and 0.999 <= row["over_bound"] <= 1.1, row
        assert row["step"] == pytest.approx(row["predicted"], rel=0.002), row
        assert row["copied_bytes"] == row["streamed_bytes"], row
        assert row["engine_allocations"] == 0, row
    for at, ratio in enumerate((0.3, 1, 3)):
        regime = found["rows"][6 * at + 1 : 6 * at + 6]
        assert [row["ratio"] for row in regime] == pytest.approx([ratio] * 5)
        peaks = [row["peak_bytes"] for row in regime]
        assert peaks == sorted(peaks)
        assert regime[-1]["streamed_bytes"] == 0
        streamed = [row["streamed_bytes"] for row in regime]
        assert streamed == sorted(streamed, reverse=True)
    assert "T/bound" in capsys.readouterr().out
    assert simulated.stats().allocated_bytes == 0


@needs_sim
@pytest.mark.skipif(not os.environ.get("BALLAST_SOAK"), reason="takes half a minute: in make soak")
def test_peers_compares_those_that_run_and_lists_those_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "peers", "--device", "sim", "--out", str(tmp_path), "--shares", "0.5"]
    assert ballast.commands.main.main([*arguments, "--only", "ballast,naive,cache-dit"]) == 0
    found = results(tmp_path, "peers-sim-tiny")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["resident", "ballast 0.50", "naive", "cache-dit 0.50"]
    refused = rows.pop("cache-dit 0.50")["error"]
    assert refused.startswith(("ModuleNotFoundError", "ValueError"))
    assert f"cache-dit 0.50: {refused}" in capsys.readouterr().out
    assert rows["resident"]["copied_bytes"] == 0
    for name in ("ballast 0.50", "naive"):
        assert rows[name]["difference"] == 0
        assert rows[name]["peak_bytes"] < rows["resident"]["peak_bytes"]
    assert rows["ballast 0.50"]["over_bound"] <= 1.05 < rows["naive"]["over_bound"]


def uneven(count: int = 40, before: float = 0.1) -> Loads:
    """Groups of a MB or two, of which every third computes three times as long."""
    groups = (GroupLoad((1 + i % 2) * 2**20, (1 + i % 2) * 2**20, 1.0 + 2 * (i % 3 == 0)) for i in range(count))
    return Loads(tuple(groups), published.BUS_BYTES_PER_SECOND, before)


@pytest.mark.long
def test_rows_of_a_published_model_are_what_the_solver_says() -> None:
    loads, whole = uneven(), 60 * 2**20
    rows = list(published.solve("x", loads))
    shares = (0.25, 0.5, 0.75, 1.0)
    assert [(row["compute_over_transfer"], row["ram_share"], row["residency"]) for row in rows] == [
        (ratio, share, tenths / 10) for ratio in (0.25, 0.5, 1, 2) for share in shares for tenths in range(11)
    ]
    copying = whole / 25e9
    for row in rows:
        assert row["model"] == "x"
        computing = row["compute_over_transfer"] * copying
        # Besides its share the device has 10 MB for the ring. RAM has its windows, which hold no weights.
        missing = (1 - row["residency"]) * whole - 10 * 2**20
        least = max(
            computing, missing / 25e9, (missing - row["ram_share"] * whole) / 3e9 if row["ram_share"] < 1 else 0
        )
        assert least <= row["bound_seconds"] * (1 + 1e-6)
        assert row["bound_seconds"] <= row["step_seconds"] * (1 + 1e-9)
        assert row["over_bound"] == row["step_seconds"] / row["bound_seconds"]
    for ratio in published.RATIOS:
        for share in shares:
            found = (row for row in rows if (row["compute_over_transfer"], row["ram_share"]) == (ratio, share))
            steps = [row["step_seconds"] for row in found]
            assert steps == sorted(steps, reverse=True)
            assert steps[-1] == pytest.approx(ratio * copying)
    facts = published.facts("x", loads)
    assert (facts["groups"], facts["weight_bytes"], facts["largest_bytes"]) == (40, whole, 2 * 2**20)


@needs_sim
@pytest.mark.long
def test_what_a_step_computes_is_that_of_a_run(tiny_folders: Callable[[str], Path]) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    loads = published.loads_of(pipe, {"width": 64, "height": 64, "guidance": 1.0})
    plan = pipe.plan(width=64, height=64, steps=3, guidance=1.0, vram="1GB", rates=ASSUMED)
    assert sum(group.held_bytes for group in loads.groups) <= pipe.denoisers[0].size_bytes
    assert loads.compute_seconds == pytest.approx(plan.step_seconds)
    assert loads.bytes_per_second == published.BUS_BYTES_PER_SECOND


@pytest.mark.skipif(not os.environ.get("BALLAST_SOAK"), reason="takes long: in make soak")
def test_a_published_model_is_opened_from_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    request = {"models": ["NewBie-image-Exp0.1"], "residencies": (0.0, 0.5, 1.0), "ratios": (0.5,)}
    assert harness.show("published", request, tmp_path) == 0
    found, said = results(tmp_path, "stream"), capsys.readouterr().out
    (facts,) = found["models"]
    assert 6.4 * 2**30 < facts["weight_bytes"] < 6.6 * 2**30
    assert 100 < facts["groups"] < 600
    rows = found["rows"]
    names = ["model", "residency", "compute_over_transfer", "ram_share", "step_seconds", "bound_seconds", "over_bound"]
    assert [list(row) for row in rows] == [names] * 12
    assert all(1 <= row["over_bound"] < 1.2 for row in rows), rows
    assert "NewBie-image-Exp0.1: T/bound at most" in said


def test_weights_are_the_same_for_the_same_seed() -> None:
    one, same, other = models.build("tiny"), models.build("tiny"), models.build("tiny", seed=1)
    states = [module.state_dict() for module in (one, same, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not all(torch.equal(value, states[2][name]) for name, value in states[0].items())
    arguments = models.inputs("tiny", 64, torch.device("cpu"))
    assert one(**arguments)[0].isfinite().all()
    assert least_bytes(one) < 0.2 * models.weight_bytes(one)


def test_bytes_are_counted_in_a_trace() -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 4096}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 100}},
        {"name": "process_name", "args": {"name": "python"}},
    ]
    assert measure.traced_bytes({"traceEvents": events}) == 4196


def test_what_is_asked_for_wrongly_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert ballast.commands.main.main(["bench", "peers", "--only", "mmpg"]) == 1
    assert "mmpg" in capsys.readouterr().err
    assert ballast.commands.main.main(["bench", "stream", "--models", "FLUX"]) == 1
    assert "--models has FLUX. Known are FLUX.1-dev, " in capsys.readouterr().err
    monkeypatch.delattr(ballast, "bench")
    monkeypatch.setitem(sys.modules, "ballast.bench", None)
    assert ballast.commands.main.main(["bench", "stream"]) == 1
    said = capsys.readouterr().err.strip()
    assert "not part of this install" in said
    assert "\n" not in said
    assert tuple(models.SIZES) == bench.SIZES


@pytest.mark.soak
def test_load_reads_the_same_weights_each_way(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "load", "--gb", "0.02", "--rounds", "1", "--folder", str(tmp_path), "--out", str(tmp_path)]
    assert ballast.commands.main.main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json"], "the weights are gone"
    found = json.loads((tmp_path / "load.json").read_text("utf-8"))
    assert found["weight_bytes"] == pytest.approx(20e6, rel=0.3)
    rows = {row["name"]: row for row in found["rows"]}
    to_ram = ["ballast", "from_pretrained", "from_pretrained, copied"]
    assert list(rows) == [*to_ram, "streamed", "direct reads"]
    assert all(0 < row["least"] <= row["seconds"] <= row["most"] for row in rows.values())
    assert all(rows[name]["peak_bytes"] > 0.9 * found["weight_bytes"] for name in to_ram)
    if found["cold"]:
        assert all(rows[name]["cached_bytes"] < 2**17 for name in ("ballast", "streamed")), "the header alone"
        assert rows["from_pretrained"]["cached_bytes"] >= found["weight_bytes"] > 2**17
    said = capsys.readouterr().out
    assert all(row["name"] in said for row in found["rows"])
    assert said.count("round 1: ") == len(rows)
    seconds = {name: row["seconds"] for name, row in rows.items()}
    ratio = re.search(r"ballast takes (\S+) of the seconds of from_pretrained, copied", said)
    speed = re.search(r"streamed weights come (\S+) times as fast as direct reads", said)
    assert ratio and speed
    assert float(ratio[1]) == pytest.approx(seconds["ballast"] / seconds["from_pretrained, copied"], abs=0.01)
    assert float(speed[1]) == pytest.approx(seconds["direct reads"] / seconds["streamed"], abs=0.01)


def test_load_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert ballast.commands.main.main(["bench", "load", "--gb", "0"]) == 1
    assert capsys.readouterr().err == "ballast: --gb is 0 and --rounds 5; both take a number above 0.\n"
    arguments = ["bench", "load", "--gb", "0.001", "--folder", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(load, "WAYS", {"by hand": None})
    assert ballast.commands.main.main(arguments) == 1
    assert capsys.readouterr().err == "ballast: by hand failed: KeyError: 'by hand'\n"
    assert not list(tmp_path.iterdir())


def test_weights_that_are_written_have_no_nan_and_are_those_of_the_module(tmp_path: Path) -> None:
    width = load.width_of(2e6)
    nbytes = load.write_weights(tmp_path / "model.safetensors", width)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == load.names_of(width)
    assert sum(tensor.nbytes for tensor in found.values()) == nbytes
    assert len(found) > 200
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_plans_are_judged_by_each_figure() -> None:
    row = {"imports": 4.0, "open": 4.5, "first": 9.9, "kept": 2.9, "again": 0.9, "rss_bytes": 10**9}
    assert plans.verdict(row) == "ok"
    for name, much in {"open": 4.7, "first": 10.1, "kept": 3.1, "again": 1.1, "rss_bytes": 3 * 10**9}.items():
        assert plans.verdict(row | {name: much}).startswith(f"TOO MUCH: {name} (< ")
