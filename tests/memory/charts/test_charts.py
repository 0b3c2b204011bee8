"""Pictures of VRAM: heights are bytes, labels keep apart, nothing global is touched, and matplotlib may be missing."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.style
import numpy as np
import pytest
from ballast.memory.charts.axes import INK, LARGE, ByteChart, write
from ballast.memory.charts.plan_chart import Part, Plan, draw_plan, draw_plans
from ballast.memory.charts.timeline_chart import Span, Stage, draw_timeline
from ballast.memory.reports import timeline as records
from import_pack import ROOT
from matplotlib.font_manager import findfont
from PIL import Image

MB = 2**20
WIDTH, HEIGHT = 900, 450
LEFT, TOP, RIGHT, BOTTOM = 84, 46, WIDTH - 24, HEIGHT - 70  # of the axes
ROLES = {"encoder": "text_encoder", "encoder_2": "text_encoder", "dit": "transformer", "vae": "vae", "more": "other"}
COLOURS = {"encoder": "#2563eb", "encoder_2": "#60a5fa", "dit": "#ea580c", "vae": "#16a34a", "more": "#7c3aed"}
WORK, BUDGET, PLANNED = "#cbd5e1", "#dc2626", "#6b7280"


def stage(seconds: float = 1.0, budget_mb: int = 100, work_mb: int = 10, **weights_mb: int) -> Stage:
    weights = {name: size * MB for name, size in weights_mb.items()}
    peak = sum(weights.values()) + work_mb * MB
    return Stage("stage", seconds, budget_mb * MB, peak, (Span(0.0, seconds, weights, peak),))


def rows_of(picture: Image.Image, colour: str, left: int = LEFT, right: int = RIGHT, near: int = 0) -> np.ndarray:
    """The rows of pixels between the axes' edges in which a colour is, exactly or nearly."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    pixels = np.asarray(picture).astype(int)[TOP : BOTTOM + 1, left:right]
    return np.flatnonzero((np.abs(pixels - wanted).sum(-1) <= near).any(1)) + TOP


