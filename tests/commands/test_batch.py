"""`ballast batch`: lines of any kind, results written once, and a run that was killed goes on where it was."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ballast
import ballast.commands.main
import newbie_folders
import numpy as np
import pyramid_folders
import pytest
import tiny
import torch
from ballast.commands.images import write_image
from ballast.commands.lines import read_lines
from ballast.commands.request import Request
from ballast.memory import simulated
from PIL import Image
from places import ROOT, TESTS

DEMO = ROOT / "demo" / "shapes"
PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow circle", "a white square", "a purple circle")


def batch(lines: Path, out: Path, *more: str) -> int:
    given = ["batch", str(lines), "--model", str(DEMO), "--out", str(out), "--device", "cpu", "--steps", "2"]
    return ballast.commands.main.main([*given, *more])


def jsonl(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines), "utf-8")
    return path


def seen(out: Path) -> dict[str, tuple[int, bytes]]:
    """The results by name: when they were written, and what they hold."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.glob("*.png"))}


def test_lines_are_run_once_and_bad_ones_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = jsonl(
        tmp_path / "prompts.jsonl",
        {"prompt": PROMPTS[0], "seed": 7},
        "no json",
        {"prompt": PROMPTS[1], "batch": 2, "negative": "blue"},
        {"prompt": PROMPTS[2], "steps": 0},
        "",
        {"prompt": PROMPTS[2], "no_such": 1},
        {"prompt": PROMPTS[0], "seed": 7},
        {"seed": 1},
        {"prompt": PROMPTS[3], "image": "none.png"},
    )
    out = tmp_path / "out"
    assert batch(lines, out) == 1
    first, said = seen(out), capsys.readouterr()
    assert len(first) == 3 and not (out / "latents").exists()
    wrong = said.err.split("ballast: ")[1:]
    assert [text.split(":")[0] for text in wrong] == [f"line {number}" for number in (2, 4, 6, 8, 9)]
    assert "it is not JSON" in wrong[0] and "steps is 0" in wrong[1] and "no argument no_such" in wrong[2]
    assert "it has no prompt" in wrong[3] and "there is no file" in wrong[4]
    assert "Traceback" not in said.err and "wrote 3 of 8 lines" in said.out, "a line that comes twice counts twice"

    pipe: Any = ballast.open_pipeline(DEMO, device="cpu")
    made = pipe.decode(pipe.sample(pipe.encode(PROMPTS[0], ""), seed=7, steps=2))
    (name,) = (name for name in first if name.startswith("a-red-circle-"))
    with Image.open(out / name) as picture:
        assert np.array_equal(np.asarray(picture), (made[0] * 255).round().byte().numpy())
        facts = json.loads(picture.text["ballast"])  # type: ignore[attr-defined]
        assert picture.text["Description"] == PROMPTS[0]  # type: ignore[attr-defined]
    assert (facts["prompt"], facts["seed"], facts["steps"]) == (PROMPTS[0], 7, 2)
    assert facts["model_digest"] == pipe.digest()
    assert (out / name).stat().st_mode == lines.stat().st_mode, "others may read it where they may read new files"

    assert batch(lines, out) == 1
    assert seen(out) == first and "wrote 0 of 8 lines" in capsys.readouterr().out, "nothing is made twice"
    assert batch(lines, out, "--guidance", "2") == 1
    assert len(seen(out)) == 6, "other settings are other results"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": "64"}, "width is '64'; it takes a whole number."),
        ({"width": float("inf")}, "width is 'inf'; it takes a whole number."),
        ({"height": 64.0}, "height is '64.0'; it takes a whole number."),
        ({"steps": "2"}, "steps is '2'; it takes a whole number."),
        ({"steps": True}, "steps is 'True'; it takes a whole number."),
        ({"guidance": float("nan")}, "guidance is 'nan'; it takes a number."),
        ({"guidance": "5"}, "guidance is '5'; it takes a number."),
        ({"": 1}, "has no argument ''."),
        ({"on_step": 1}, "it gives on_step, which a line of a list cannot."),
        ({"cond": 1, "self": 2}, "it gives cond, self, which a line of a list cannot."),
        ({"prompt": "a \ud800"}, "its prompt has characters that no text has"),
        ({"negative": "a \0"}, "its negative_prompt has characters that no text has"),
        ({"control": "none.png"}, "there is no file"),
        ({"video": "frames"}, "frames holds no pictures."),
    ],
)
def test_odd_lines(given: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told with their numbers, also where such a line comes twice; nothing is drawn of them."""
    (tmp_path / "frames").mkdir()
    lines = jsonl(tmp_path / "prompts.jsonl", *[{"prompt": PROMPTS[0], **given}] * 2)
    assert batch(lines, tmp_path / "out") == 1
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if line.startswith("ballast: ")]
    assert [line.split(":")[1] for line in told] == [" line 1", " line 2"] and all(words in line for line in told), told
    assert not seen(tmp_path / "out")


def test_a_scheduler_is_part_of_what_was_asked(tmp_path: Path) -> None:
    """Another one draws anew, a line's own before the option's; asked again, nothing is drawn."""
    lines, out = jsonl(tmp_path / "prompts.jsonl", {"prompt": PROMPTS[0]}), tmp_path / "out"
    asked = ([], ["--scheduler", "heun"], ["--shift", "2"], ["--sigmas", "beta"], ["--sigmas", "1,0.5"])
    for drawn, options in enumerate([*asked, *asked]):
        assert batch(lines, out, *options) == 0
        assert len(seen(out)) == min(drawn + 1, len(asked)), options
    own = jsonl(tmp_path / "own.jsonl", {"prompt": PROMPTS[0], "scheduler": "heun"})
    assert batch(own, out, "--scheduler", "lcm") == 0
    assert len(seen(out)) == len(asked)


@pytest.mark.parametrize("out", ["file", "file/in"])
def test_a_folder_that_takes_nothing_is_told_before_anything_is_drawn(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    lines = jsonl(tmp_path / "prompts.jsonl", {"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1]})
    assert batch(lines, tmp_path / out, "--model", str(tmp_path / "none")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ballast: {tmp_path / out} takes no results (") and said.count("\n") == 1


def test_a_batch_whose_pictures_are_there_in_part_is_completed(tmp_path: Path) -> None:
    """As after a kill between two pictures: those that are there stay, each says its own seed."""
    lines, out = (
        jsonl(tmp_path / "prompts.jsonl", {"prompt": PROMPTS[0], "seed": 2**64 - 2, "batch": 3}),
        tmp_path / "out",
    )
    assert batch(lines, out) == 0
    first = seen(out)
    seeds = [json.loads(Image.open(out / name).text["ballast"])["seed"] for name in first]  # type: ignore[attr-defined]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    gone = sorted(first)[1]
    (out / gone).unlink()
    assert batch(lines, out) == 0
    found = seen(out)
    assert {name: content for name, (_, content) in found.items()} == {name: c for name, (_, c) in first.items()}
    assert [name for name in first if found[name] != first[name]] == [gone]


def test_a_picture_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ballast.commands import images

    def half(image: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(images, "write_image", half)
    assert batch(jsonl(tmp_path / "prompts.txt", PROMPTS[0]), tmp_path / "out") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["latents"]


def test_other_pictures_and_other_weights_are_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides a result is what its files hold, not how they are called."""
    from ballast.pipelines.pipeline import Pipeline

    sample = Pipeline.sample
    seeing = {"image", "strength"}  # which the demo model does not take

    def blind(self: Any, cond: Any, **given: Any) -> Any:
        return sample(self, cond, **{name: value for name, value in given.items() if name not in seeing})

    monkeypatch.setattr(Pipeline, "sample", blind)
    lines = jsonl(tmp_path / "prompts.jsonl", {"prompt": PROMPTS[0], "image": "start.png", "strength": 0.5})
    model = shutil.copytree(DEMO, tmp_path / "model")
    (weights,) = (model / "transformer").glob("*.safetensors")
    counts = []
    for colour, flipped in (("red", 0), ("teal", 0), ("teal", 1), ("teal", 0)):
        Image.new("RGB", (64, 64), colour).save(tmp_path / "start.png")
        content = bytearray(weights.read_bytes())
        content[-3] ^= flipped
        weights.write_bytes(content)
        assert batch(lines, tmp_path / "out", "--model", str(model)) == 0
        counts.append(len(seen(tmp_path / "out")))
    assert counts == [1, 2, 3, 3]


def test_a_disk_that_is_full_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of drawing what cannot be kept."""
    from ballast.pipelines.decoding import rescue
    from ballast.pipelines.pipeline import Pipeline

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    drawn, sample = [], Pipeline.sample

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append(1)
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(rescue, "save_latents", full)
    monkeypatch.setattr(Pipeline, "sample", counted)
    assert batch(jsonl(tmp_path / "prompts.txt", *PROMPTS[:3]), tmp_path / "out") == 1
    assert "ballast: no space left on device" in capsys.readouterr().err and drawn == [1]


def test_lines_may_name_films_and_what_to_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`control` and `video` of a line are files or folders of frames from the list's folder, read where it runs."""
    film = torch.stack([torch.full((16, 16, 3), shade) for shade in (0.0, 0.2, 1.0)])
    write_image(film, tmp_path / "film.gif", ".gif")
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(film):
        write_image(frame, tmp_path / "frames" / f"{number}.png", ".png")
    from ballast.pipelines.pipeline import Pipeline

    found: list[dict[str, Any]] = []

    def noted(self: Any, cond: Any, **given: Any) -> Any:
        found.append(given)
        raise ValueError("enough is seen")

    monkeypatch.setattr(Pipeline, "sample", noted)
    both = {"control": "film.gif", "video": "frames"}
    assert batch(jsonl(tmp_path / "prompts.jsonl", {"prompt": PROMPTS[0], **both}), tmp_path / "out") == 1
    assert "line 1: enough is seen" in capsys.readouterr().err
    files = {"control": [tmp_path / "film.gif"], "video": sorted((tmp_path / "frames").iterdir())}
    carried = Request("a boat", "", {}, {}, files).carried()
    for path in (tmp_path / "frames").iterdir():
        path.unlink()
    (tmp_path / "film.gif").unlink()
    for given in (found[0], carried.item(edits=False).sampling()):
        for name in both:
            torch.testing.assert_close(torch.cat(list(given[name])), film, atol=0.02, rtol=0)


def test_text_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "prompts.csv"
    table.write_bytes(b'\xef\xbb\xbfprompt,seed,guidance\n"a red circle, left",3,\n\na green square,,2.5\nx,1,2,3\n')
    one, two, bad = read_lines(table)
    assert one.given == {"prompt": "a red circle, left", "seed": 3}
    assert two.given == {"prompt": "a green square", "guidance": 2.5}
    assert bad.wrong.startswith("it has 4 cells for 3 columns")
    text = tmp_path / "prompts.txt"
    text.write_bytes("a red circle\r\n\r\n a green square \n\xff".encode("latin-1"))
    assert [(line.number, line.given.get("prompt")) for line in read_lines(text)] == [
        (1, "a red circle"), (3, "a green square"), (4, None),
    ]  # fmt: skip
    assert batch(text, tmp_path / "out", "--format", "jpg") == 1
    assert len(list((tmp_path / "out").glob("*.jpg"))) == 2
    assert "line 4: it is not UTF-8" in capsys.readouterr().err
    table.write_bytes(b"prompt,,seed\na red circle,,4\na green square,x,4\n")
    assert [line.wrong[:29] for line in read_lines(table)] == ["", "it has a cell in a column wit"]
    for content, words in (
        (b"prompt\n", "has no lines"),
        (b"seed\n1", "has no column prompt"),
        (b"prompt,seed, seed\na,1,2", "has more than one column seed"),
        ("prompt\na boat".encode("utf-16"), "is UTF-16"),
    ):
        table.write_bytes(content)
        assert batch(table, tmp_path / "none") == 1
        assert words in capsys.readouterr().err
    assert batch(tmp_path / "none.txt", tmp_path / "none") == 1
    assert "there is no file" in capsys.readouterr().err
    assert batch(text, tmp_path / "none", "--workers", "2") == 1
    assert "goes with --ray" in capsys.readouterr().err
    assert batch(text, tmp_path / "none", "--format", "mp4") == 1
    assert "Use png, jpg, webp." in capsys.readouterr().err


@pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported()))
def test_latents_wait_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sampled before the disk was full is decoded by the next run, and not sampled again."""
    lines, out = jsonl(tmp_path / "prompts.txt", *PROMPTS[:2]), tmp_path / "out"
    from ballast.commands import images

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(images, "write_image", full)
        assert batch(lines, out) == 1
    assert len(list((out / "latents").iterdir())) == 2 and not seen(out)
    from ballast.pipelines.pipeline import Pipeline

    monkeypatch.setattr(Pipeline, "sample", full)
    assert batch(lines, out) == 0
    assert len(seen(out)) == 2 and not (out / "latents").exists()
    for path in seen(out):  # of a run that was killed when its picture was there, and its latents still were
        (out / "latents").mkdir(exist_ok=True)
        (out / "latents" / f"{Path(path).stem.rpartition('-')[2]}.latent").touch()
    assert batch(lines, out) == 0
    assert not (out / "latents").exists()


_COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from import_pack import import_pack
import_pack()
import torch
torch.set_num_threads(1)
from ballast.commands.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
@pytest.mark.parametrize("kills", [1, 20])
def test_killed_at_any_point_it_goes_on(kills: int, tmp_path: Path) -> None:
    """Each result is written once, and is that of a run which nobody disturbed."""
    seeds = range(1 if kills == 1 else 8)
    lines = jsonl(tmp_path / "prompts.jsonl", *({"prompt": p, "seed": seed} for seed in seeds for p in PROMPTS))
    assert batch(lines, tmp_path / "whole") == 0
    expected = {name: content for name, (_, content) in seen(tmp_path / "whole").items()}
    out, written, chance = tmp_path / "out", {}, random.Random(0)
    command = [sys.executable, "-c", _COMMAND, str(TESTS / "support"), "batch", str(lines), "--model", str(DEMO)]
    command += ["--out", str(out), "--device", "cpu", "--steps", "2"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for kill in range(kills):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = progress(out)
        while process.poll() is None and progress(out) <= before:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.3)
        process.kill()
        process.wait()
        for name, (when, content) in seen(out).items():
            assert content == expected[name], "whole, and the same"
            assert written.setdefault(name, when) == when, f"written again after kill {kill}"
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    found = seen(out)
    assert {name: content for name, (_, content) in found.items()} == expected
    assert all(found[name][0] == when for name, when in written.items())
    assert not list(out.glob("latents/*.latent"))


def progress(out: Path) -> int:
    """How much of the work is on disk."""
    return 2 * len(list(out.glob("*.png"))) + len(list(out.glob("latents/*.latent")))


_OURS = {
    "pyramid": functools.partial(pyramid_folders.save, "flux"),
    "pyramid_mmdit": functools.partial(pyramid_folders.save, "mmdit"),
    "newbie": newbie_folders.official,
}


@pytest.mark.soak
@pytest.mark.parametrize("name", (*tiny.FAMILIES, *_OURS))
def test_three_equal_lists_in_three_processes_make_each_result_once(name: str, tmp_path: Path) -> None:
    """And none forecasts what another has: the order of sets, which a hash seed decides, counts for nothing."""
    model, family = tmp_path / name, tiny.FAMILIES.get(name)
    _OURS.get(name, functools.partial(tiny.save, name))(model)
    frames, (width, height) = (family.frames, family.size) if family else (9 if "pyramid" in name else None, (64, 64))
    line = {"prompt": "a red boat", **({"frames": frames} if frames else {})}
    lines, out = jsonl(tmp_path / "prompts.jsonl", line), tmp_path / "out"
    given = ["batch", lines, "--model", model, "--out", out, "--device", "sim", "--vram", "1GB", "--steps", "2"]
    given += ["--width", width, "--height", height]
    command = [sys.executable, "-c", _COMMAND, str(TESTS / "support"), *map(str, given)]
    found = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        made = [path for path in out.iterdir() if path.suffix in (".webp", ".png")]
        kept = set((tmp_path / "cache").rglob("forecasts/*"))
        found.append(({path: path.stat().st_mtime_ns for path in made}, kept))
    assert len(found[0][0]) == 1 and found[0][1]
    assert found[1] == found[2] == found[0]
