"""A LoRA file is opened once for its digest, once for its header, once for its weights, whoever asks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from adapters import lora_files
from ballast.pipelines.lora.file import LoraFile

Folders = Callable[[str], Path]
OPENED: list[str] = []
STATE = {"heard": False, "on": False}


def heard(event: str, args: tuple[Any, ...]) -> None:
    if STATE["on"] and event == "open" and isinstance(args[0], str | os.PathLike):
        OPENED.append(Path(args[0]).name)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that Python opens. What it cannot see, safetensors' own reader, is not to be used."""
    if not STATE["heard"]:
        sys.addaudithook(heard)  # which stays until the process ends
    monkeypatch.setattr("safetensors.safe_open", pytest.fail)
    OPENED.clear()
    STATE.update(heard=True, on=True)
    yield OPENED
    STATE["on"] = False


def test_the_header_is_read_once(tiny_folders: Folders, tmp_path: Path, opened: list[str]) -> None:
    folder = tiny_folders("flux")
    path = lora_files.write(
        tmp_path / "one.safetensors",
        lora_files.weights(lora_files.transformer_of(folder), 4),
        {"modelspec.architecture": "flux-1-dev/lora"},
    )
    pipe, *_ = tiny.stages("flux", folder, "cpu", cache_dir=tmp_path)
    opened.clear()
    pipe.set_loras([(path, 0.5)])
    assert opened.count(path.name) == 3, "digest, header, weights"
    assert LoraFile.open(path).about() == ("flux-1-dev/lora", "")
    for strength in (0.7, 0.0, 0.5):
        pipe.set_loras([(path, strength)])
    assert opened.count(path.name) == 3
    path.touch()  # another stamp: another file, until it is read
    pipe.set_loras([(path, 0.5)])
    assert opened.count(path.name) > 3


def test_both_experts_share_what_is_read(tmp_path: Path, opened: list[str]) -> None:
    pipe = tiny.FAMILIES["wan"].build()
    pipe.register_modules(transformer_2=type(pipe.transformer).from_config(pipe.transformer.config))
    pipe.register_to_config(boundary_ratio=0.9)
    pipe.save_pretrained(tmp_path / "two")
    path = lora_files.write(tmp_path / "two.safetensors", lora_files.weights(pipe.transformer, 4))
    ours, *_ = tiny.stages("wan", tmp_path / "two", "cpu", cache_dir=tmp_path)
    opened.clear()
    ours.set_loras([(path, {"transformer": 0.5, "transformer_2": 1.0})])
    assert opened.count(path.name) == 3
    assert set(ours._loras[0].adapters) == {"transformer", "transformer_2"}
