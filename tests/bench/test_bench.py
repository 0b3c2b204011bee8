"""The bench on the simulated device: within the bound on its virtual clock, and no rival skipped in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ballast.commands.main
import pytest
import torch
from ballast import bench
from ballast.bench import measure, models
from ballast.memory import simulated
from ballast.memory.streaming.stream import Streamed
from PIL import Image

needs_sim = pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported()))


def results(out: Path, stem: str) -> dict[str, Any]:
    """What was written, once it is sure that it names no folder and that the picture is one."""
    text = (out / f"{stem}.json").read_text("utf-8")
    assert str(out) not in text
    assert str(Path.home()) not in text
    assert Image.open(out / f"{stem}.png").width == 1080
    return json.loads(text)


@needs_sim
def test_stream_comes_near_the_bound_in_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert (
        ballast.commands.main.main(["bench", "stream", "--device", "sim", "--size", "tiny", "--out", str(tmp_path)])
        == 0
    )
    found = results(tmp_path, "stream-sim-tiny")
    assert (found["machine"], found["device"], found["torch"]) == ("sim", "sim", torch.__version__)
    assert list(found["overhead_us_per_block"]) == ["cpu"]
    assert len(found["rows"]) == 15
    for row in found["rows"]:
        assert 0.999 <= row["over_bound"] <= 1.05, row
        assert row["copied_bytes"] == row["streamed_bytes"], row
        assert row["engine_allocations"] == 0, row
    for at, ratio in enumerate((0.3, 1, 3)):
        regime = found["rows"][5 * at : 5 * at + 5]
        assert [row["ratio"] for row in regime] == pytest.approx([ratio] * 5)
        peaks = [row["peak_bytes"] for row in regime]
        assert peaks == sorted(peaks)
        assert regime[-1]["streamed_bytes"] == 0
        assert regime[2]["streamed_bytes"] == pytest.approx(regime[0]["streamed_bytes"] / 2)
    assert "T/bound" in capsys.readouterr().out
    assert simulated.stats().allocated_bytes == 0


@needs_sim
def test_peers_compares_those_that_run_and_lists_those_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "peers", "--device", "sim", "--out", str(tmp_path), "--shares", "0.5"]
    assert ballast.commands.main.main([*arguments, "--only", "ballast,naive,block-streamer"]) == 0
    found = results(tmp_path, "peers-sim-tiny")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["resident", "ballast 0.50", "naive", "block-streamer"]
    refused = rows.pop("block-streamer")["error"]
    assert refused.startswith(("ModuleNotFoundError", "ValueError"))
    assert f"block-streamer: {refused}" in capsys.readouterr().out
    assert rows["resident"]["copied_bytes"] == 0
    for name in ("ballast 0.50", "naive"):
        assert rows[name]["difference"] == 0
        assert rows[name]["peak_bytes"] < rows["resident"]["peak_bytes"]
    assert rows["ballast 0.50"]["over_bound"] <= 1.05 < rows["naive"]["over_bound"]


def test_weights_are_the_same_for_the_same_seed() -> None:
    one, same, other = models.build("tiny"), models.build("tiny"), models.build("tiny", seed=1)
    states = [module.state_dict() for module in (one, same, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not all(torch.equal(value, states[2][name]) for name, value in states[0].items())
    arguments = models.inputs("tiny", 64, torch.device("cpu"))
    assert one(**arguments)[0].isfinite().all()
    assert Streamed.least_bytes(one) < 0.2 * models.weight_bytes(one)


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
    monkeypatch.delattr(ballast, "bench")
    monkeypatch.setitem(sys.modules, "ballast.bench", None)
    assert ballast.commands.main.main(["bench", "stream"]) == 1
    said = capsys.readouterr().err.strip()
    assert "not part of this install" in said
    assert "\n" not in said
    assert tuple(models.SIZES) == bench.SIZES
