"""`ballast bench gpu`: all its sections on the simulated card, what it does when they break, the page of results."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import ballast.commands.main
import pytest
import torch
from ballast.bench import charts, gpu, harness, report, tests
from ballast.bench.gpu import Job, page
from ballast.bench.places import RESULTS
from ballast.memory import simulated
from PIL import Image

needs_sim = pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported()))


def run(out: Path, *arguments: str) -> int:
    return ballast.commands.main.main(["bench", "gpu", "--out", str(out), *arguments])


def spent() -> float:
    """Seconds of processors that processes of this one have taken, whatever else the machine does."""
    times = os.times()
    return times.children_user + times.children_system


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "sim.json").read_text("utf-8"))


# Dry


@needs_sim
@pytest.mark.soak
def test_a_dry_run_fills_every_table_within_four_minutes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = spent()
    assert run(tmp_path, "--dry") == 0
    assert spent() - before < 2 * 240 * 0.75, "two at a time, on two cores that do little else"
    found, said = read(tmp_path), capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(found) and str(Path.home()) not in json.dumps(found)
    assert (found["dry"], found["device"], list(found["sections"])) == (True, "sim", list(gpu.JOBS))
    for name, one in found["sections"].items():
        assert one["rows"] and not report.lines(one), (name, one)
        for column in harness.SECTIONS[one["section"]].columns:
            told = [row for row in one["rows"] if row.get(column) is not None]
            assert told or (name, column) in EMPTY, (name, column)
        assert f"== {name}, " in said
    check_engine(found["sections"])
    rows = {row["name"]: row for row in found["sections"]["newbie-peers"]["rows"]}
    assert list(rows) == ["resident", "naive", "ballast as naive"]
    assert (
        rows["ballast as naive"]["peak_bytes"] <= rows["ballast as naive"]["room_bytes"] == rows["naive"]["peak_bytes"]
    )
    assert rows["ballast as naive"]["times_as_fast"] > 1
    assert all(row["outcome"] == "passed" for row in found["sections"]["tests"]["rows"])
    plans = found["sections"]["plans"]["rows"]
    assert [row["stage"] for row in plans] == ["encode", "sample", "decode"] * 3
    for row in plans:
        assert max(row["peak_bytes"], row["planned_bytes"]) <= row["budget_bytes"] and row["is_kept"], row
        assert row["over_planned"] == pytest.approx(1, abs=0.05), row
    for row in (ways := found["sections"]["ways"]["rows"]):
        assert row["is_equal"] == (row["way"] != "static:2") and (row["over_planned"] or 1) == pytest.approx(
            1, abs=0.05
        )
    assert [row["way"] for row in ways].count("lockstep") == 1, "FLUX.1 has one pass"
    assert all(row["verdict"] == "same bits" for row in found["sections"]["codecs"]["rows"])
    for row in found["sections"]["decode"]["rows"]:
        assert row["is_finite"] and (row["difference"] is None) == (row["way"] == "whole"), row
        assert row["way"] in ("whole", "tiles") or row["difference"] < 1e-4, row
    assert Image.open(tmp_path / "sim.png").width == 1080
    assert (tmp_path / "sim.txt").read_text("utf-8").strip() in said


# Of the only peer of a dry run's HiDream there is none to be compared with.
# Only ways of an article have its figures, and only compiled ones recompile.
EMPTY = {("hidream-peers", "difference"), ("hidream-peers", "times_as_fast")}
EMPTY |= {("plans", column) for column in ("recompiles", "article", "note")} | {("tests", "why")}


def check_engine(sections: dict[str, Any]) -> None:
    for name, shares in (("newbie", [None, 0, 0.25, 0.5, 0.75]), ("hidream", [None, 0, 0.5])):
        rows = sections[name]["rows"]
        assert [(row["weights"], row["share"]) for row in rows] == [
            (weights, share) for weights in ("auto", "exact12") for share in shares
        ]
        assert all(row["is_equal"] and row["over_bound"] > 0.99 for row in rows), rows
        for weights in ("auto", "exact12"):
            own = [row for row in rows if row["weights"] == weights]
            assert own[0]["peak_bytes"] > own[-1]["peak_bytes"] > own[1]["peak_bytes"]
            assert own[1]["streamed_bytes"] > own[-1]["streamed_bytes"] > 0
        plain, encoded = (next(r for r in rows if (r["weights"], r["share"]) == (w, 0)) for w in ("auto", "exact12"))
        assert encoded["streamed_bytes"] < 0.8 * plain["streamed_bytes"]
    assert [row["share"] for row in sections["malloc-async"]["rows"]] == [None, 0.5]
    assert [sections[name]["allocator"] for name in ("newbie", "malloc-async")] == ["native", "cudaMallocAsync"]


@needs_sim
def test_sections_of_an_earlier_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are measured again."""
    old = {"section": "card", "seconds": 1.0, "rows": []}
    sections = {"decode": {**old, "section": "decode"}, "card": old, "gone": old}
    (tmp_path / "sim.json").write_text(json.dumps({**CARD, "sections": sections}), "utf-8")
    new = {"seconds": 2.0, "device": "sim", "torch": "2", "rows": []}
    monkeypatch.setattr(gpu, "_measured", lambda name, *_: {"section": gpu.JOBS[name].section, **new})
    assert run(tmp_path, "--dry", "--only", "codecs") == 0
    told = read(tmp_path)["sections"]
    assert [(name, one["seconds"]) for name, one in told.items()] == [("card", 2.0), ("codecs", 2.0), ("decode", 1.0)]


