"""What callers do around a pipeline: other folders, numbers of NumPy, defaults of torch, and forks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import numpy as np
import pytest
import tiny
import torch
from ballast.memory.memory_manager import manager
from ballast.pipelines.stages.batch_runs import Item
from selection import few
from single_files import base_of, state_of, transformer_file

Folders = Callable[[str], Path]
SIZE: dict[str, Any] = {"width": 48, "height": 32, "steps": 1}


def test_paths_stay_what_they_were_when_opened(
    tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folders("sd3")
    base_of(folder, tmp_path / "model")
    transformer_file("sd3", folder, tmp_path / "model.safetensors")
    (tmp_path / "model" / "text_encoder" / "model.safetensors").rename(tmp_path / "clip.safetensors")
    (tmp_path / "other").mkdir()
    settings: dict[str, Any] = {"base": "model", "text_encoders": ["clip.safetensors"], "cache_dir": "cache"}
    monkeypatch.chdir(tmp_path)
    expected = None
    for away in (False, True):
        pipe = ballast.open_pipeline("model.safetensors", "cpu", **settings)
        if away:
            manager("cpu").free()
            monkeypatch.chdir(tmp_path / "other")
        latents = pipe.sample(pipe.encode("a", max_sequence_length=48), **SIZE)
        pipe.decode(latents)
        assert expected is None or torch.equal(latents, expected)
        expected = latents
    assert not list((tmp_path / "other").iterdir())


def test_numbers_of_numpy_are_numbers(tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), "sim", vram=np.int64(2**27), cache_dir=tmp_path)
    cond = pipe.encode("a", max_sequence_length=np.int64(48))
    expected = pipe.sample(cond, width=48, height=32, steps=2, guidance=3.5, seed=7)
    numbers: dict[str, Any] = {"width": np.int64(48), "height": np.int32(32), "steps": np.uint8(2)}
    made = pipe.sample(cond, **numbers, guidance=np.float32(3.5), seed=np.int64(7), batch=np.int64(1))
    assert torch.equal(made, expected)
    plan = pipe.plan(**numbers, guidance=np.float32(3.5), vram=np.float64(2**27), cond=cond)
    assert (
        plan.peak_vram_bytes
        == pipe.plan(width=48, height=32, steps=2, guidance=3.5, vram=2**27, cond=cond).peak_vram_bytes
    )
    with pytest.raises(ValueError, match=r"^width is 'tensor\(48\)'; it takes a whole number\.$"):
        pipe.sample(cond, width=torch.tensor(48))


def test_values_of_the_wrong_kind_are_told_in_one_line(tiny_folders: Folders, tmp_path: Path) -> None:
    pipe = ballast.open_pipeline(tiny_folders("sd3"), "cpu", cache_dir=tmp_path, loras=None)
    cond = pipe.encode("a", "b")
    for wrong in (None, b"a", [], ("a", None), 3):
        with pytest.raises(ValueError, match=r"^prompt is .*; it takes a text, or a list of them\.$"):
            pipe.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^negative_prompt is '\[\]'; it takes a text"):
        pipe.encode("a", [])
    (made,) = pipe.run_items([Item(b"a")])  # type: ignore[arg-type]
    assert str(made.error).startswith("prompt is ")
    assert torch.equal(pipe.encode(("a",), ("b",)).tensors["prompt_embeds"], cond.tensors["prompt_embeds"])
    for count, says in ((0, "at least 1"), (10.5, "a whole number")):
        with pytest.raises(ValueError, match=f"^max_sequence_length is .*; it takes {says}"):
            pipe.encode("a", max_sequence_length=count)
    for sigmas in ([], [1.0, "x"], 3.0, [[1.0, 0.5]], [1.0, float("nan")]):
        for ask in (pipe.sample, pipe.plan):
            with pytest.raises(ValueError, match=r"^sigmas is .*; it takes a list of numbers\.$"):
                ask(cond=cond, sigmas=sigmas, **SIZE)  # type: ignore[operator]
    with pytest.raises(ValueError, match="^on_step is '5'; it takes a function"):
        pipe.sample(cond, on_step=5, **SIZE)  # type: ignore[arg-type]


@pytest.fixture(params=few(["meta", "sim", "float64", "bfloat16"], "meta", "sim", "bfloat16"))
def default(request: pytest.FixtureRequest, sim: ModuleType) -> Iterator[str]:
    """A default device or type that the caller has set; set by calling it."""
    yield request.param
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def _set(name: str) -> None:
    if name in ("meta", "sim"):
        torch.set_default_device(name)
    elif name:
        torch.set_default_dtype(getattr(torch, name))


Made = tuple[torch.Tensor, torch.Tensor, int]


def _made(folder: Path, device: str, cache: Path) -> Made:
    """Latents, pictures and the planned peak."""
    manager(device).free()
    pipe = ballast.open_pipeline(folder, device, cache_dir=cache)
    cond = pipe.encode("a", max_sequence_length=48)
    latents = pipe.sample(cond, **SIZE)
    return latents, pipe.decode(latents), pipe.plan(**SIZE, cond=cond, vram=2**27).peak_vram_bytes


@pytest.fixture(scope="module")
def usual() -> dict[str, Made]:
    """What was made without any default, by the device."""
    return {}


@pytest.mark.parametrize("device", few(["cpu", "sim"], "sim"))
def test_defaults_of_the_caller_change_nothing(
    default: str, device: str, usual: dict[str, Made], tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    folder = tiny_folders("sd3")
    if device not in usual:
        usual[device] = _made(folder, device, tmp_path / "usual")
    _set(default)
    latents, pictures, peak = _made(folder, device, tmp_path / "other")
    with torch.device("cpu"):
        assert torch.equal(latents, usual[device][0]) and torch.equal(pictures, usual[device][1])
    assert peak == usual[device][2]
    expected = default if default in ("meta", "sim") else "cpu"
    assert torch.get_default_device().type == expected or torch.get_default_dtype() == getattr(torch, default)


@pytest.mark.parametrize("default", ["meta"], indirect=True)
def test_defaults_of_the_caller_in_runs_of_many(
    default: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """They change nothing, and are the caller's own whenever it has control."""
    pipe = ballast.open_pipeline(tiny_folders("sd3"), "sim", cache_dir=tmp_path)
    made: list[list[torch.Tensor]] = []
    for name in ("", default):
        pipe.cache.clear()
        _set(name)
        torch.set_default_dtype(torch.bfloat16 if name else torch.float32)
        mine = torch.get_default_device(), torch.get_default_dtype()
        pictures = []
        for image in pipe.run(["a", "b"], **SIZE):
            assert (torch.get_default_device(), torch.get_default_dtype()) == mine
            pictures.append(image)
        for found in pipe.run_items([Item("c", sampling=lambda: SIZE)]):
            assert (torch.get_default_device(), torch.get_default_dtype()) == mine and found.error is None
            pictures += [] if found.images is None else [found.images]
        made.append(pictures)
    with torch.device("cpu"):
        assert len(made[1]) == 3 and all(map(torch.equal, *made))


