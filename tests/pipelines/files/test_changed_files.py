"""Files of a model that change under an open pipeline: the old weights, the new ones, or one clear line; never both."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory.weights import reader
from ballast.pipelines import Pipeline
from fault_points import ram_for_windows
from newbie_folders import official
from places import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from selection import few

Folders = Callable[[str], Path]
FAST = "auraflow"
CASES = [
    *((FAST, "in RAM", how) for how in ("other content", "removed")),
    *((FAST, "dropped", how) for how in ("other content", "other size", "removed")),
    *((name, "kept, from disk", how) for name in (FAST, "newbie") for how in ("other content", "removed")),
    ("newbie", "dropped", "other content"),
]
DEMO = ROOT / "demo" / "shapes"
SIZES: dict[str, dict[str, Any]] = {
    FAST: {"width": 48, "height": 32, "steps": 2, "guidance": 4.0},
    "newbie": {"width": 64, "height": 32, "steps": 2},
}


@pytest.fixture
def made(tiny_folders: Folders, tmp_path: Path) -> Callable[[str], Path]:
    """Copies models, for a test to change."""

    def make(name: str) -> Path:
        return (
            official(tmp_path / "newbie") if name == "newbie" else shutil.copytree(tiny_folders(name), tmp_path / name)
        )

    return make


def weights(folder: Path, part: str) -> Path:
    return next(iter(sorted((folder / part).glob("*.safetensors"))))


def change(path: Path, how: str) -> None:
    """As somebody does who downloads a newer file: a new one, in the place of the old."""
    if how == "removed":
        path.unlink()
        return
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: t * 1.25 if t.is_floating_point() else t for name, t in load_file(path).items()}
    if how == "other size":
        metadata = {"format": "pt", "note": "x" * 1000}
    before = path.stat()
    save_file(tensors, path.with_suffix(".new"), metadata=metadata)
    path.with_suffix(".new").replace(path)
    assert (path.stat().st_size == before.st_size) == (how == "other content")


def run(pipe: Pipeline, name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    pipe.cache.clear()
    cond = pipe.encode("a boat")
    latents = pipe.sample(cond, seed=seed, **SIZES[name])
    return {"cond": cond.tensors["prompt_embeds"], "latents": latents, "picture": pipe.decode(latents)}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in other)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For forecasts, which all can share; embeddings are forgotten before each run."""
    return tmp_path_factory.mktemp("cache")


def marked(case: tuple[str, str, str]) -> Any:
    """Each place once, and what is removed once: all else is of the soak."""
    soon = case[2] != "removed" if case[0] == FAST else case[1] == "kept, from disk" and case[2] == "removed"
    return case if soon else pytest.param(*case, marks=pytest.mark.soak)


@pytest.mark.parametrize("part", few(["text_encoder", "transformer", "vae"], "transformer"))
@pytest.mark.parametrize(("name", "where", "how"), map(marked, CASES))
def test_changed_weights_are_never_mixed(
    name: str, where: str, how: str, part: str, made: Callable[[str], Path], cache: Path, sim: ModuleType
) -> None:
    folder = made(name)
    opening = {"keep": True, "ram": ram_for_windows(folder)} if where == "kept, from disk" else {}
    pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache, **opening)
    old = run(pipe, name)
    units = [*pipe.encoders, *pipe.denoisers, pipe.decoder]
    for unit in units if where == "dropped" else ():
        unit.drop()
    change(weights(folder, part), how)
    said = ""
    try:
        assert is_same(run(pipe, name), old)
    except (ValueError, OSError) as error:
        said = str(error)
    if part == "text_encoder" or where != "in RAM":
        assert "\n" not in said
        path = weights(folder, part) if how != "removed" else folder / part
        assert str(path) in said or f"files in {folder} were changed" in said
        assert "Open the pipeline again" in said or how == "removed"
    else:
        assert said == "", "the weights in RAM are the old ones, all of them"
    assert not any(unit.leases for unit in units)
    pipe.manager.free()
    assert sim.stats().allocated_bytes == 0
    if how != "removed":
        again = run(ballast.open_pipeline(folder, device="sim", cache_dir=cache), name)
        changed = {"text_encoder": "cond", "transformer": "latents", "vae": "picture"}[part]
        assert not torch.equal(again[changed], old[changed]), "opened again, it is of the new weights"


def test_file_that_is_replaced_between_two_steps_from_disk(tmp_path: Path, sim: ModuleType) -> None:
    """Some blocks are there by then, of the old file; those of the new one are no part of that model."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    pipe = ballast.open_pipeline(folder, device="sim", ram=ram_for_windows(folder))
    cond = pipe.encode("a red circle on a blue background, left")
    pipe.runner = pipe.runner.set(
        vram_bytes=pipe.plan(cond=cond, steps=4, vram=1, strategy="streamed").sampling.peak_vram_bytes
    )
    with pytest.raises(
        ValueError, match="was changed since the pipeline was opened. Open the pipeline again"
    ) as caught:
        pipe.sample(
            cond,
            strategy="streamed",
            steps=4,
            on_step=lambda step, steps, latents: change(weights(folder, "transformer"), "other content"),
        )
    assert "\n" not in str(caught.value)
    del caught
    assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize("name", [FAST, "newbie"])
def test_embedding_of_files_that_change_while_it_is_made_is_not_kept(
    name: str, made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = made(name), tmp_path / "cache"
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=cache)
    words = next(path for path in sorted(folder.rglob("tokenizer_config.json")))
    read = reader.fill_batch

    def changing(*batch: Any) -> None:
        read(*batch)
        words.write_text(json.dumps(json.loads(words.read_text("utf-8")) | {"note": "new"}), "utf-8")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "fill_batch", changing)
        with pytest.raises(ValueError, match="were changed. Open the pipeline again"):
            pipe.encode("a boat")
    assert not list(cache.glob("*.safetensors"))
    with pytest.raises(ValueError, match="were changed. Open the pipeline again"):
        pipe.encode("another boat")
    assert ballast.open_pipeline(folder, device="cpu", cache_dir=cache).encode("a boat").tensors


@pytest.mark.parametrize("name", [FAST, "newbie"])
def test_changed_words_under_an_open_pipeline(name: str, made: Callable[[str], Path]) -> None:
    folder = made(name)
    pipe = ballast.open_pipeline(folder, device="cpu")
    pipe.encode("a boat")
    words = next(path for path in sorted(folder.rglob("tokenizer_config.json")))
    words.write_text(json.dumps(json.loads(words.read_text("utf-8")) | {"padding_side": "left"}), "utf-8")
    with pytest.raises(ValueError, match="were changed. Open the pipeline again"):
        pipe.encode("a boat")


def test_file_that_is_only_touched_by_others_is_the_same(made: Callable[[str], Path], sim: ModuleType) -> None:
    """A backup, or a program that links equal files: neither content nor time of writing changes."""
    folder = made(FAST)
    pipe = ballast.open_pipeline(folder, device="sim")
    old = run(pipe, FAST)
    for unit in [*pipe.encoders, *pipe.denoisers, pipe.decoder]:
        unit.drop()
    for path in folder.rglob("*.safetensors"):
        os.link(path, path.with_suffix(".linked"))
        path.chmod(0o444)
    assert is_same(run(pipe, FAST), old)