@needs_sim
@pytest.mark.soak
def test_a_section_that_breaks_says_so_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    engine = {"size": "tiny", "ratios": [1.0], "weights": ["auto"]}
    broken = {
        "missing": Job("nothing", 1, 1),
        "at once": Job("stream", 1, 1, {**engine, "size": "huge", "shares": []}),
        "in a row": Job("stream", 1, 1, {**engine, "shares": [math.nan, 0.5]}),
        "good": Job("stream", 1, 1, {**engine, "shares": [0.5]}),
        "card": gpu.JOBS["card"],
    }
    monkeypatch.setattr(gpu, "JOBS", broken)
    assert run(tmp_path, "--dry") == 1
    sections, said = read(tmp_path)["sections"], capsys.readouterr().out
    assert list(sections) == list(broken)
    assert sections["missing"]["error"] == "ModuleNotFoundError: No module named 'ballast.bench.nothing'"
    assert sections["at once"]["error"] == "KeyError: 'huge'"
    assert [row["share"] for row in sections["in a row"]["rows"]] == [None, 0.5]
    assert len(notes := sections["in a row"]["notes"]) == 1
    assert re.fullmatch(r"auto, \d+ tokens, nan%: ValueError: cannot convert float NaN to integer", notes[0])
    assert [row["share"] for row in sections["good"]["rows"]] == [None, 0.5]
    for name in ("card", "good"):
        assert not report.lines(sections[name]), name
    for name in ("missing", "at once", "in a row"):
        for line in report.lines(sections[name]):
            assert "\n" not in line and f"! {line}" in said


# Time, cards and tests


def test_time_that_a_section_leaves_goes_to_those_after_it() -> None:
    names, left, took = gpu.chosen(None), 530.0, {}
    while names:
        took[names[0]] = gpu.share(names, left)
        left -= took[names.pop(0)]
    assert left == pytest.approx(0) and all(took[name] >= gpu.JOBS[name].least for name in took)
    assert gpu.share(["newbie", "tests"], 100) + gpu.share(["tests"], 100) > 130
    assert gpu.chosen(["decode"]) == ["card", "decode"]


def test_what_has_no_time_is_left_out_in_a_line(tmp_path: Path) -> None:
    one = gpu._measured("plans", 3.0, False, tmp_path / "log")
    assert one["error"] == "left out: it had 3 s, and wants 50"
    assert "rows" not in one and not list(tmp_path.iterdir())


def test_what_a_section_cannot_do_is_a_note_and_what_it_was_at_its_error() -> None:
    saved: list[dict[str, Any]] = []

    def run(dry: bool = False) -> harness.Run:
        return harness.Run({"dry": dry, "seconds": 10}, saved.append)

    to = run()
    assert to.attempt("too much", 60, int) is None
    assert to.attempt("bad", 0, int, "x") is None
    to.row(step=1.0)
    assert saved[-1]["notes"] == [
        "too much: left out, 10 s were left",
        "bad: ValueError: invalid literal for int() with base 10: 'x'",
    ]
    assert saved[-1]["error"] == "it ended in: bad" and saved[-1]["rows"] == [{"step": 1.0}]
    to.measure(lambda _: None)
    assert "error" not in saved[-1]
    run().measure(lambda _: None)
    assert saved[-1]["error"] == "no row could be measured"
    run().measure(lambda _: exit("a library's own"))
    assert saved[-1]["error"] == "SystemExit: a library's own"
    assert run(dry=True).attempt("dry", 60, int, "3") == 3


def test_where_there_is_no_card_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in (
        ([], "torch sees no CUDA card here. Use --dry"),
        (["--only", "newbee"], "--only has newbee. Known are card, newbie, "),
        (["--dry", "--seconds", "0"], "--seconds is 0"),
    ):
        assert run(tmp_path, *arguments) == 1
        said = capsys.readouterr().err.strip()
        assert words in said and "\n" not in said
    assert not list(tmp_path.iterdir())


SAID = """
tests/memory/test_gpu.py::test_one[real] PASSED                 [ 20%]
tests/memory/test_gpu.py::test_two[real-flux] FAILED            [ 40%]
tests/memory/test_gpu.py::test_three[real] SKIPPED (there is one device) [ 60%]
tests/memory/test_gpu.py::test_four[real] ERROR                 [ 80%]
tests/memory/test_gpu.py::test_five[real] """

SUMMARY = """
FAILED tests/memory/test_gpu.py::test_two[real-flux] - AssertionError: off
ERROR tests/memory/test_gpu.py::test_four[real] - RuntimeError: no
"""


