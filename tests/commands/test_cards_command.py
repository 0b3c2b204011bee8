"""`ballast generate --cards`: the picture of one card, written once; and what becomes of all when one process ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ballast.commands import cards
from ballast.memory.simulated import supported
from PIL import Image
from places import ROOT
from selection import few

Folders = Callable[[str], Path]
Start = Callable[..., "subprocess.Popen[bytes]"]
# A shell lets what it runs in the background ignore interrupts, which the tests may be.
_HEEDING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
together = pytest.mark.skipif(supported() is not None or os.name == "nt", reason="needs the simulated GPU and signals")


@pytest.fixture
def start(tiny_folders: Folders, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "ballast").symlink_to(ROOT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"}
    begun: list[subprocess.Popen[bytes]] = []

    def begin(name: str, out: str, *more: str) -> subprocess.Popen[bytes]:
        given = ["--model", str(tiny_folders(name)), "--prompt", "a boat", "--device", "sim", "--out", out]
        command = [sys.executable, "-m", "ballast.commands.main", "generate", *given, *more]
        said = (tmp_path / f"{out}.err").open("wb")
        how: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": -1, "stderr": said}
        begun.append(subprocess.Popen([sys.executable, "-c", _HEEDING, *command], **how, start_new_session=True))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()


def until(path: Path, pattern: bytes, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 300
    while not re.search(pattern, path.read_bytes()):
        assert process.poll() is None and time.monotonic() < ends, path.read_text()[-2000:]
        time.sleep(0.1)


def told_by(path: Path) -> list[str]:
    """The command's own lines."""
    return [line for line in path.read_text().replace("\r", "\n").split("\n") if line.startswith("ballast:")]


def opened(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def all_gone(children: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(children, timeout=600)
    return bool(children) and not alive


@together
@pytest.mark.soak  # `test_cards` compares what two processes make
def test_two_processes_write_the_picture_of_one(start: Start, tmp_path: Path) -> None:
    small = ("--width", "48", "--height", "48", "--steps", "2", "--batch", "2")
    for out, more in (("one.png", ()), ("two.png", ("--cards", "2", "--ram", "1GB"))):
        said, _ = start("flux", out, *small, *more).communicate(timeout=600)
        assert said.decode().count("\nwrote ") == 1, (tmp_path / f"{out}.err").read_text()[-2000:]
    one, two = ([opened(path) for path in sorted(tmp_path.glob(f"{name}*.png"))] for name in ("one", "two"))
    assert len(one) == len(two) == 2 and not np.array_equal(one[0], one[1])
    for alone, shared in zip(one, two, strict=True):
        assert np.abs(alone - shared).max() <= 1, "of 255, where rounding ends so"


@together
@pytest.mark.long
@pytest.mark.parametrize("how", few(["interrupted", "killed"], "killed"))
def test_when_one_ends_all_do(how: str, start: Start, tmp_path: Path) -> None:
    """In one line, with no process and no file left."""
    process = start("flux", "out.png", "--width", "48", "--height", "48", "--steps", "2000", "--cards", "2")
    until(tmp_path / "out.png.err", rb" [1-9]\d*/2000", process)  # any step: the bar leaves out quick ones
    children = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(children) == 2
    if how == "interrupted":
        os.killpg(process.pid, signal.SIGINT)
    else:
        children[1].kill()
    process.communicate(timeout=600)
    assert all_gone(children)
    told = told_by(tmp_path / "out.png.err")
    if how == "interrupted":
        assert (process.returncode, told) == (130, ["ballast: stopped"])
    else:
        words = "ballast: one of 2 processes was ended: process 1 terminated with signal SIGKILL"
        assert (process.returncode, told) == (1, [words])
    assert not [*tmp_path.glob("*.png")]


@together
@pytest.mark.soak
def test_what_is_refused_is_told_once(start: Start, tmp_path: Path) -> None:
    process = start("sd3", "out.png", "--cards", "2")
    process.communicate(timeout=600)
    (told,) = told_by(tmp_path / "out.png.err")
    assert process.returncode == 1
    assert told.startswith("ballast: transformer, a SD3Transformer2DModel, runs on one card only; ")


@pytest.mark.parametrize(
    ("count", "device", "words"),
    [(0, "auto", "takes at least 1"), (2, "cuda:1", "Name no card"), (2, "mps", "goes with cuda, cpu and sim")],
)
def test_cards_that_cannot_be(count: int, device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cards.check(count, device)


def test_more_cards_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cards.check(3, "auto")
    with pytest.raises(ValueError, match="wants 4 cards of this machine, which has 3"):
        cards.check(4, "auto")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of torchrun on two machines
    cards.check(4, "cuda")