def _try(call: Callable[[], Any], said: Any) -> None:
    try:
        call()
        said.put("it ran")
    except BaseException as error:
        said.put(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_forked_children_are_told(device: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    folder, fork = tiny_folders("sd3"), multiprocessing.get_context("fork")
    pipe = ballast.open_pipeline(folder, device, cache_dir=tmp_path)
    cond = pipe.encode("a", max_sequence_length=48)
    latents = pipe.sample(cond, **SIZE)
    calls: list[Callable[[], Any]] = [
        lambda: pipe.sample(cond, **SIZE),
        lambda: pipe.sample(cond, **SIZE, strategy="cpu"),
        lambda: pipe.encode("another", max_sequence_length=48),
        lambda: pipe.decode(latents),
        lambda: pipe.plan(**SIZE, cond=cond, vram=2**27),
        lambda: ballast.open_pipeline(folder, device),
    ]
    for call in calls:
        said = fork.SimpleQueue()
        child = fork.Process(target=_try, args=(call, said))
        child.start()
        child.join(60)
        assert child.exitcode == 0, "it hangs or crashed"
        words = said.get()
        assert words.startswith("RuntimeError: this process was forked") and "'spawn'" in words and "\n" not in words
    assert torch.equal(pipe.sample(cond, **SIZE), latents)


@pytest.mark.parametrize("again", [False, True])
def test_an_encoder_that_is_not_chosen_is_named(again: bool, tiny_folders: Folders, tmp_path: Path) -> None:
    folder = tiny_folders("flux")
    base = base_of(folder, tmp_path / "base", "text_encoder", "text_encoder_2")
    path = transformer_file("flux", folder, tmp_path / "m.safetensors")
    (t5,) = (folder / "text_encoder_2").glob("*.safetensors")
    assert state_of(folder, "text_encoder_2")
    said = "has a file that is chosen already" if again else "is not chosen"
    with pytest.raises(ValueError, match=f"^text_encoder_2 {said}: FLUX.1 needs CLIP-L, such as clip_l\\.$"):
        ballast.open_pipeline(path, "cpu", base=base, text_encoders=[t5, t5] if again else [t5])
    assert tiny
