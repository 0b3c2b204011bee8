"""The caches on disk: processes that are killed or meet in one folder, a full disk, a folder that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import files
from ballast.memory.planning.forecast import Forecast
from ballast.pipelines.encoding.conditioning import Conditioning
from ballast.pipelines.encoding.embedding_cache import EmbeddingCache
from ballast.pipelines.planning import forecast_cache
from places import SUPPORT
from selection import few

Folders = Callable[[str], Path]
KEY = "0" * 64
FAMILY = "auraflow"


def processes(how: str, folder: Path) -> dict[str, Any]:
    script = SUPPORT / "cache_processes.py"
    ran = subprocess.run([sys.executable, str(script), how, str(folder)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def a_conditioning() -> Conditioning:
    return Conditioning({"prompt_embeds": torch.arange(3000.0)[None]}, {"prompt": "a boat"})


def left_in(folder: Path) -> set[str]:
    return {path.suffix for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_writers_leave_no_half_entry(tmp_path: Path) -> None:
    found = processes("killed", tmp_path)
    assert found["said"] == []
    assert found["left"] > 0, "some were killed in the midst of writing"
    assert found["parts"] == 0, "what they left is removed, if not at once"
    assert found["entries"] >= 24


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_share_a_folder(tmp_path: Path) -> None:
    found = processes("together", tmp_path)
    assert found["codes"] == [0, 0, 0, 0]
    assert found["said"] == []
    assert found["parts"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the limits of Unix")
def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    found = processes("full", tmp_path)
    assert found["said"] == ["Ballast: the embedding cache"]
    assert found["full"]["parts"] == 0
    assert found["after"] == []


WRITING = [
    (os, "replace"),
    (os, "close"),
    (Path, "touch"),
    (Path, "mkdir"),
    (Path, "write_bytes"),
    (Path, "glob"),
    (Path, "unlink"),
    (os, "utime"),
]


@pytest.mark.parametrize("code", few([errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO], errno.ENOSPC))
def test_disk_that_fails_at_any_call_costs_no_run(
    code: int, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = ballast.open_pipeline(tiny_folders(FAMILY), device="cpu", cache_dir=tmp_path / "expected")
    expected = pipe.encode("a boat").tensors["prompt_embeds"]
    for owner, name in WRITING:
        folder = tmp_path / f"{owner.__name__}.{name}"
        pipe.model.claims.cache = EmbeddingCache(folder)
        for at in range(1, 4):
            calls, function = [], getattr(owner, name)

            def failing(*args: Any, at: int = at, function: Any = function, calls: list = calls, **kw: Any) -> Any:
                if str(folder) in str(args[0]) or name == "close":  # noqa: B023
                    calls.append(1)
                    if len(calls) == at:
                        raise OSError(code, os.strerror(code))
                return function(*args, **kw)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                for _ in range(2):
                    pipe.cache._ram.clear()
                    assert torch.equal(pipe.encode("a boat").tensors["prompt_embeds"], expected)
                    forecast_cache.put(folder / "forecasts", KEY, {"sample": Forecast(at, {})})
            assert left_in(folder) <= {".safetensors", ".json"}, (owner, name, at)
        pipe.cache._ram.clear()
        assert torch.equal(pipe.encode("a boat").tensors["prompt_embeds"], expected)
        assert left_in(folder) == {".safetensors", ".json"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupt_while_writing_comes_out_and_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Conditioning.save

    def interrupted(self: Conditioning, path: Path) -> None:
        save(self, path)
        path.write_bytes(path.read_bytes()[:1000])
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Conditioning, "save", interrupted)
        with pytest.raises(error):
            EmbeddingCache(tmp_path).put(KEY, a_conditioning())
    assert left_in(tmp_path) == set()
    assert EmbeddingCache(tmp_path).get(KEY) is None


def test_folder_that_may_only_be_read_serves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EmbeddingCache(tmp_path).put(KEY, a_conditioning())

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    for owner, name in WRITING[:-2]:
        if name not in ("glob", "close"):
            monkeypatch.setattr(owner, name, refused)
    monkeypatch.setattr(os, "utime", refused)
    cache = EmbeddingCache(tmp_path)
    found = cache.get(KEY)
    assert found is not None
    assert torch.equal(found.tensors["prompt_embeds"], a_conditioning().tensors["prompt_embeds"])
    cache.put("1" * 64, a_conditioning())
    assert cache.get("1" * 64) is not None, "from RAM"


def test_file_in_the_place_of_a_folder(tiny_folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    pipe = ballast.open_pipeline(tiny_folders(FAMILY), device="cpu", cache_dir=tmp_path / "file")
    cond = pipe.encode("a boat")
    pipe.cache._ram.clear()
    assert torch.equal(pipe.encode("a boat").tensors["prompt_embeds"], cond.tensors["prompt_embeds"])
    assert pipe.plan(width=48, height=32, steps=1, cond=cond, vram="1GB").stages
    pipe.cache.clear()
    assert (tmp_path / "file").read_text() == "not a folder"


def test_only_own_old_files_are_removed(tmp_path: Path) -> None:
    """Whoever names a folder that has other things in it keeps them, whatever their age and size."""
    theirs = [tmp_path / name for name in ("film.mkv.part", "model.safetensors", f"{KEY}.bak", "x.ballast")]
    ours = [tmp_path / "00000000old.ballast-part", tmp_path / "00000000new.ballast-part"]
    for path in (*theirs, *ours):
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    os.utime(ours[1], (time.time() - files._LEFT_OVER_SECONDS + 60,) * 2)
    cache = EmbeddingCache(tmp_path, disk_bytes=2 * 12_500)
    for number in range(4):
        cache.put(f"{number:064x}", a_conditioning())
    assert all(path.exists() for path in theirs)
    assert [path.exists() for path in ours] == [False, True]
    assert len([path for path in tmp_path.glob("*.safetensors") if len(path.stem) == 64]) == 2
    cache.clear()
    assert all(path.exists() for path in theirs)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
