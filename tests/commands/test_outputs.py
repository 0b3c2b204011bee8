"""Results that cannot be written: told before the work where that is known, else the latents are kept."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ballast.commands import images
from ballast.commands.main import main
from ballast.commands.results import Result
from ballast.commands.workers import Worker
from ballast.memory import files
from ballast.pipelines.decoding.rescue import DecodeError, load_latents, rescued
from ballast.pipelines.pipeline import Pipeline
from PIL import Image
from places import ROOT
from selection import few

Folders = Callable[[str], Path]

DEMO = ROOT / "demo" / "shapes"


def generate(model: Path, out: Path, *more: str) -> int:
    given = ["--model", str(model), "--prompt", "a boat", "--device", "cpu", "--steps", "2", "--out", str(out)]
    return main(["generate", *given, *more])


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of `sample`."""
    counted, sample = [], Pipeline.sample

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "sample", count)
    return counted


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("wan", "film.mp4", "writing a film needs PyAV"),
        ("wan", "film.MP4", "writing a film needs PyAV"),
        ("sd3", "picture.mp4", "makes pictures. Use a name that ends in .png, .jpg, .webp."),
        ("sd3", "picture.GIF", "makes pictures. Use a name that ends in .png, .jpg, .webp."),
        ("sd3", "picture", "Use a name that ends in"),
        ("sd3", "file/picture.png", "file takes no results (File exists). Name another folder."),
        ("sd3", "file/in/picture.png", "in takes no results (Not a directory). Name another folder."),
        ("sd3", "folder.png", "folder.png is a folder. Name a file."),
        ("sd3", f"{'x' * 240}.png", "is too long a name for a file."),
        ("sd3", "protected.png", "protected.png is write-protected. Name another file."),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(
    family: str,
    name: str,
    words: str,
    tiny_folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sampled: list[int],
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "protected.png").touch(0o444)
    before = sorted(tmp_path.iterdir())
    assert generate(tiny_folders(family), tmp_path / name, "--width", "48", "--height", "32") == 1
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1] and said.splitlines()[-1].startswith("ballast: ") and "read " not in said
    assert not sampled and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("timeline", "words"),
    [("t.xyz", "t.xyz. Use a name that ends in .png"), ("o.png", "are both"), ("file/t.png", "takes no results")],
)
def test_a_timeline_that_cannot_be_drawn_is_told_before_the_work(
    timeline: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], sampled: list[int]
) -> None:
    (tmp_path / "file").touch()
    assert generate(DEMO, tmp_path / "o.png", "--timeline", str(tmp_path / timeline)) == 1
    assert words in capsys.readouterr().err and not sampled


