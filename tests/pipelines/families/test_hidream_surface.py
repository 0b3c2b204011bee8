"""HiDream-I1 as people meet it: the loader node, the command line, the help page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import ballast.commands.main
import folder_paths
import pytest
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.sample import Sampler
from ballast.pipelines.models.hidream.variants import VARIANTS
from hidream_folders import published
from host import InputError, page, run_node
from places import ROOT

FOLDER, LLAMA = "HiDream-I1-Fast", "Meta-Llama-3.1-8B-Instruct"
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def downloaded(tiny_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return published(tiny_folders("hidream"), tmp_path_factory.mktemp("hidream"), "fast")


@pytest.fixture
def models(downloaded: tuple[Path, Path]) -> Iterator[Path]:
    """ComfyUI's models folder with the two downloads where the help page says."""
    roots = [Path(folder_paths.get_folder_paths(kind)[0]) for kind in ("diffusers", "text_encoders")]
    for root, source, name in zip(roots, downloaded, (FOLDER, LLAMA), strict=True):
        shutil.copytree(source, root / name)
    yield roots[1] / LLAMA
    for root, name in zip(roots, (FOLDER, LLAMA), strict=True):
        shutil.rmtree(root / name, ignore_errors=True)


def load(**more: Any) -> Any:
    return run_node(LoadPipeline, pipeline=FOLDER, device="sim", **more).result[0]


def test_loader_offers_the_llamas_there_are(models: Path) -> None:
    bert = models.parent / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (bert.parent / "broken").mkdir()
    (bert.parent / "broken" / "config.json").write_text("{", encoding="utf-8")
    options = {slot.id: getattr(slot, "options", None) for slot in LoadPipeline.define_schema().inputs}
    assert options["llama"] == ["auto", LLAMA]
    assert options["variant"] == ["auto", *VARIANTS, "768p", "384p", "image"]
    for name in ("bert", "broken"):
        shutil.rmtree(bert.parent / name)


@pytest.mark.long
def test_graph_runs_with_the_variants_own_numbers(models: Path, sim: ModuleType) -> None:
    reference = load(llama=LLAMA)
    cond = run_node(TextEncode, pipeline=reference, prompt="a red boat", negative_prompt="").result[0]
    assert sim.stats().allocated_bytes == 0
    given = {"pipeline": reference, "conditioning": cond, "width": 48, "height": 32}
    with page() as shown:
        latent = run_node(Sampler, **given).result[0]
        reported = [message for message in shown.progress if message]
    assert latent["samples"].shape == (1, 4, 4, 6)
    assert reported[-1][:2] == (16, 16)
    sim.enable(total="4GB", tflops=1.0)
    text = run_node(VramPlan, pipeline=reference, width=48, height=32, vram_gb="64MB").result[1]
    assert "48 x 32" in text and "for 16." in text
    other = load(llama=LLAMA, variant="dev")
    assert "for 28." in run_node(VramPlan, pipeline=other, width=48, height=32, vram_gb="64MB").result[1]
    assert other.open() is not reference.open()
    reference.open().manager.free()


def test_loader_asks_for_llama(models: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Download meta-llama/Meta-Llama-3\.1-8B-Instruct .* as `llama`\."):
        load()
    with pytest.raises((ValueError, InputError), match="llama"):
        load(llama="gone")


def test_changed_llama_is_another_pipeline(models: Path) -> None:
    before = LoadPipeline.fingerprint_inputs(pipeline=FOLDER, llama=LLAMA)
    assert before == LoadPipeline.fingerprint_inputs(pipeline=FOLDER, llama=LLAMA)
    one = load(llama=LLAMA)
    (models / "tokenizer_config.json").write_text((models / "tokenizer_config.json").read_text("utf-8") + " ")
    assert LoadPipeline.fingerprint_inputs(pipeline=FOLDER, llama=LLAMA) != before
    assert load(llama=LLAMA) != one


def test_command_line(downloaded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, llama = map(str, downloaded)
    size = ["--width", "48", "--height", "32", "--llama", llama]
    assert ballast.commands.main.main(["plan", folder, *size, "--vram", "64MB"]) == 0
    assert " for 16." in capsys.readouterr().out
    assert ballast.commands.main.main(["plan", folder, *size, "--variant", "full", "--vram", "64MB"]) == 0
    assert " for 50." in capsys.readouterr().out
    out = tmp_path / "boat.png"
    run = ["generate", "--model", folder, *size, "--prompt", "a boat", "--device", "cpu", "--steps", "2"]
    assert ballast.commands.main.main([*run, "--out", str(out)]) == 0
    assert out.is_file()
    capsys.readouterr()
    assert ballast.commands.main.main(["plan", folder, "--vram", "64MB"]) == 1
    assert "needs Llama 3.1 8B Instruct" in capsys.readouterr().err


def test_help_page_has_every_input_and_the_variants() -> None:
    text = (ROOT / "web" / "docs" / "BallastLoadPipeline.md").read_text("utf-8")
    for slot in LoadPipeline.define_schema().inputs:
        assert re.search(rf"^\| {slot.id} \|", text, re.MULTILINE), slot.id
    for variant in VARIANTS.values():
        guidance = f"{variant.guidance:g}" if variant.guidance > 1 else "none"
        assert f"| {variant.name.title()} | {variant.steps} | {guidance} | {variant.shift:g} |" in text