def test_outcomes_of_tests_are_read_also_of_those_that_were_stopped() -> None:
    found = [(row["name"], row["outcome"], row["why"]) for row in tests.outcomes(SAID)]
    assert found == [
        ("test_one[real]", "passed", ""),
        ("test_two[real-flux]", "failed", ""),
        ("test_three[real]", "skipped", "there is one device"),
        ("test_four[real]", "error", ""),
        ("test_five[real]", "stopped", ""),
    ]
    whys = {row["name"]: row["why"] for row in tests.outcomes(SAID + "PASSED\n" + SUMMARY)}
    assert whys["test_two[real-flux]"] == "AssertionError: off" and whys["test_four[real]"] == "RuntimeError: no"
    assert len(whys) == 5


# The page


CARD: dict[str, Any] = {
    "bench": "gpu", "dry": False, "device": "Planted Card 9", "machine": "Linux", "torch": "2.13.0", "cuda": "13.0",
    "diffusers": "0.42.1",
    "sections": {
        "newbie": {
            "section": "stream", "seconds": 9.0, "size": "newbie", "weight_bytes": 2**33,
            "notes": ["a | b: left `out`"],
            "overhead_us_per_group": {"cuda": 30.0},
            "rows": [
                {"weights": "auto", "share": None, "ratio": 1.0, "tokens": 4096, "step": 0.5, "bound": 0.5,
                 "over_bound": 1.0, "peak_bytes": 2**33, "is_equal": True},
                {"weights": "auto", "share": 0.5, "ratio": 1.0, "tokens": 4096, "step": 0.6, "bound": 0.5,
                 "over_bound": 1.2, "peak_bytes": 2**32, "is_equal": False},
            ],
        },
        "decode": {"section": "decode", "seconds": 0.0, "error": "left out: it had 3 s, and wants 25"},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", page.PAGES, ids=["en", "zh"])
def test_the_page_is_what_the_results_say(path: Path) -> None:
    text = path.read_text("utf-8")
    assert page.fill(text, path, RESULTS) == text, "run: python -c 'import ballast.bench.gpu.page as p; p.write()'"
    names = [one["device"] for _, one in page.read(RESULTS)] or ["none"]
    shown = re.search(r"<!-- cards -->(.*)<!-- /cards -->", text)
    assert shown and shown[1] == ", ".join(f"`{name}`" for name in names)


def test_a_card_is_on_both_pages_in_the_same_words(tmp_path: Path) -> None:
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "planted-card-9.json").write_text(json.dumps(CARD), "utf-8")
    (results / "dry.json").write_text(json.dumps({**CARD, "dry": True, "device": "sim"}), "utf-8")
    (results / "stream.json").write_text("{}", "utf-8")
    parts = []
    for path, place in zip(page.PAGES, ("docs/benchmarks.md", "docs/zh/benchmarks.md"), strict=True):
        text = page.fill(path.read_text("utf-8"), tmp_path / place, results)
        assert page.fill(text, tmp_path / place, results) == text
        assert "<!-- cards -->`Planted Card 9`<!-- /cards -->" in text and "`sim`" not in text
        head, made = text.split("<!-- results -->")
        assert head.split("<!-- cards -->")[0] == path.read_text("utf-8").split("<!-- cards -->")[0]
        image = re.search(r"!\[Planted Card 9\]\((.*)\)", made)
        assert image and (tmp_path / place).parent.joinpath(image[1]).resolve() == results / "planted-card-9.png"
        parts.append(made.replace(image[1], ""))
    assert parts[0] == parts[1]
    assert "| `auto` | `50%` | `1` | `0.6` | `-` | `0.5` | `1.2` | `4.00 GB` | `-` | `-` | `NO` |" in parts[0]
    assert "- `a / b: left 'out'`\n" in parts[0] and "- `left out: it had 3 s, and wants 25`\n" in parts[0]
    with pytest.raises(ValueError, match="0 places for cards"):
        page.fill("no marks", tmp_path / "docs" / "benchmarks.md", results)


def test_a_picture_is_drawn_of_what_there_is() -> None:
    one, rows = CARD["sections"]["newbie"], CARD["sections"]["newbie"]["rows"]
    more = {**CARD, "sections": {"newbie": {**one, "rows": [*rows, {**rows[1], "share": 0.75}]}}}
    sizes = [charts.card(found).size for found in ({**CARD, "sections": {}}, CARD, more)]
    assert sizes[0] == sizes[1] and sizes[2] > sizes[0] == (1080, 60), "of one share there is nothing to draw"


@needs_sim
@pytest.mark.soak
def test_a_process_that_is_stopped_leaves_what_it_had(tmp_path: Path) -> None:
    request = {
        "dry": True,
        "device": "sim",
        "size": "tiny",
        "ratios": [1.0],
        "weights": ["auto"],
        "shares": [0.5] * 500,
    }
    log = tmp_path / "log"
    for seconds in (12, 25, 50, 100, 200):  # until the machine has come to the first row
        found = harness.apart("stream", request, tmp_path, seconds, log=log)
        assert found["error"] == f"not done after {seconds} s"
        assert log.read_text("utf-8").startswith("== stream")
        if found.get("rows"):
            break
    assert found["rows"][0]["share"] is None and len(found["rows"]) < 500
