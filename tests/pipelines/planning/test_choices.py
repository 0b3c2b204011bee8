"""What each choice of weights would take and gain: the plans of pipelines that are opened so."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import ballast.commands.main
import pytest
import torch
from ballast.memory.codecs.converters import CONVERTERS
from ballast.memory.planning.runplan import seconds
from ballast.memory.sizes import format_bytes
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.pipelines.planning.choices import CHOICES, compare_weights
from node_runner import run_node
from selection import few

SIZE: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}


def plans_of(folder: Path, **budget: Any) -> dict[str, Any]:
    opened = {choice: ballast.open_pipeline(folder, device="cpu", dtype="bf16", weights=choice) for choice in CHOICES}
    return {choice: pipe.plan(**SIZE, **budget) for choice, pipe in opened.items()}


def rows_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.split()[0] in CHOICES}


@pytest.mark.long
@pytest.mark.parametrize("vram", ["1GB", 300_000])
def test_a_row_says_what_the_plan_of_such_a_pipeline_does(tiny_folders: Any, vram: Any) -> None:
    plans = plans_of(tiny_folders("flux"), vram=vram, ram="1GB")
    rows = rows_of(compare_weights(plans))
    assert list(rows) == list(CHOICES)
    before = plans["auto"].step_seconds
    for choice, plan in plans.items():
        told = [format_bytes(plan.ram_bytes), format_bytes(plan.peak_vram_bytes), seconds(plan.step_seconds)]
        assert all(word in rows[choice] for word in told), rows[choice]
        gain = round(100 * (1 - plan.step_seconds / before))
        assert (f"{gain} %" in rows[choice]) == (choice != "auto"), rows[choice]
        assert ("yes" if plan.fits else "NO") in rows[choice].split()
    assert plans["int8"].ram_bytes < plans["exact12"].ram_bytes < plans["auto"].ram_bytes


@pytest.mark.parametrize(("weights", "least", "most"), [("exact12", 0, 0), ("int8", 0.85, 2.55), ("fp8", 2.5, 2.7)])
def test_quality_is_as_the_words_say(weights: str, least: float, most: float) -> None:
    """On rows of 3072, as FLUX has them, Gaussian ones and some with outliers."""
    torch.manual_seed(0)
    found = []
    for values in (torch.randn(256, 3072), torch.distributions.StudentT(4.0).sample((256, 3072))):
        plain = (0.02 * values).to(torch.bfloat16)
        codec, parts = CONVERTERS[weights].encode(plain)
        codec.decode(parts, decoded := torch.empty_like(plain))
        found.append(100 * float((decoded.float() - plain.float()).norm() / plain.float().norm()))
    assert least <= min(found) and max(found) <= most
    figures = [float(each) for each in re.findall(r"[\d.]+(?= %)", CONVERTERS[weights].quality)]
    for said in figures or [0.0]:
        assert any(abs(said - each) < 0.1 for each in found), found


@pytest.mark.parametrize("weights", few(["exact12", "int8", "fp8"], "exact12"))
def test_what_is_called_once_keeps_no_room_to_decode_in(weights: str, sim: ModuleType, tiny_folders: Any) -> None:
    """One step without a second pass: the peak is as planned, before the weights are encoded."""
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim", dtype="bf16", weights=weights)
    cond = pipe.encode("a boat")
    planned = pipe.plan(cond=cond, **{**SIZE, "steps": 1}).sampling.peak_vram_bytes
    sim.reset_stats()
    pipe.sample(cond, **{**SIZE, "steps": 1})
    assert sim.stats().peak_bytes <= planned <= 1.02 * sim.stats().peak_bytes


def test_what_is_encoded_already_is_said(tiny_folders: Any) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    plan = pipe.plan(**SIZE, vram="1GB", ram="1GB")
    assert "they are encoded already" in compare_weights(dict.fromkeys(CHOICES, plan))


def test_node_and_command(
    sim: ModuleType, tiny_folders: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folders("flux")
    monkeypatch.setattr("ballast.nodes.load.find_pipelines", lambda: {"flux": folder})
    asked: dict[str, Any] = {"device": "sim", "dtype": "bfloat16", "vram_gb": 0.5, "weights": "int8"}
    reference = run_node(LoadPipeline, pipeline="flux", **asked).result[0]
    given = {"pipeline": reference, **SIZE, "guidance": 0.0}
    plain = run_node(VramPlan, **given, vram_gb="1GB").result[1]
    text = run_node(VramPlan, **given, vram_gb="1GB", compare_weights=True).result[1]
    assert text.startswith(plain) and list(rows_of(text)) == list(CHOICES)
    assert rows_of(text)["int8"].split()[2:4] != rows_of(text)["auto"].split()[2:4]
    assert sim.stats().h2d_bytes == sim.stats().allocated_bytes == 0, "nothing was loaded"

    words = [
        "plan",
        str(folder),
        "--dtype",
        "bf16",
        "--width",
        "64",
        "--height",
        "64",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    assert ballast.commands.main.main([*words, "--vram", "1GB,300KB", "--compare-weights"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Weights with ") == 2 and "1.00 GB" in printed