def row_at(megabytes: float, ceiling_mb: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * megabytes / (ceiling_mb * 1.06)


# What is drawn is what was


def test_each_band_is_as_high_as_its_bytes() -> None:
    picture = draw_timeline([stage(encoder=10, encoder_2=5, dit=40, vae=8, more=7)], ROLES, WIDTH, HEIGHT)
    assert (picture.size, picture.mode) == ((WIDTH, HEIGHT), "RGB")
    base = 0
    for name, size in {"encoder": 10, "encoder_2": 5, "dit": 40, "vae": 8, "more": 7}.items():
        rows = rows_of(picture, COLOURS[name])
        assert rows.min() == pytest.approx(row_at(base + size, 100), abs=2), name
        assert rows.max() == pytest.approx(row_at(base, 100), abs=2), name
        base += size
    assert rows_of(picture, WORK).min() == pytest.approx(row_at(base + 10, 100), abs=2)
    assert rows_of(picture, BUDGET).tolist() == [pytest.approx(row_at(100, 100), abs=1)]


def test_bands_stand_where_their_time_is() -> None:
    stages = [stage(1.0, encoder=50), stage(3.0, dit=60)]
    pixels = np.asarray(draw_timeline(stages, ROLES, WIDTH, HEIGHT))[BOTTOM - 20]
    edge = LEFT + (RIGHT - LEFT) / 4
    for name, start, end in (("encoder", LEFT, edge), ("dit", edge, RIGHT)):
        wanted = [int(COLOURS[name][i : i + 2], 16) for i in (1, 3, 5)]
        columns = np.flatnonzero((pixels == wanted).all(-1))
        assert (columns.min(), columns.max()) == (pytest.approx(start, abs=2), pytest.approx(end, abs=2))


def test_a_moment_of_much_work_shows_however_short() -> None:
    spans = [
        Span(i / 20_000, (i + 1) / 20_000, {"dit": 50 * MB}, (80 if i == 7000 else 60) * MB) for i in range(20_000)
    ]
    picture = draw_timeline([Stage("sample", 1.0, 1000 * MB, 80 * MB, tuple(spans))], ROLES, WIDTH, HEIGHT)
    pixels = np.asarray(picture).astype(int).sum(-1)
    column = LEFT + int((RIGHT - LEFT) * 7000 / 20_000)
    darker = pixels[TOP:BOTTOM, column - 5] - pixels[TOP:BOTTOM, column] > 40
    rows = np.flatnonzero(darker) + TOP
    assert (rows.min(), rows.max()) == (pytest.approx(row_at(80, 80), abs=2), pytest.approx(row_at(60, 80), abs=2))


def test_each_stage_has_its_own_budget_line() -> None:
    stages = [stage(budget_mb=80, dit=50), stage(budget_mb=100, dit=50), stage(budget_mb=1000, dit=50)]
    picture = draw_timeline(stages, ROLES, WIDTH, HEIGHT)
    third = (RIGHT - LEFT) // 3
    for number, budget in enumerate((80, 100)):
        rows = rows_of(picture, BUDGET, LEFT + number * third + 3, LEFT + (number + 1) * third - 3)
        assert rows.tolist() == [pytest.approx(row_at(budget, 100), abs=1)]
    assert not rows_of(picture, BUDGET, LEFT + 2 * third + 3).size, "it is off the scale"


@pytest.mark.parametrize(("budget_mb", "named"), [(240, "budget 240 MB"), (260, "budget 260 MB, off the scale")])
def test_a_budget_far_above_the_peak_is_only_named(budget_mb: int, named: str) -> None:
    chart = ByteChart(WIDTH, HEIGHT, 100 * MB, [budget_mb * MB], [0, 1])
    picture = chart.finish({}, {})
    (legend,) = chart.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [named]
    assert rows_of(picture, BUDGET).size == (budget_mb == 240)


def test_the_planned_peak_is_marked_beside_the_measured() -> None:
    measured = stage(dit=50)
    planned = Stage(**{**vars(measured), "planned_bytes": 75 * MB})
    rows = rows_of(draw_timeline([planned], ROLES, WIDTH, HEIGHT), PLANNED, LEFT + 5, near=12)
    assert rows.tolist() == [pytest.approx(row_at(75, 100), abs=1)]
    assert not rows_of(draw_timeline([measured], ROLES, WIDTH, HEIGHT), PLANNED, LEFT + 5, near=12).size


def test_two_pipelines_units_of_one_name_are_added_up() -> None:
    def event(seconds: float, kind: str) -> records.Event:
        units = tuple(records.OnDevice("dit", "transformer", size * MB) for size in (20, 30))
        return records.Event(seconds, kind, "", 0, 50 * MB, 60 * MB, units)  # type: ignore[arg-type]

    record = records.StageRecord("sample", 5.0, {}, 1.0, 60 * MB, 60 * MB, budget_bytes=100 * MB)
    record.events = [event(5.0, "stage"), event(6.0, "done")]
    picture = records._draw([record], WIDTH, HEIGHT)
    assert rows_of(picture, COLOURS["dit"]).min() == pytest.approx(row_at(50, 100), abs=2)


def test_nothing_and_only_the_cpu_are_told() -> None:
    nothing = draw_timeline([], {}, 400, 200)
    on_cpu = draw_timeline([Stage("encode", 1.0, 0, 0, (Span(0, 1, {}, 0),))], {}, 400, 200)
    assert nothing.size == on_cpu.size == (400, 200)
    assert nothing != on_cpu and min(nothing.getextrema())[0] < 128 > min(on_cpu.getextrema())[0]


# Plans


def plan(loading: float = 0.5, seconds: float = 2.0) -> Plan:
    parts = (
        Part("encode", "encoder", "text_encoder", "1 s", 1.0, 0.0, 0, 20 * MB, 30 * MB),
        Part("sample", "dit", "transformer", "first step", seconds, loading, 5 * MB, 60 * MB, 90 * MB),
        Part("sample", "dit", "transformer", "9 x 0.2 s", 1.8, 0.0, 5 * MB, 60 * MB, 90 * MB, 9),
    )
    return Plan("100 MB: resident", 100 * MB, {"encode": "1 s", "sample": "3.8 s"}, parts)


def test_a_plan_is_drawn_in_bytes_and_one_above_the_other() -> None:
    picture = draw_plan(plan(), WIDTH, HEIGHT)
    top = TOP + 26  # there is a title
    scale = (BOTTOM - top) / 106
    for colour, size in ((COLOURS["encoder"], 20), (COLOURS["dit"], 60), (WORK, 90), (BUDGET, 100)):
        assert rows_of(picture, colour).min() == pytest.approx(BOTTOM - scale * size, abs=2), colour
    both = draw_plans([plan(), plan(loading=1.9)], WIDTH, HEIGHT)
    assert both.crop((0, 0, WIDTH, HEIGHT)) == picture
    assert both.size == (WIDTH, 2 * HEIGHT) and both.crop((0, HEIGHT, WIDTH, 2 * HEIGHT)) != picture


@pytest.mark.parametrize("budget_bytes", [1000, MB, 100 * MB, 10_000 * MB])
def test_a_budget_of_a_plan_is_a_line_even_at_the_bottom(budget_bytes: int) -> None:
    picture = draw_plan(Plan("", budget_bytes, {"sample": ""}, plan().parts[1:]), WIDTH, HEIGHT)
    assert rows_of(picture, BUDGET).size == (budget_bytes < 1000 * MB)


# Labels


@pytest.mark.parametrize("count", [3, 12, 64])
def test_labels_of_stages_keep_apart_and_inside(count: int) -> None:
    edges = [number**2 / count for number in range(count + 1)]  # the first ones are the narrowest
    chart = ByteChart(WIDTH, HEIGHT, MB, [MB] * count, edges)
    chart.stages([f"stage {number}" for number in range(count)], ["1.00 s, peak 12 MB"] * count)
    boxes = sorted((text.get_window_extent() for text in chart.figure.texts if text.get_text()), key=lambda box: box.x0)
    assert len(boxes) >= min(count, 8)
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert boxes[0].x0 >= 0 and boxes[-1].x1 <= WIDTH


def test_of_too_many_labels_those_of_failed_stages_stay() -> None:
    edges = list(range(41))
    chart = ByteChart(WIDTH, HEIGHT, MB, [MB] * 40, edges)
    chart.stages(["stage"] * 39 + ["stage, failed"], [""] * 40, [False] * 39 + [True])
    assert "stage, failed" in [text.get_text() for text in chart.figure.texts]


@pytest.mark.parametrize(("width", "rows"), [(640, 2), (450, 3)])
def test_a_long_title_and_a_long_legend_fit(width: int, rows: int) -> None:
    chart = ByteChart(width, 300, MB, [MB], [0, 1], "a title that is; longer than the picture is wide, " * 2)
    assert max(text.get_window_extent().x1 for text in chart.figure.texts) <= width
    chart.finish({f"text_encoder_{number}": INK for number in range(7)}, {})
    assert len(chart.figure.legends) == rows
    for legend in chart.figure.legends:
        box = legend.get_window_extent()
        assert box.x1 <= width and box.y0 >= 0


def test_a_chart_that_is_drawn_larger_looks_the_same() -> None:
    """Nodes show pictures smaller than they are: letters must grow with them."""
    small, large = (draw_plan(plan(), 450, 265, scale) for scale in (1.0, 2.0))
    assert large.size == (900, 530)
    differs = abs(np.asarray(small).astype(int) - np.asarray(large.resize(small.size, Image.Resampling.BOX)))
    assert differs.mean() < 8, "0 to 255; 32 if letters were as large as before"


@pytest.mark.parametrize("size", [(900, 450), (1200, 480), (901, 451), (333, 217), (1237, 619)])
def test_pictures_have_exactly_the_size(size: tuple[int, int]) -> None:
    stages = [stage(encoder=10), stage(dit=50)]
    assert draw_timeline(stages, ROLES, *size).size == draw_plan(plan(), *size).size == size


# Beside others in the process


def pictures() -> list[bytes]:
    stages = [Stage(**{**vars(stage(dit=50)), "run": run, "planned_bytes": 70 * MB}) for run in ("1 before", "this")]
    return [draw_timeline(stages, ROLES, WIDTH, HEIGHT).tobytes(), draw_plan(plan(), WIDTH, HEIGHT).tobytes()]


def test_settings_of_others_change_nothing() -> None:
    """Other packs in ComfyUI draw too."""
    expected = pictures()
    theirs = {
        "figure.autolayout": True,
        "font.size": 20,
        "font.family": "serif",
        "axes.grid": True,
        "lines.marker": "o",
    }
    with matplotlib.rc_context({**matplotlib.style.library["dark_background"], **theirs}), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures() == expected


def test_settings_are_left_alone() -> None:
    before, had_pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    pictures()
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_threads_draw_at_the_same_time() -> None:
    expected = pictures()
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(lambda _: pictures(), range(8)))


def test_words_are_in_the_font_that_matplotlib_brings() -> None:
    chart = ByteChart(WIDTH, HEIGHT, MB, [MB], [0, 1])
    text = write(chart.figure, 10, 10, "words", INK, LARGE)
    path = Path(findfont(text.get_fontproperties())).resolve()
    assert path.is_relative_to(Path(matplotlib.get_data_path()).resolve())


WITHOUT = """
import sys
sys.modules["matplotlib"] = None  # as if it were not installed
sys.path.insert(0, "tests")
import conftest
from ballast.memory import manager
from ballast.memory.planning import runplan
timeline = manager("cpu").timeline
pictures = [timeline.picture(900, 450), runplan.draw_plans([None, None], 900, 340)]
print([picture.size for picture in pictures], [min(picture.getextrema())[0] < 128 for picture in pictures])
"""


def test_without_matplotlib_a_picture_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[(900, 450), (900, 680)] [True, True]", done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("Ballast: Pictures need matplotlib")]
    assert len(told) == 2 and all(f'"{sys.executable}" -m pip install "matplotlib>=3.8"' in line for line in told)
