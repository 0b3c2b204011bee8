"""Plans as people see them: on the command line, as a picture, in ComfyUI, and beside what was measured."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import ballast.commands.main
import folder_paths
import numpy as np
import pytest
import tiny
from ballast.bench.downloads import full_size
from ballast.memory import manager
from ballast.memory.charts import axes
from ballast.memory.charts.axes import to_image
from ballast.memory.planning.forecast import Forecast
from ballast.memory.planning.runplan import RunPlan, StagePlan, compare, draw_plans
from ballast.memory.rates import ASSUMED, Rates
from ballast.memory.sizes import format_bytes
from ballast.memory.weights.unit import ManagedModel
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from ballast.pipelines.encoding.embedding_cache import shared_cache
from ballast.pipelines.planning import plans as planning
from matplotlib.figure import Figure
from matplotlib.text import Text
from node_runner import page, run_node
from PIL import Image
from selection import few

Folders = Callable[[str], Path]
BUDGETS = ("8GB", "12GB", "24GB")
WIDTH, HEIGHT = tiny.FAMILIES["sd3"].size
COLOURS = {"text_encoder": "#2563eb", "text_encoder_2": "#60a5fa", "transformer": "#ea580c", "vae": "#16a34a"}
WORK, BUDGET = "#cbd5e1", "#dc2626"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full-size folder, without weights."""
    return full_size.build("flux", tmp_path_factory.mktemp("full") / "flux")


@pytest.fixture(scope="module")
def flux_plans(flux: Path) -> list[RunPlan]:
    pipe = ballast.open_pipeline(flux, device="cpu")
    return [pipe.plan(width=1024, height=1024, steps=28, guidance=1.0, vram=vram, ram="64GB") for vram in BUDGETS]


@pytest.fixture(autouse=True)
def model(tiny_folders: Folders) -> Iterator[None]:
    """A tiny pipeline in ComfyUI's models/diffusers."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    root.mkdir(parents=True, exist_ok=True)
    (root / "sd3").symlink_to(tiny_folders("sd3"), target_is_directory=True)
    yield
    shutil.rmtree(root)
    shared_cache(Path(folder_paths.get_user_directory()) / "ballast" / "embeddings").clear()


def pixels(picture: Image.Image, colour: str) -> int:
    """How many pixels have exactly that colour."""
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return int((np.asarray(picture) == wanted).all(-1).sum())


# The command line


def plan(*arguments: Any) -> int:
    return ballast.commands.main.main(["plan", *map(str, arguments), "--device", "cpu"])


def test_one_budget_is_the_whole_plan(
    tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "plan.png"
    sizes = ("--width", WIDTH, "--height", HEIGHT, "--steps", 4, "--guidance", 4)
    assert plan(tiny_folders("sd3"), *sizes, "--vram", "64MB", "--out", out) == 0
    said = capsys.readouterr()
    for word in ("encode", "sample", "decode", "transformer", "resident", "64.0 MB", "All ", "assumed", "streamed"):
        assert word in said.out
    assert "on cpu" not in said.out, "the budget is that of a card which is not here"
    assert said.err == ""
    assert Image.open(out).size == (1200, 480)


@pytest.mark.long
def test_options_of_the_prompt_are_planned(tiny_folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """In the library and on the command line: sampling takes what it takes with a prompt encoded like that."""
    pipe: Any = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    size: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "vram": "1GB"}
    short = pipe.plan(**size, negative_prompt="", max_sequence_length=16)
    known = pipe.plan(**size, cond=pipe.encode("a red boat", "", max_sequence_length=16))
    sampled = [each.stages[-2].peak_vram_bytes for each in (short, known, pipe.plan(**size))]
    assert sampled[0] == sampled[1] < sampled[2]
    given = [f"--{name}={value}" for name, value in size.items()]
    assert plan(tiny_folders("flux"), *given, "--max-sequence-length=16") == 0
    assert str(short).splitlines()[0] in capsys.readouterr().out.splitlines()
    with pytest.raises(TypeError, match=r"no argument max_length"):
        pipe.plan(**size, max_length=16)


@pytest.mark.long
def test_several_budgets_are_a_table_and_one_picture(
    flux: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: what the libraries say of a long prompt belongs to a run, not to its plan."""
    out, prompt = tmp_path / "plan.png", "a red boat, " * 300
    sizes = ("--width", 1024, "--height", 1024, "--ram", "64GB", "--prompt", prompt)
    assert plan(flux, *sizes, "--vram", ",".join(BUDGETS), "--out", out) == 0
    said = capsys.readouterr()
    assert said.err == ""
    head, table, reasons, basis, wrote = said.out.strip().split("\n\n")
    assert head == "flux, 1024 x 1024, 28 steps"
    heading, _, *rows = table.splitlines()
    assert re.split(r"\s\s+", heading) == [
        "budget",
        "placement",
        "peak VRAM",
        "RAM",
        "disk",
        "per step",
        "first step",
        "total",
        "best batch",
        "fits",
    ]
    cells = [re.split(r"\s\s+", row) for row in rows]
    assert [row[0] for row in cells] == ["8.00 GB", "12.0 GB", "24.0 GB"]
    assert [row[1].split(",")[0] for row in cells] == ["streamed", "streamed", "resident"]
    assert {row[-1] for row in cells} == {"yes"}
    assert [line.split(":")[0] for line in reasons.splitlines()] == [row[0] for row in cells]
    assert "assumed" in basis
    assert wrote == f"wrote {out}"
    assert Image.open(out).size == (1200, 3 * 420)


