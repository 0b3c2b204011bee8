"""Runs of many prompts: each model comes once, each picture is the one made alone, and a failure stops no other."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.pipelines.encoding.prompts import Text
from ballast.pipelines.stages import batch_runs as runs
from ballast.pipelines.stages import prompt_batches as texts
from ballast.pipelines.stages.batch_runs import Item

Folders = Callable[[str], Path]
NEGATIVE = "blurry, grey"


def opened(name: str, folder: Path, cache: Path) -> tuple[Any, dict[str, Any]]:
    family = tiny.FAMILIES[name]
    run = {"width": family.size[0], "height": family.size[1], "frames": family.frames, "steps": 2}
    run |= {"guidance": family.guidance, **family.call_kwargs}
    return ballast.open_pipeline(folder, device="sim", cache_dir=cache), run


def alone(pipe: Any, prompt: str, seed: int, run: dict[str, Any]) -> torch.Tensor:
    return pipe.decode(pipe.sample(pipe.encode(prompt, NEGATIVE), seed=seed, **run))


def places(timeline: Any) -> Counter[str]:
    """How often each model came to the device."""
    return Counter(event.unit for event in timeline.events if event.kind == "place")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("sd3", 30, marks=pytest.mark.soak),
        *(pytest.param(n, 4, marks=pytest.mark.soak) for n in tiny.FAMILIES),
    ],
)
def test_each_model_comes_once(name: str, count: int, tiny_folders: Folders, sim: ModuleType, tmp_path: Path) -> None:
    """30 prompts through three encoders; bitwise the pictures that are made one by one, and no higher peak."""
    pipe, run = opened(name, tiny_folders(name), tmp_path / "one")
    prompts = [f"boat {number}, " + "red " * (number % 7) for number in range(count)]
    some = {number: alone(pipe, prompts[number], number, run) for number in (0, count // 2, count - 1)}
    most = sim.stats().peak_bytes
    pipe, _ = opened(name, tiny_folders(name), tmp_path / "many")
    timeline = manager("sim").timeline
    timeline.clear()
    sim.reset_stats()
    made = list(pipe.run(prompts, seeds=range(count), negative_prompt=NEGATIVE, **run))
    assert len(made) == count
    for number, picture in some.items():
        assert torch.equal(made[number], picture)
    units = (*pipe.encoders, *pipe.denoisers, pipe.decoder)
    called = {event.unit for event in timeline.events if event.kind == "ran"}
    assert places(timeline) == {unit.name: 1 for unit in units if unit.name in called}
    assert sim.stats().peak_bytes <= 1.02 * most
    assert sim.stats().allocated_bytes == 0


def test_chunks_that_ram_holds(
    tiny_folders: Folders, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the embeddings of two or three, stages come more often, and the pictures are the same."""
    pipe, run = opened("sd3", tiny_folders("sd3"), tmp_path / "one")
    prompts = [f"boat {number}" for number in range(4)]
    whole = list(pipe.run(prompts, negative_prompt=NEGATIVE, **run))
    (cond,) = texts.PromptBatch(pipe.model, pipe.runner).encode([Text(prompts[0], NEGATIVE)], 0)
    pipe, _ = opened("sd3", tiny_folders("sd3"), tmp_path / "two")
    monkeypatch.setattr(runs, "_MOST_BYTES", 5 * cond.nbytes)
    manager("sim").timeline.clear()
    parts = list(pipe.run(prompts, negative_prompt=NEGATIVE, **run))
    assert all(map(torch.equal, whole, parts))
    assert 2 <= places(manager("sim").timeline)["transformer"] <= 3


def test_one_that_fails_stops_no_other(tiny_folders: Folders, sim: ModuleType, tmp_path: Path) -> None:
    pipe, run = opened("flux", tiny_folders("flux"), tmp_path)
    broken = RuntimeError("as asked")

    def fail(*_: Any) -> None:
        raise broken

    items = [
        Item("a boat", sampling=lambda: run),
        Item("a boat", encoding=lambda: {"no_such": 1}, sampling=lambda: run),
        Item("two boats", sampling=lambda: run | {"steps": 0}),
        Item("two boats", sampling=lambda: run | {"on_step": fail}),
        Item("two boats", sampling=lambda: run | {"seed": 1}),
    ]
    found = list(pipe.run_items(items))
    made = {each.number: each.images for each in found if each.images is not None}
    wrong = {each.number: (each.stage, str(each.error)) for each in found if each.error is not None}
    assert set(made) == {0, 4} and set(wrong) == {1, 2, 3}
    assert wrong[1][0] == "encode" and "no_such" in wrong[1][1]
    assert wrong[2] == ("sample", "steps is 0; it takes at least 1.") and wrong[3] == ("sample", "as asked")
    expected = pipe.decode(pipe.sample(pipe.encode("two boats"), seed=1, **run))
    assert torch.equal(made[4], expected)
    assert sim.stats().allocated_bytes == 0
    with pytest.raises(ValueError, match="steps is 0"):
        list(pipe.run(["a boat"], **run | {"steps": 0}))
    with pytest.raises(ValueError, match="there are 2 prompts and 1 seeds"):
        next(pipe.run(["a", "b"], seeds=[1], **run))


def test_encoders_that_follow_from_each_other_run_prompt_by_prompt(
    tiny_folders: Folders, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, run = opened("sd3", tiny_folders("sd3"), tmp_path / "one")
    prompts = ["a boat", "two red boats"]
    expected = list(pipe.run(prompts, negative_prompt=NEGATIVE, **run))
    pipe, _ = opened("sd3", tiny_folders("sd3"), tmp_path / "two")
    monkeypatch.setattr(texts, "_same", lambda *_: False)
    manager("sim").timeline.clear()
    made = list(pipe.run(prompts, negative_prompt=NEGATIVE, **run))
    assert all(map(torch.equal, expected, made))
    assert places(manager("sim").timeline)["text_encoder"] > 1


def test_a_run_that_is_left_leaves_nothing(tiny_folders: Folders, sim: ModuleType, tmp_path: Path) -> None:
    pipe, run = opened("sd3", tiny_folders("sd3"), tmp_path)
    making = pipe.run(["a boat", "two boats", "three"], **run)
    assert next(making).shape[0] == 1
    making.close()
    assert sim.stats().allocated_bytes == 0

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(pipe.run(["a boat"], **run, on_step=stop))
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_ram_stays_level(tiny_folders: Folders, sim: ModuleType, tmp_path: Path) -> None:
    """As many tensors live after nine prompts as after three."""
    pipe, run = opened("sd3", tiny_folders("sd3"), tmp_path)
    list(pipe.run(["first"], **run))
    counts = []
    for number in range(3):
        for _ in pipe.run([f"boat {number} {i}" for i in range(3)], **run | {"steps": 1}):
            pass
        pipe.cache._ram.clear()  # which has a limit of its own
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[2] <= counts[0] + 2, counts
