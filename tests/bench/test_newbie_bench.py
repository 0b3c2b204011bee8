"""`ballast bench newbie`: predicted at the published sizes, and the code for a GPU on the simulated one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast.commands.main
import newbie_folders
import pytest
from ballast.bench import newbie
from test_bench import results

GIB = 2**30
ARTICLES = ["baseline", "compile only", "staged, fp32 decode", "all together"]
BUDGETS = [4_500_000, 4_200_000, 300_000]  # for a tiny one; the last is too small
OURS = ["ours, 4.29 MB", "ours, 4.01 MB", "ours, 293 KB"]


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["rows"]}


@pytest.mark.long
def test_predicted_at_the_published_sizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(["bench", "newbie", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found, said = results(tmp_path, "newbie-predicted"), capsys.readouterr().out
    rows = by_name(found)
    ours = ["ours, 8 GB", "ours, 6 GB", "ours, 4 GB"]
    assert list(rows) == ARTICLES + ours
    assert not any("error" in row for row in rows.values()), rows
    assert 15 * GIB < rows["baseline"]["peak_bytes"] < 18 * GIB
    assert 6.4 * GIB < rows["staged, fp32 decode"]["sample_bytes"] <= 8 * GIB
    for name, gigabytes in zip(ours, (8, 6, 4), strict=True):
        assert rows[name]["peak_bytes"] <= gigabytes * GIB
        assert rows[name]["note"] == ""
    assert [rows[name]["placement"].split(",")[0] for name in ours] == ["resident", "streamed", "streamed"]
    for compiled, plain in (("compile only", "baseline"), ("all together", "staged, fp32 decode")):
        assert rows[compiled]["peak_bytes"] == rows[plain]["peak_bytes"]
        assert (rows[compiled]["step"], rows[compiled]["note"]) == (None, "as without")
    for told in (*rows, "s/step, predicted", "15.2 GB, 1.87 s", "13.3 GB, 1.58 s"):
        assert told in said


@pytest.fixture
def tiny(sim: ModuleType, tmp_path: Path) -> Path:
    """A small NewBie with drawn weights, beside a simulated card that takes time."""
    sim.enable(total="1GB", tflops=1e-3)
    folder = newbie_folders.official(tmp_path / "tiny")
    newbie.draw(folder)
    return folder


@pytest.mark.long
def test_measured_in_every_way(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert newbie.run("sim", tmp_path, 3, tiny, 64, BUDGETS, vision_bytes=1000) == 0
    found, said = results(tmp_path, "newbie-sim"), capsys.readouterr().out
    rows = by_name(found)
    assert list(rows) == ARTICLES + OURS + [f"{name}, compiled" for name in OURS]
    assert all(name in said for name in rows)
    refused = [rows.pop(name) for name in (OURS[-1], f"{OURS[-1]}, compiled")]
    for row in refused:
        assert row["error"].startswith("DoesNotFitError: "), row
    assert not any("error" in row for row in rows.values()), rows
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peaks["baseline"] > peaks["staged, fp32 decode"] > peaks[OURS[0]] > peaks[OURS[1]]
    for name, size in zip(OURS, BUDGETS[:2], strict=False):
        assert peaks[name] <= size
        assert rows[name]["placement"] == "streamed"
    for name, row in rows.items():
        assert row["step"] > 0
        assert row["recompiles"] is None
        # torch.compile knows no simulated device.
        compiled = "compile" in name or name == "all together"
        assert row["note"] == ("nothing was compiled" if compiled else "")


def test_recompiles_are_counted_after_the_second_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = itertools.count()
    monkeypatch.setattr(newbie, "compiles", lambda: next(graphs))  # before the run, then after each step
    pipe = ballast.open_pipeline(tiny, device="sim", cache_dir=tmp_path)
    row = newbie._measured(pipe, newbie.Way("all together", compile=True), 32, 5, 0)
    assert row["recompiles"] == 3
    assert row["note"] == ""
    json.dumps(row)


def test_what_cannot_be_measured_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for arguments in (["--device", "sim"], ["--device", "cpu", "--steps", "2"]):
        assert ballast.commands.main.main(["bench", "newbie", "--out", str(tmp_path), *arguments]) == 1
        said = capsys.readouterr().err.strip()
        assert "Use --device cpu" in said or "at least 3" in said
        assert "\n" not in said
