"""VRAM Report: prompts apart, stages that did not end well, the budget in force, ours apart from what others hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.model_management
import folder_paths
import numpy as np
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import ON_CPU
from ballast.nodes.load import LoadPipeline
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from host import page, run_node
from places import clear

WIDTH, HEIGHT = tiny.FAMILIES["lumina2"].size


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[None]:
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    root.mkdir(parents=True, exist_ok=True)
    for name in ("lumina2", "wan"):
        (root / name).symlink_to(tiny_folders(name), target_is_directory=True)
    yield
    clear(root)


def load(vram_gb: float = 0.0, **more: Any) -> Any:
    return run_node(LoadPipeline, pipeline="lumina2", device="sim", vram_gb=vram_gb, **more).result[0]


def encode(reference: Any, prompt_id: str = "one", prompt: str = "a red boat") -> Any:
    given = {"pipeline": reference, "prompt": prompt, "negative_prompt": "grey"}
    return run_node(TextEncode, prompt_id=prompt_id, **given).result[0]


def sample(reference: Any, conditioning: Any, prompt_id: str = "one", **more: Any) -> str:
    """What the node says at its end."""
    given = {"width": WIDTH, "height": HEIGHT, "steps": 2, **more}
    with page() as shown:
        run_node(Sampler, prompt_id=prompt_id, pipeline=reference, conditioning=conditioning, **given)
    return shown.texts[-1][1]


def report(prompt_id: str = "one", **more: Any) -> tuple[np.ndarray, list[str], str]:
    """The picture, the rows of stages, and what the node says."""
    with page() as shown:
        picture, text = run_node(VramReport, prompt_id=prompt_id, **more).result
    rows = [line for line in text.split("\n\n")[-1].splitlines()[2:] if not line.startswith("  ")]
    return (picture[0].numpy() * 255).round().astype(np.uint8), rows, shown.texts[-1][1]


def reds(picture: np.ndarray) -> set[int]:
    """The rows of a picture in which a budget is drawn, of the part with the axes."""
    red, green, blue = np.moveaxis(picture[60:-60].astype(int), 2, 0)
    return set(np.flatnonzero(((red - green > 40) & (abs(green - blue) < 25)).sum(1) > 20).tolist())


def test_a_report_is_of_its_own_prompt(sim: ModuleType) -> None:
    reference = load()
    sample(reference, encode(reference, "one"), "one")
    sample(reference, encode(reference, "two", "another prompt"), "two", seed=1)
    one, rows, said = report("two")
    assert [row.split()[0] for row in rows] == ["encode", "sample"]
    assert said.count("sample: ") == 1
    both, rows, said = report("two", prompts=2)
    starts = ["1 before  encode", "1 before  sample", "this      encode", "this      sample"]
    assert [row[: len(start)] for row, start in zip(rows, starts, strict=True)] == starts
    assert said.count("sample: ") == 2
    assert not np.array_equal(one, both)
    _, rows, said = report("three")
    assert [row.split()[0] for row in rows] == ["encode", "sample"]
    assert "Nothing of Ballast ran in this prompt" in said


def test_a_prompt_of_the_host_on_the_cpu_has_no_stages(sim: ModuleType) -> None:
    """Where the graph has no node of ours, those of another prompt do not stand for it."""
    conditioning = encode(load())
    sample(load(), conditioning)
    nodes = {"1": {"class_type": "KSampler", "inputs": {}}, "2": {"class_type": "BallastVRAMReport", "inputs": {}}}
    picture, _, said = report("two", hidden={"prompt": nodes})
    assert said == run_node(VramReport, prompt_id="two", hidden={"prompt": nodes}).result[1] == ON_CPU
    assert (picture == 255).all()
    ours = {"3": {"class_type": "BallastSampler", "inputs": {}}}
    assert report("two", hidden={"prompt": nodes | ours})[1], "those of the prompt before, as all came from the cache"
    on_cpu = run_node(LoadPipeline, pipeline="lumina2", device="cpu").result[0]
    sample(on_cpu, encode(on_cpu, "three"), "three")
    _, rows, said = report("three", hidden={"prompt": nodes | ours})
    assert said.startswith(f"{ON_CPU}\n") and rows[-1].startswith("sample ")


def test_every_line_of_the_node_is_a_sentence(sim: ModuleType) -> None:
    """Nodes 2.0 draws them as one paragraph."""
    reference = load()
    sample(reference, encode(reference))
    assert all(line.endswith(".") for line in report()[2].splitlines())


def test_stages_that_did_not_end_well_say_so(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load()
    conditioning = encode(reference, prompt="cut short")
    pipe = reference.open()

    def stop(*_: Any, **__: Any) -> None:
        raise comfy.model_management.InterruptProcessingException

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel that fails")

    for cause, caught in ((stop, comfy.model_management.InterruptProcessingException), (fail, RuntimeError)):
        with pytest.raises(caught), monkeypatch.context() as patched:
            patched.setattr(pipe.denoisers[0].module, "forward", cause)
            sample(reference, conditioning)
    sample(reference, conditioning)
    _, rows, said = report()
    assert [row.split("  ")[0] for row in rows] == ["encode", "sample, interrupted", "sample, failed", "sample"]
    assert "sample: interrupted; " in said and "sample: failed; " in said


def test_the_budget_in_force_is_that_of_the_stage(sim: ModuleType) -> None:
    conditioning = encode(load(), prompt="two budgets")
    manager("sim").timeline.clear()
    reference = load(0.001)
    sample(reference, conditioning)
    wide = load(0.0015)
    sample(wide, conditioning)
    picture, rows, _ = report()
    assert ["1.02 MB" in row for row in rows] == [True, False] and "1.54 MB" in rows[1]
    first, last = reds(picture[:, :450]), reds(picture[:, 700:])
    assert first and last and min(last) < min(first), "each stage has its own line"


def test_what_others_hold_stands_apart(sim: ModuleType) -> None:
    sim.enable(total="64MB")
    reference = load(keep_loaded=False)
    conditioning = encode(reference)
    sample(reference, conditioning)
    alone = manager("sim").timeline.stages[-1]
    assert not alone.has_others
    theirs = torch.empty(30 * 2**20, dtype=torch.uint8, device="sim")
    said = sample(reference, conditioning)
    beside = manager("sim").timeline.stages[-1]
    del theirs
    assert beside.planned is not None
    assert beside.own_peak_bytes == alone.own_peak_bytes == alone.peak_bytes <= beside.planned.peak_vram_bytes
    assert beside.other_bytes == 30 * 2**20 and beside.peak_bytes == alone.peak_bytes + beside.other_bytes
    assert "30.0 MB of other models beside it" in said
    assert "others" in run_node(VramReport).result[1]


def test_another_pipeline_that_stayed_is_no_part_of_the_plan(sim: ModuleType) -> None:
    reference = load()
    conditioning = encode(reference)
    sample(reference, conditioning)
    alone = manager("sim").timeline.stages[-1]
    other = run_node(LoadPipeline, pipeline="wan", device="sim").result[0].open()
    with manager("sim").use(other.denoisers[0]):
        pass
    held = other.denoisers[0].resident_bytes
    assert held > 0
    sample(reference, conditioning, strategy="resident")
    beside = manager("sim").timeline.stages[-1]
    if not other.denoisers[0].resident_bytes:
        pytest.skip("it had to leave")
    assert beside.own_peak_bytes == alone.own_peak_bytes
    assert beside.other_bytes == held
