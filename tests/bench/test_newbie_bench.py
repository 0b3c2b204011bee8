"""`ballast bench newbie`: predicted at the published sizes, and the code for a GPU on the simulated one."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast.commands.main
import newbie_folders
import pytest
from ballast.bench import harness, newbie
from test_bench import results

GIB = 2**30
ARTICLES = ["baseline", "compile only", "staged, fp32 decode", "all together"]
BUDGETS = [4_500_000, 4_200_000, 300_000]  # for a tiny one; the last is too small
OURS = ["ours, 4.29 MB", "ours, 4.01 MB", "ours, 293 KB"]


STAGES = ["encode", "sample", "decode"]


def by_name(found: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows of each way by their stages."""
    ways: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        ways.setdefault(row["name"], {})[row["stage"]] = row
    assert all(list(stages) == STAGES for stages in ways.values())
    return ways


def peak(stages: dict[str, dict[str, Any]], figure: str) -> int:
    return max(row[figure] for row in stages.values())


@pytest.mark.soak
def test_predicted_at_the_published_sizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(["bench", "newbie", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found, said = results(tmp_path, "newbie-predicted"), capsys.readouterr().out
    rows = by_name(found)
    ours = ["ours, 8 GB", "ours, 6 GB", "ours, 4 GB"]
    assert list(rows) == ARTICLES + ours and "notes" not in found
    assert 15 * GIB < peak(rows["baseline"], "planned_bytes") < 18 * GIB
    assert 6.4 * GIB < rows["staged, fp32 decode"]["sample"]["planned_bytes"] <= 8 * GIB
    for name, gigabytes in zip(ours, (8, 6, 4), strict=True):
        assert peak(rows[name], "planned_bytes") <= gigabytes * GIB
        assert rows[name]["sample"]["note"] == "" and rows[name]["sample"]["planned_step"] > 0
    assert [rows[name]["sample"]["placement"].split(",")[0] for name in ours] == ["resident", "streamed", "streamed"]
    for compiled, plain in (("compile only", "baseline"), ("all together", "staged, fp32 decode")):
        assert peak(rows[compiled], "planned_bytes") == peak(rows[plain], "planned_bytes")
        assert (rows[compiled]["sample"]["planned_step"], rows[compiled]["sample"]["note"]) == (None, "as without")
    for told in (*rows, "planned step", "15.2 GB, 1.87 s", "13.3 GB, 1.58 s"):
        assert told in said


@pytest.fixture
def tiny(sim: ModuleType, tmp_path: Path) -> Path:
    """A small NewBie with drawn weights, beside a simulated card that takes time."""
    sim.enable(total="1GB", tflops=1e-3)
    folder = newbie_folders.official(tmp_path / "tiny")
    newbie.draw(folder)
    return folder


def request(tiny: Path, **more: Any) -> dict[str, Any]:
    return {"device": "sim", "folder": str(tiny), "budgets": BUDGETS, "vision_bytes": 1000, "side": 64, **more}


@pytest.mark.soak
def test_measured_in_every_way(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert harness.show("newbie", request(tiny, steps=3), tmp_path) == 0
    found, said = results(tmp_path, "newbie-sim"), capsys.readouterr().out
    rows = by_name(found)
    assert list(rows) == ARTICLES + OURS[:2] + [f"{name}, compiled" for name in OURS[:2]]
    assert all(name in said for name in rows)
    assert len(found["notes"]) == 2, "the last budget is too small"
    for note, name in zip(found["notes"], (OURS[-1], f"{OURS[-1]}, compiled"), strict=True):
        assert note.startswith(f"{name}: DoesNotFitError: ") and f"! {note}" in said
    peaks = {name: peak(stages, "peak_bytes") for name, stages in rows.items()}
    assert peaks["baseline"] > peaks["staged, fp32 decode"] > peaks[OURS[0]] > peaks[OURS[1]]
    for name, size in zip(OURS, BUDGETS[:2], strict=False):
        assert peaks[name] <= size and all(row["is_kept"] for row in rows[name].values())
        assert rows[name]["sample"]["placement"].split(",")[0] == "streamed"
        assert all(row["over_planned"] <= 1.001 for row in rows[name].values()), rows[name]
    for name, stages in rows.items():
        row = stages["sample"]
        assert row["step"] > 0 and row["recompiles"] is None
        # torch.compile knows no simulated device.
        compiled = "compile" in name or name == "all together"
        assert row["note"] == ("nothing was compiled" if compiled else "")


def test_recompiles_are_counted_after_the_second_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = itertools.count()
    monkeypatch.setattr(newbie, "compiles", lambda: next(graphs))  # before the run, then after each step
    monkeypatch.setattr(newbie, "ways", lambda *_: [newbie.Way("all together", compile=True)])
    harness.show("newbie", request(tiny, side=32, steps=5), tmp_path)
    row = by_name(results(tmp_path, "newbie-sim"))["all together"]["sample"]
    assert row["recompiles"] == 3
    assert row["note"] == ""


def test_what_cannot_be_measured_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for arguments in (["--device", "sim"], ["--device", "cpu", "--steps", "2"]):
        assert ballast.commands.main.main(["bench", "newbie", "--out", str(tmp_path), *arguments]) == 1
        said = capsys.readouterr().err.strip()
        assert "Use --device cpu" in said or "at least 3" in said
        assert "\n" not in said