def test_a_full_disk_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sampled: list[int]
) -> None:
    (tmp_path / "list.txt").write_text("a boat\n", "utf-8")
    full(tmp_path / "out", monkeypatch)
    for command in (
        ["generate", "--prompt", "a boat", "--out", str(tmp_path / "out" / "o.png")],
        ["batch", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")],
    ):
        assert main([*command, "--model", str(DEMO), "--device", "cpu"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"ballast: {tmp_path / 'out'} takes no results (No space left on device). Name another folder."
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "out" / "o.png")]) == 1
    assert main(["plan", str(DEMO), "--vram", "1GB", "--out", str(tmp_path / "out" / "p.png")]) == 1
    assert main(["bench", "codecs", "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("takes no results (No space left on device)") == 3
    assert not sampled and not list((tmp_path / "out").iterdir())


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk of a folder have no room from now on, as the system tells it when bytes really go there."""
    fsync = os.fsync

    def refuse(opened: int) -> None:
        if Path(f"/proc/self/fd/{opened}").resolve().is_relative_to(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(opened)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc, to know what file is meant")
    monkeypatch.setattr(os, "fsync", refuse)


def full_when_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Pipeline.decode

    def then_full(self: Any, latents: torch.Tensor) -> torch.Tensor:
        full(folder, monkeypatch)
        return decode(self, latents)

    monkeypatch.setattr(Pipeline, "decode", then_full)


@pytest.mark.parametrize("command", ["generate", "demo"])
@pytest.mark.parametrize("cache", few(["usable", "full"], "full"))
def test_what_a_full_disk_does_not_take_is_decoded_later(
    command: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latents go to the cache, else to the temporary files; the line names the file, and --latent decodes it."""
    home, temporary = tmp_path / "full" / "cache" if cache == "full" else tmp_path / "cache", tmp_path / "tmp"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    temporary.mkdir()
    out, expected = tmp_path / "full" / "o.png", tmp_path / "expected.png"
    given = ["--prompt", "a red circle", "--device", "cpu", "--steps", "2", "--timeline", str(tmp_path / "t.png")]
    given += ["--model", str(DEMO)] if command == "generate" else []
    assert main([command, *given, "--out", str(expected)]) == 0
    with monkeypatch.context() as patch:
        full_when_decoded(out.parent, patch)
        assert main([command, *given, "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    place = temporary if cache == "full" else home / "ballast" / "latents"
    (saved,) = place.glob("*.latent")
    assert said.startswith(f"ballast: {out} cannot be written (No space left on device). The latent is not lost: ")
    assert f"it is in {saved}. Decode it with ballast generate --latent" in said
    assert not list(out.parent.glob("*.*"))
    assert main(["generate", "--model", str(DEMO), "--device", "cpu", "--latent", str(saved), "--out", str(out)]) == 0
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(Image.open(expected)))


def test_latents_of_a_film_that_cannot_be_written_are_kept(
    tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the film, where only the film's own writer fails."""
    pytest.importorskip("av")

    def broken(*_: Any) -> None:
        raise ValueError("the encoder says no")

    more = ["--width", "48", "--height", "32", "--frames", "5"]
    with monkeypatch.context() as patch:
        patch.setattr(images, "_save_film", broken)
        assert generate(tiny_folders("wan"), tmp_path / "film.MP4", *more) == 1
    saved = tmp_path / "film_00001_.latent"
    assert f"the encoder says no. The latent is not lost: it is in {saved}." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]
    assert generate(tiny_folders("wan"), tmp_path / "film.MP4", "--latent", str(saved)) == 0
    assert images.open_frames(tmp_path / "film.MP4").shape == (5, 32, 48, 3)


def test_latents_of_a_long_name_are_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(DecodeError, match="not lost"),
        rescued(torch.ones(1, 4, 2, 2), tmp_path, "\u4e2d" * 100, {}, ""),
    ):
        raise ValueError("no")
    (saved,) = tmp_path.iterdir()
    assert torch.equal(load_latents(saved), torch.ones(1, 4, 2, 2))


def test_names_in_capitals_mean_the_same(tmp_path: Path) -> None:
    """An animation is one file, not one for each frame."""
    frames = torch.stack([torch.full((32, 48, 3), shade) for shade in (0.0, 0.5, 1.0)])
    for name in ("FILM.GIF", "FILM.WEBP"):
        assert images.save_images(frames[None], tmp_path / name) == [tmp_path / name]
        assert images.open_frames(tmp_path / name).shape == (3, 32, 48, 3)
    assert len(images.save_images(frames[None], tmp_path / "FILM.PNG")) == 3


def test_a_list_keeps_the_latents_that_its_folder_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sampled: list[int]
) -> None:
    """Moved to where the line says, they are decoded by the next run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "list.txt").write_text("a red circle\na blue square\n", "utf-8")
    out, sample = tmp_path / "out", Pipeline.sample
    command = ["batch", str(tmp_path / "list.txt"), "--model", str(DEMO), "--device", "cpu", "--out", str(out)]

    def then_full(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        full(out, monkeypatch)
        return sample(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "sample", then_full)
        assert main([*command, "--steps", "2"]) == 1
    monkeypatch.undo()
    (saved,) = (tmp_path / "cache" / "ballast" / "latents").iterdir()
    said = " ".join(capsys.readouterr().err.split())
    meant = out / "latents" / f"{saved.name.split('_')[0]}.latent"
    assert f"The latent is not lost: it is in {saved}." in said and f"move it to {meant}, and run the list" in said
    meant.parent.mkdir(exist_ok=True)
    saved.rename(meant)
    before = len(sampled)
    monkeypatch.setattr(Pipeline, "sample", counting := _count(sampled))
    assert main([*command, "--steps", "2"]) == 0 and counting
    assert len(sampled) == before + 1 and len(list(out.glob("*.png"))) == 2


def _count(sampled: list[int]) -> Callable[..., Any]:
    sample = Pipeline.sample

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled.append(1)
        return sample(self, *args, **kwargs)

    return count


def test_pictures_without_latents_go_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that a worker on another machine has drawn. Moved to the folder they count as done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = Result(tmp_path / "out", ".png", {"prompt": "a boat", "seed": 1}, 2)
    with monkeypatch.context() as patch:
        full(tmp_path / "out", patch)
        with pytest.raises(OSError, match="cannot be written.*move it, and run the list again") as caught:
            result.write(torch.rand(2, 8, 8, 3), 24)
    found = sorted((tmp_path / "cache" / "ballast" / "results").iterdir())
    assert str(found[0].parent) in str(caught.value) and [path.name for path in result.paths] == [p.name for p in found]
    for path in found:
        path.rename(result.folder / path.name)
    assert result.is_done


def test_a_worker_hands_back_what_it_cannot_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    from ballast.commands.request import Request

    def broken(*_: Any) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(Pipeline, "decode", broken)
    worker = Worker({"path": DEMO, "device": "cpu"}, None)
    request = Request("a red circle", "", {}, {"steps": 2}, {})
    (drawn,), _, _ = worker.run([request], worker.encode([request]))
    assert drawn.wrong == "out of luck" and drawn.images is None
    assert torch.equal(drawn.latents, worker.pipe.sample(worker.encode([request]), steps=2))


def test_results_of_no_bytes_are_made_again(tmp_path: Path) -> None:
    """A power cut leaves such files; so it does latents."""
    (tmp_path / "list.txt").write_text("a red circle\n", "utf-8")
    out = tmp_path / "out"
    command = ["batch", str(tmp_path / "list.txt"), "--model", str(DEMO), "--device", "cpu", "--steps", "2"]
    assert main([*command, "--out", str(out)]) == 0
    (path,) = out.glob("*.png")
    whole = path.read_bytes()
    path.write_bytes(b"")
    (out / "latents").mkdir()
    (out / "latents" / f"{path.stem.rpartition('-')[2]}.latent").touch()
    assert main([*command, "--out", str(out)]) == 0
    assert path.read_bytes() == whole and json.loads(Image.open(path).text["ballast"])["steps"] == 2  # type: ignore[attr-defined]
    assert not (out / "latents").exists()


@pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX")
def test_bytes_are_on_the_disk_before_their_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    fsync, move = os.fsync, os.replace

    def synced(opened: int) -> None:
        said.append("folder" if os.path.isdir(f"/proc/self/fd/{opened}") else "file")
        fsync(opened)

    def moved(*paths: Any) -> None:
        said.append("name")
        move(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    files.replace_file(tmp_path / "a", b"content")
    assert said == ["file", "name", "folder"]


def test_an_interrupt_leaves_the_old_file_and_no_half(tmp_path: Path) -> None:
    path = tmp_path / "o.png"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as part:
        part.write_bytes(b"ha")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == ["o.png"]