@pytest.mark.long
def test_rates_can_be_given(flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (flux, "--width", 1024, "--height", 1024, "--vram", "8GB", "--ram", "64GB")
    assert plan(*sizes) == 0
    assert plan(*sizes, "--h2d-gbps", 6, "--disk-gbps", 1.5, "--tflops", 200) == 0
    usual, given = capsys.readouterr().out.split("flux, ")[1:]
    assert "the copies hide behind the computing" in usual
    assert "the copies set the pace" in given
    assert "6.0 GB/s to the device (6.0 unpinned), 1.5 GB/s from disk and 200.0 TFLOPS, assumed" in given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no GPU here to plan for. State a budget, such as --vram 8GB."),
        (("--vram", "0"), "there is no GPU here to plan for. State a budget, such as --vram 8GB."),
        (("--vram", "8GB,much"), "not a size: 'much'"),
        (("--vram", "8GB", "--ram", "some"), "not a size: 'some'"),
        (("--vram", "8GB", "--out", "plan.mov"), "cannot write plan.mov"),
        (("--vram", "8GB", "--tflops", "0"), "--tflops is 0"),
        (("--vram", "8GB", "--h2d-gbps", "nan"), "--h2d-gbps is nan"),
        (("--vram", "8GB", "--steps", "0"), "steps is 0"),
        (("--vram", "8GB", "--width", "63"), "width is 63"),
        (("--vram", "8GB", "--frames", "9"), "makes pictures, not videos"),
        (("--vram", "8GB", "--strategy", "magic"), "unknown strategy 'magic'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, tiny_folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tiny_folders("sd3"), *arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1
    assert plan("nowhere", "--vram", "8GB") == 1
    assert "nowhere is not a folder" in capsys.readouterr().err


# The picture


def test_picture_has_each_unit_in_the_colour_of_its_role(flux_plans: list[RunPlan]) -> None:
    for one in flux_plans:
        picture = one.picture(900, 450)
        assert (picture.size, picture.mode) == ((900, 450), "RGB")
        area = {name: pixels(picture, colour) for name, colour in COLOURS.items()}
        assert min(area.values()) > 30, "none vanishes, however short"
        assert area["transformer"] == max(area.values())
        assert min(pixels(picture, WORK), pixels(picture, BUDGET)) > 30


def test_heights_are_the_bytes(flux_plans: list[RunPlan]) -> None:
    """Of each unit's weights, against the budget's line."""
    one = flux_plans[1]
    picture = np.asarray(one.picture(1200, 480)).astype(int)
    red = (np.abs(picture - (220, 38, 38)).sum(-1) < 60)[:400]
    bottom = 480 - 70
    budget = bottom - red.sum(1).argmax()
    for name, plan in {plan.unit: plan for stage in one.stages for plan in stage.units}.items():
        wanted = [int(COLOURS[name][i : i + 2], 16) for i in (1, 3, 5)]
        rows = (picture[:bottom] == wanted).all(-1).any(1).nonzero()[0]
        drawn = (bottom - rows.min()) / budget * one.budget_bytes
        assert drawn == pytest.approx(plan.weights_bytes, abs=one.budget_bytes / 100), name


def test_a_card_without_a_clock_has_no_seconds_in_its_picture(
    tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def read(figure: Figure, scale: float) -> Image.Image:
        drawn.extend(text.get_text() for text in figure.findobj(Text))
        return to_image(figure, scale)

    monkeypatch.setattr(axes, "to_image", read)
    for tflops, is_timed in ((None, False), (1e-3, True)):
        sim.enable(total="1GB", tflops=tflops)
        one = ballast.open_pipeline(tiny_folders("sd3"), device="sim").plan(width=WIDTH, height=HEIGHT, steps=4)
        assert one.is_timed == is_timed
        drawn.clear()
        one.picture(1200, 480)
        assert any(re.search(r"\d (us|ms|s|min)\b", words) for words in drawn) == is_timed, drawn
        assert any(words.startswith("first step") for words in drawn), drawn
        assert any(words.startswith("sample  ") and "peak" in words for words in drawn), drawn


def test_budget_that_nothing_fits_is_drawn_too(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    plans = [pipe.plan(vram=vram, steps=steps) for vram, steps in (("10KB", 1), ("1TB", 1000))]
    assert [one.fits for one in plans] == [False, True]
    assert draw_plans(plans, 640, 300).size == (640, 600)
    assert pixels(plans[0].picture(640, 300), COLOURS["vae"]) > 30
    assert "DOES NOT FIT" in plans[0].brief()
    said = compare(plans)
    assert said.count(format_bytes(plans[1].disk_bytes)) and plans[1].disk_bytes
    assert "NO" in said and "Nothing fits 10.0 KB" in said
    assert "text_encoder: Nothing fits" in plans[0].reason, "not the transformer alone"


# The node


def load(**more: Any) -> Any:
    return run_node(LoadPipeline, pipeline="sd3", **{"device": "sim", **more}).result[0]


def encode(reference: Any, prompt: str = "a red boat") -> Any:
    return run_node(TextEncode, pipeline=reference, prompt=prompt, negative_prompt="blurry").result[0]


def run_plan(reference: Any, **more: Any) -> tuple[Any, str, str]:
    """The picture, the text, and what the page shows."""
    given = {"width": WIDTH, "height": HEIGHT, "steps": 3, **more}
    with page() as shown:
        output = run_node(VramPlan, pipeline=reference, **given)
    ((_, drawn),) = shown.texts
    assert output.ui.as_dict()["text"] == (output.result[1],), "for users of the API"
    return *output.result, drawn


def test_node_plans_for_the_budget_of_the_pipeline(sim: ModuleType) -> None:
    sim.enable(total="4GB", tflops=1.0)
    reference = load(vram_gb=0.5)
    picture, text, drawn = run_plan(reference)
    assert picture.shape == (1, 640, 900, 3)
    assert picture.min() >= 0 and picture.max() <= 1 and picture.std() > 0.02
    head, brief, reason, batch = drawn.splitlines()
    assert batch.startswith("Sampling takes ")
    assert head == f"sd3, {WIDTH} x {HEIGHT}, 3 steps."
    assert brief.startswith("512 MB: resident; peak ")
    assert reason.startswith("All ") and reason in text
    assert all(word in text for word in ("encode", "sample", "decode", "transformer"))
    assert sim.stats().h2d_bytes == sim.stats().allocated_bytes == 0, "nothing was loaded"


def test_node_plans_for_several_budgets(sim: ModuleType) -> None:
    reference = load()
    least = reference.open().plan(WIDTH, HEIGHT, 3, 4.0, vram=1).peak_vram_bytes
    picture, text, drawn = run_plan(reference, vram_gb=f"8, {least // 1024 + 1}KB ,1 KB,")
    assert picture.shape == (1, 3 * 530, 900, 3)
    head, *lines = drawn.splitlines()
    assert head == f"sd3, {WIDTH} x {HEIGHT}, 3 steps."
    assert [line.split(":")[0] for line in lines][::2] == ["8.00 GB", "1.00 KB"]
    assert "resident" in lines[0]
    assert "DOES NOT FIT" not in lines[1] and "DOES NOT FIT" in lines[2]
    assert all(len(line) < 120 for line in drawn.splitlines())
    assert text.splitlines()[2].split()[:2] == ["budget", "placement"]


def test_node_plans_for_the_very_conditioning(sim: ModuleType) -> None:
    reference = load()
    conditioning = encode(reference)
    _, text, _ = run_plan(reference, conditioning=conditioning, vram_gb="1")
    expected = reference.open().plan(WIDTH, HEIGHT, 3, 4.0, cond=conditioning, vram="1GB")
    assert text == str(expected)
    assert "encode" not in text, "that has been done"
    assert "encode" in run_plan(reference, vram_gb="1")[1]


def test_a_budget_of_0_is_all_that_is_free(sim: ModuleType) -> None:
    """As in the loader, whatever that states itself."""
    reference, free = load(vram_gb=0.5), manager("sim").budget_bytes
    _, text, drawn = run_plan(reference, vram_gb="0, 1GB,")
    assert text.splitlines()[4].startswith(f"{format_bytes(free)} "), text
    assert drawn.splitlines()[1].startswith(f"{format_bytes(free)}: resident")
    assert "512 MB: resident" in run_plan(reference)[2]
    assert VramPlan.fingerprint_inputs(vram_gb="8, 0") == VramPlan.fingerprint_inputs(vram_gb="") != ""
    assert VramPlan.fingerprint_inputs(vram_gb="8, much") == ""


@pytest.mark.parametrize("strategy", ["resident", "streamed", "leafwise"])
def test_a_strategy_that_was_chosen_is_the_reason(strategy: str, sim: ModuleType) -> None:
    reference = load()
    plan = reference.open().plan(WIDTH, HEIGHT, 3, 4.0, vram="1GB", strategy=strategy)
    assert plan.reason.startswith(f"{strategy.capitalize()}, as asked for: ")
    assert "do not fit" not in plan.reason
    small = reference.open().plan(WIDTH, HEIGHT, 3, 4.0, vram=1000, strategy=strategy)
    assert small.reason.startswith(
        f"{strategy.capitalize()}, as asked for, does not fit {format_bytes(1000)}: it wants "
    )
    for other in (plan, small):
        assert str(other).count(", as asked for") == 1, "the other stages are as they are"
    assert ", as asked for" not in str(reference.open().plan(WIDTH, HEIGHT, 3, 4.0, vram=1000))


def test_a_card_that_computes_in_no_time_has_no_infinite_rate(sim: ModuleType) -> None:
    _, text, drawn = run_plan(load(), vram_gb="8")
    assert "inf" not in text and "inf" not in drawn
    assert "and computing in no time, simulated." in text


@pytest.mark.parametrize("words", ["8, much", "eight", "-1", "8 12", "1.2.3", "8GBB"])
def test_budget_that_is_no_size_is_one_line(words: str, sim: ModuleType) -> None:
    with pytest.raises(ValueError, match="vram_gb has '.*', which is no size. Write GB, such as") as caught:
        run_plan(load(), vram_gb=words)
    assert "\n" not in str(caught.value)


def test_node_without_a_gpu_wants_a_budget() -> None:
    for words in ("", "0", "8, 0"):
        with pytest.raises(ValueError, match="^there is no GPU here to plan for. State a budget") as caught:
            run_plan(load(device="cpu"), vram_gb=words)
        assert str(caught.value).endswith("such as 8, 12, 24 in vram_gb."), "in the words of the node"
    _, _, drawn = run_plan(load(device="cpu"), vram_gb="8")
    assert "8.00 GB: resident" in drawn


def test_plan_is_made_again_when_what_is_free_may_decide_it(sim: ModuleType) -> None:
    assert VramPlan.fingerprint_inputs(vram_gb="8, 12") == ""
    load().open()
    sim.enable(total="3GB")
    before = VramPlan.fingerprint_inputs(vram_gb=" ")
    sim.enable(total="2GB")
    assert VramPlan.fingerprint_inputs(vram_gb=" ") != before
    assert VramPlan.fingerprint_inputs(vram_gb="8, 12") == ""


# Beside what was measured


def sample(reference: Any, **more: Any) -> str:
    """What the sampler's node says after the run."""
    conditioning = encode(load(device="sim"))
    with page() as shown:
        run_node(
            Sampler,
            pipeline=reference,
            conditioning=conditioning,
            **{"width": WIDTH, "height": HEIGHT, "steps": 3, **more},
        )
    return shown.texts[-1][1]


@pytest.mark.parametrize("strategy", few(["auto", "streamed", "leafwise"], "auto", "streamed"))
def test_sampler_says_what_was_planned(strategy: str, sim: ModuleType) -> None:
    peak = load().open().plan(WIDTH, HEIGHT, 3, 4.0, vram=1, strategy=strategy).sampling.peak_vram_bytes
    vram_gb = peak / 2**30 if strategy == "streamed" else 0.5
    said = sample(load(keep_loaded=False, vram_gb=vram_gb), strategy=strategy)
    match = re.search(r"; peak (.+?) \(planned (.+?)\); ([\d.]+ m?s) a step; [\d.]+ s$", said)
    assert match, said
    record = manager("sim").timeline.stages[-1]
    assert record.planned is not None
    assert record.peak_bytes <= record.planned.peak_vram_bytes <= 1.05 * record.peak_bytes
    assert record.step_seconds is not None and 0 < record.step_seconds < record.seconds
    heading, _, *rows = manager("sim").timeline.table(1).splitlines()
    assert [match[1], match[2]] == re.split(r"\s\s+", rows[-1])[-3:-1]
    assert re.split(r"\s\s+", heading)[-3:] == ["peak", "planned", "seconds"]
    assert match[2] in run_node(VramReport).result[1]


def test_seconds_are_compared_for_measured_rates_alone(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "s a step;" in sample(load())
    make = planning.plan_stage

    def measured(
        name: str, forecast: Forecast, units: Sequence[ManagedModel], machine: planning.Machine, **more: Any
    ) -> StagePlan:
        rates = Rates(
            ASSUMED.pinned_bytes_per_second,
            ASSUMED.paged_bytes_per_second,
            ASSUMED.disk_bytes_per_second,
            ASSUMED.operations_per_second,
            "measured",
        )
        return make(name, forecast, units, replace(machine, rates=rates), **more)

    monkeypatch.setattr("ballast.pipelines.runner.plan_stage", measured)
    assert re.search(r"[\d.]+ m?s a step \(planned [\d.]+ [mu]?s\);", sample(load()))


def test_one_step_has_no_pace(sim: ModuleType) -> None:
    said = sample(load(), steps=1)
    assert "(planned " in said and "a step" not in said


def test_run_on_the_cpu_has_no_plan(sim: ModuleType) -> None:
    assert "planned" not in sample(load(device="cpu"))
    assert "planned" not in sample(load(), strategy="cpu")
