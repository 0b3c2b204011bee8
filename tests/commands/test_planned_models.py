"""Will it run on my PC: the page has the figures, the figures are what the planner says, and the doctor finds a row.

    UPDATE_TABLE=1 .venv/bin/python -m pytest tests/commands/test_planned_models.py

writes the rows of the pages anew from the figures. `ballast plan --table` plans the figures themselves.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ballast.commands.main
import pytest
from ballast.commands import doctor, plan_table
from ballast.commands.doctor import Finding
from ballast.commands.planned_models import (
    COMPUTERS,
    FORMS,
    GIB,
    Computer,
    Figures,
    Form,
    computer_of,
    duration,
    fastest,
    figures_of,
    fill_page,
    load_models,
    load_rows,
    summary,
)
from ballast.memory import ram
from ballast.memory.files import read_json
from ballast.memory.rates import ASSUMED
from ballast.pipelines.files.components import read_model_index
from ballast.pipelines.files.single.published import FACTS
from ballast.pipelines.files.trust import component_class
from ballast.pipelines.pipeline import Pipeline
from ballast.pipelines.sampling.picture_sizes import most_tokens
from places import ROOT

MODELS = {model.name: model for model in load_models()}
NEAR = 0.01  # figures have three digits, and another torch may count a little more
MOST_DECODING = 2e-6  # seconds of decoding for a pixel, with the rates of the page
TOKEN = 16  # pixels to a side of a token, of all models that have a table of positions
MOST_SECONDS = 3.0  # of CPU for a row, once the model was planned
LAPTOP = 118  # characters of a row as GitHub shows it, beside which nothing is cut on a laptop


def row_of(name: str, form: str, computers: list[Computer]) -> tuple[Form, Form]:
    """The figures of some PCs that come with the pack, and those planned now."""
    kept = load_rows()[name][form]
    figures = {on.key: kept.figures[on.key] for on in computers if on.key in kept.figures}
    return replace(kept, figures=figures), plan_table.plan_model(MODELS[name], [form], computers)[form]


def assert_near(kept: Form, planned: Form) -> None:
    assert planned.download_gb == pytest.approx(kept.download_gb, rel=NEAR)
    assert planned.figures.keys() == kept.figures.keys()
    for key, figures in planned.figures.items():
        assert vars(figures) == pytest.approx(vars(kept.figures[key]), rel=NEAR), key


@pytest.mark.parametrize("page", plan_table.PAGES)
def test_the_page_has_the_figures(page: str) -> None:
    if os.environ.get("UPDATE_TABLE"):
        plan_table.rewrite()
    text = (ROOT / page).read_text("utf-8")
    assert fill_page(text, load_models(), load_rows()) == text, "it is stale: run this test with UPDATE_TABLE=1"
    assert re.findall(r"<!-- rows: (\S+) -->", text) == [on.key for on in COMPUTERS]
    for on in COMPUTERS:
        assert text.count(f"<!-- rows: {on.key} -->\n\n|") == 1


def test_a_changed_figure_makes_the_page_stale() -> None:
    text, rows = (ROOT / plan_table.PAGES[0]).read_text("utf-8"), load_rows()
    name = next(iter(MODELS))
    form = fastest(rows[name], COMPUTERS[0])
    kept = rows[name][form]
    slower = replace(kept.figures[COMPUTERS[0].key], first=kept.figures[COMPUTERS[0].key].first * 3)
    changed = replace(kept, figures={**kept.figures, COMPUTERS[0].key: slower})
    assert fill_page(text, load_models(), {**rows, name: {**rows[name], form: changed}}) != text


def test_a_row_is_narrow_enough_for_a_laptop() -> None:
    text = (ROOT / plan_table.PAGES[0]).read_text("utf-8")
    rows = [re.sub(r"\]\([^)]*\)|[\[*]", "", line) for line in text.splitlines() if line.startswith("| [")]
    shown = [line for line in rows if "huggingface" not in line and line.count("|") == 11]
    assert len(shown) == len(MODELS) * len(COMPUTERS)
    assert max(map(len, shown)) <= LAPTOP


def test_models_are_those_of_the_figures_and_of_the_pack() -> None:
    rows = load_rows()
    assert list(rows) == list(MODELS) and len(MODELS) >= 30
    facts = {folder.name for folder in (FACTS / "models").iterdir()}
    templates = {path.stem.split()[0] for path in (ROOT / "workflows").glob("*.json")}
    for name, model in MODELS.items():
        assert (model.facts in facts) != bool(model.folder) and model.workflow in templates, name
        assert list(rows[name]) == list(model.forms) == [form for form in FORMS if form in model.forms], name
        sizes = [rows[name][form].download_gb for form in model.forms]
        assert sizes == sorted(sizes, reverse=True), name
        for on in COMPUTERS:
            for form in model.forms:
                if figures := rows[name][form].figures.get(on.key):
                    assert figures.peak_gb * GIB <= on.vram_bytes * 1.01, (name, form, on)
                    assert figures.ram_gb * GIB <= on.ram_bytes * 1.01, (name, form, on)
                    assert 0 < figures.step <= figures.picture <= figures.first * 1.01, (name, form, on)


def test_every_model_runs_on_the_largest_pc() -> None:
    on = COMPUTERS[-1]
    assert [name for name, forms in load_rows().items() if not fastest(forms, on)] == []


def test_figures_are_of_the_steps_of_the_models() -> None:
    """What is left of a picture's time is that of decoding it."""
    rows = load_rows()
    for name, model in MODELS.items():
        if steps := model.run.get("steps"):
            pixels = model.run["width"] * model.run["height"] * model.run.get("frames", 1)
            for form, told in rows[name].items():
                for figures in told.figures.values():
                    sampled = figures.step * steps
                    assert sampled * (1 - NEAR) <= figures.picture, (name, form)
                    assert figures.picture <= sampled * (1 + NEAR) + pixels * MOST_DECODING, (name, form)


def test_published_configs_have_positions_for_the_sizes_of_the_runs() -> None:
    for name, model in MODELS.items():
        if model.facts:
            index = read_model_index(FACTS / "models" / model.facts)
            config = read_json(FACTS / "models" / model.facts / "transformer" / "config.json")
            most = most_tokens(component_class(*index["transformer"]), {**config, **model.transformer})
            sides = model.run["height"], model.run["width"]
            assert not most or all(size <= TOKEN * reach for size, reach in zip(sides, most, strict=True)), name


def test_a_better_pc_is_never_slower() -> None:
    for name, forms in load_rows().items():
        for form, told in forms.items():
            for on in COMPUTERS:
                for other in COMPUTERS:
                    if on.vram_gb <= other.vram_gb and on.ram_gb <= other.ram_gb and on.key in told.figures:
                        slower = told.figures[other.key].step / told.figures[on.key].step
                        assert slower < 1.02, (name, form, on, other)


def test_rows_are_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none takes long, once the first plan of a model has made its dry run."""
    taken: list[float] = []
    plan = Pipeline.plan

    def timed(self: Pipeline, *args: Any, **options: Any) -> Any:
        begun = time.process_time()
        try:
            return plan(self, *args, **options)
        finally:
            taken.append(time.process_time() - begun)

    monkeypatch.setattr(Pipeline, "plan", timed)
    assert_near(*row_of("Sana 1.6B", "fp8", [Computer(8, 16), Computer(8, 32)]))
    assert len(taken) == 2 and taken[1] < MOST_SECONDS


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("FLUX.1 dev", "fp8", marks=pytest.mark.soak),
        pytest.param("Wan 2.1 text 1.3B", "bf16", marks=pytest.mark.soak),
        ("FLUX.1 Kontext dev", "Q4"),
    ],
)
def test_rows_of_other_kinds_are_planned_again(name: str, form: str) -> None:
    assert_near(*row_of(name, form, [Computer(8, 16), Computer(12, 32)]))


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_planned_again(name: str) -> None:
    assert_near(*row_of(name, MODELS[name].forms[0], [Computer(8, 32)]))


def test_the_fastest_form_is_the_more_exact_one_of_equals() -> None:
    on = Computer(8, 32)

    def form(seconds: float | None) -> Form:
        return Form(1.0, {on.key: Figures(1.0, 1.0, 1.0, seconds, 1.0)} if seconds else {})

    assert fastest({"bf16": form(10.1), "fp8": form(10.0), "Q4": form(12.0)}, on) == "bf16"
    assert fastest({"bf16": form(10.5), "fp8": form(10.0), "Q4": form(12.0)}, on) == "fp8"
    assert fastest({"bf16": form(None), "Q4": form(12.0)}, on) == "Q4"
    assert fastest({"bf16": form(None)}, on) == ""


def test_a_run_that_does_not_fit_has_no_figures() -> None:
    pipe = ballast.open_pipeline(ROOT / "demo" / "shapes", device="cpu")
    run: dict[str, Any] = {"width": 64, "height": 64, "ram": "1GB", "rates": ASSUMED}
    assert figures_of(pipe.plan(**run, vram="1MB")) is None
    figures = figures_of(plan := pipe.plan(**run, vram="64MB"))
    assert figures and figures.peak_gb == pytest.approx(plan.peak_vram_bytes / GIB, rel=NEAR)
    assert figures.picture == pytest.approx(plan.steps * plan.step_seconds + plan.stages[-1].seconds, rel=NEAR)


@pytest.mark.parametrize(
    ("vram", "memory", "found"),
    [(7.8, 31.2, "8/32"), (5.8, 15.4, "6/16"), (23.5, 125.0, "24/64"), (11.9, 30.0, "12/32"), (10.0, 24.0, "8/16"),
     (80.0, 500.0, "24/64"), (4.0, 64.0, None), (8.0, 8.0, None)],
)  # fmt: skip
def test_a_machine_is_the_largest_pc_that_it_is_as_good_as(vram: float, memory: float, found: str | None) -> None:
    on = computer_of(int(vram * GIB), int(memory * GIB))
    assert (on and on.key) == found


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.412, "0.41 s"), (1.26, "1.3 s"), (9.96, "10 s"), (89.0, "89 s"), (90.0, "1.5 min"), (5400.0, "1.5 h")],
)
def test_times_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_doctor_prints_the_rows_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Where there is a card; else the page is for all."""

    def card(nbytes: float) -> None:
        monkeypatch.setattr(
            doctor, "Accelerator", lambda _: SimpleNamespace(is_cpu=not nbytes, total_bytes=lambda: nbytes)
        )

    card(7.8 * GIB)
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("python", True, "3")])
    monkeypatch.setattr(ram, "total_bytes", lambda: int(31 * GIB))
    assert doctor.run() == 0
    said = capsys.readouterr().out
    assert "a card of 8 GB and 32 GB of RAM" in said and "not measured" in said
    assert summary(Computer(8, 32)) in said
    assert all(f"\n{name}" in said for name in MODELS)
    card(2 * GIB)
    doctor.run()
    assert "6 GB and 16 GB of RAM, or more" in capsys.readouterr().out
    card(0)
    doctor.run()
    assert "ublished models" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--table", "SDXL"], "--table knows no SDXL. It knows AuraFlow 0.3, Chroma"),
        (["demo", "--table"], "Leave the model out"),
        ([], "there is no model"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(given: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(["plan", *given]) == 1
    told = capsys.readouterr().err.strip()
    assert said in told and "\n" not in told
