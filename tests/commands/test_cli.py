"""The command line, on the bundled model and on tiny pipelines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast.commands.main
import numpy as np
import pytest
import thumbnails
import tiny
import torch
from adapters import lora_files
from ballast.commands import batch, demo, generate, plan
from ballast.commands.arguments import _tokenizer, expanded, fractions, lora, ranges, sigmas, strengths
from ballast.commands.batch import _paths
from ballast.commands.images import open_image
from ballast.memory import manager, simulated
from ballast.memory.files import cache_home
from ballast.pipelines.files.single import published
from pictured.pictures import picture
from PIL import Image
from places import ROOT
from safetensors.torch import save_file
from single_files import base_of, state_of, transformer_file
from single_files.original_names import original
from single_files.published_facts import facts_of, files_of

Folders = Callable[[str], Path]

needs_sim = pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported()))


@needs_sim
def test_demo_draws_a_picture_and_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, timeline = tmp_path / "demo.png", tmp_path / "timeline.png"
    for _ in range(2):
        manager("sim").timeline.clear()  # as in a process of its own
        status = ballast.commands.main.main(
            ["demo", "--device", "sim", "--vram", "64MB", "--out", str(out), "--timeline", str(timeline)]
        )
        assert status == 0
    table, bars = capsys.readouterr()
    for word in ("encode", "sample", "decode", "text_encoder", "transformer", "vae", "peak", "bytes in", "seconds"):
        assert word in table
    for unit in ("text_encoder", "transformer", "vae"):
        assert f"read {unit}:" in bars
    picture = np.asarray(Image.open(out).convert("RGB")).astype(int)
    red, _, blue = np.moveaxis(picture, -1, 0)
    assert (red > blue)[:, : picture.shape[1] // 2].sum() > 4 * (red > blue)[:, picture.shape[1] // 2 :].sum()
    drawn, shown = (Image.open(path).convert("RGB") for path in (timeline, ROOT / "demo" / "timeline.png"))  # README's
    assert drawn.size == shown.size == (1200, 480)
    for box in ((0, 40, 84, 416), (84, 430, 1200, 480)):  # where no seconds are told
        assert thumbnails.is_alike(shown.crop(box), drawn.crop(box)), f"{box}: make demo draws another picture now"
    heights = [np.median(np.asarray(each)[46:408, 400:1000].astype(int), axis=1) for each in (drawn, shown)]
    assert (abs(heights[0] - heights[1]).max(axis=-1) > 20).sum() < 4, "make demo draws another picture now"
    assert simulated.stats().allocated_bytes == 0


@needs_sim
def test_generate_below_the_size_of_the_model(
    tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, out = tiny_folders("hidream"), tmp_path / "boat.png"
    arguments = ["generate", "--model", str(folder), "--prompt", "a boat", "--width", "48", "--height", "32"]
    arguments += ["--steps", "2", "--guidance", "4", "--device", "sim", "--vram", "4.2MB", "--out", str(out)]
    assert ballast.commands.main.main(arguments) == 0
    assert "streamed" in capsys.readouterr().out
    assert Image.open(out).size == (48, 32)


@needs_sim
def test_a_batch_is_written_and_planned(tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Four pictures, each that of its seed; and in the plan what one of them takes."""
    folder, out = tiny_folders("sd3"), tmp_path / "boat.png"
    run = ["--width", "48", "--height", "32", "--steps", "2", "--device", "sim"]
    written = ["generate", "--model", str(folder), "--prompt", "a boat", *run, "--out", str(out)]
    assert ballast.commands.main.main([*written, "--seed", "6", "--batch", "3"]) == 0
    files = [tmp_path / name for name in ("boat.png", "boat-1.png", "boat-2.png")]
    third = np.asarray(Image.open(files[2])).astype(int)
    assert all(file.is_file() for file in files)
    assert ballast.commands.main.main([*written, "--seed", "8"]) == 0
    assert abs(np.asarray(Image.open(out)).astype(int) - third).max() <= 1
    capsys.readouterr()
    assert ballast.commands.main.main(["plan", str(folder), *run, "--vram", "1GB", "--batch", "3"]) == 0
    assert "not predicted on the simulated card. It samples 3 at once." in capsys.readouterr().out
    assert ballast.commands.main.main([*written, "--batch", "0"]) == 1
    assert "batch is 0; it takes a whole number from 1 to 64." in capsys.readouterr().err


def test_generate_and_plan_with_loras(tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A file with its strength after a colon, as often as there are LoRAs."""
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    shared = ["--device", "cpu", "--width", "32", "--height", "32", "--steps", "2", "--prompt", "a boat"]
    given = ["--lora", f"{loras[0][0]}:0.8", "--lora", str(loras[1][0])]
    pictures = {}
    for more in ([], given):
        out = tmp_path / f"{len(more)}.png"
        assert ballast.commands.main.main(["generate", "--model", str(folder), *shared, *more, "--out", str(out)]) == 0
        pictures[len(more)] = np.asarray(Image.open(out))
    pipe = ballast.open_pipeline(folder, device="cpu", loras=[(loras[0][0], 0.8), (loras[1][0], 1.0)])
    made = pipe.decode(pipe.sample(pipe.encode("a boat", ""), width=32, height=32, steps=2))
    assert np.array_equal(pictures[4], (made[0] * 255).round().byte().numpy())
    assert not np.array_equal(pictures[0], pictures[4])
    assert ballast.commands.main.main(["plan", str(folder), "--vram", "1GB", *given]) == 0
    capsys.readouterr()
    assert ballast.commands.main.main(["plan", str(folder), "--vram", "1GB", "--lora", str(tmp_path / "no.pt")]) != 0
    assert "no.pt is a pickle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a.safetensors:0.8", ("a.safetensors", 0.8)),
        ("a:-2", ("a", -2.0)),
        ("a.b", ("a.b", 1.0)),
        ("C:a", ("C:a", 1.0)),
        ("C:a:transformer_2=0.5", ("C:a", {"transformer_2": 0.5})),
        ("a=b:0.5", ("a=b", 0.5)),
        ("C:a=b", ("C:a=b", 1.0)),
    ],
)
def test_a_lora_is_a_file_and_a_strength(text: str, meant: tuple[str, Any]) -> None:
    path, strength = lora(text)
    assert (str(path), strength) == meant


def test_every_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of --out=~/x.png, and quoted ones, as they are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for command in (generate, batch, plan, demo):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        kinds = {action.type for action in parser._actions} - {None, int, float, fractions, ranges, sigmas, strengths}
        assert kinds and all(
            str(tmp_path / "x") in str(kind("clip=~/x" if kind is _tokenizer else "~/x")) for kind in kinds
        )
    assert lora("~/a.safetensors:0.5") == (tmp_path / "a.safetensors", 0.5)
    (tmp_path / "a.png").touch()
    assert _paths("~/a.png", tmp_path / "lists", "image") == [tmp_path / "a.png"]
    assert expanded("~nobody-has-this-name/x") == Path("~nobody-has-this-name/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")  # as a file of settings has it
    assert cache_home() == tmp_path / "cache" / "ballast"


def test_settings_of_several_controlnets_are_lists() -> None:
    assert strengths("0.7") == 0.7 and strengths("0.7,0.5") == [0.7, 0.5]
    assert ranges("0.0-0.6") == [0.0, 0.6] and ranges("0.0-0.4,0.4-1.0") == [[0.0, 0.4], [0.4, 1.0]]
    for read, text in ((strengths, "much"), (ranges, "0.5")):
        with pytest.raises(argparse.ArgumentTypeError, match="is no"):
            read(text)


def test_generate_writes_the_frames_of_a_video(tiny_folders: Folders, tmp_path: Path) -> None:
    shared = ["generate", "--model", str(tiny_folders("wan")), "--prompt", "a boat", "--width", "48", "--height", "32"]
    shared += ["--frames", "9", "--steps", "2", "--guidance", "4", "--device", "cpu"]
    assert ballast.commands.main.main([*shared, "--out", str(tmp_path / "boat.webp")]) == 0
    assert Image.open(tmp_path / "boat.webp").n_frames == 9  # type: ignore[attr-defined]
    assert ballast.commands.main.main([*shared, "--out", str(tmp_path / "frames" / "boat.png")]) == 0
    assert len(list((tmp_path / "frames").iterdir())) == 9


def test_generate_takes_single_files(tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The file of a transformer with those of an encoder and the VAE, beside a base that has none of their weights."""
    folder, out = tiny_folders("flux"), tmp_path / "boat.png"
    base = base_of(folder, tmp_path / "base", "text_encoder_2", "vae")
    files = [str(transformer_file("flux", folder, tmp_path / "flux.safetensors")), "--base", str(base)]
    for option, part in (("--text-encoder", "text_encoder_2"), ("--vae", "vae")):
        save_file(state_of(folder, part), path := tmp_path / f"{part}.safetensors")
        files += [option, str(path)]
    shared = ["--width", "48", "--height", "32", "--steps", "2"]
    given = ["--prompt", "a boat", "--device", "cpu", *shared]
    assert ballast.commands.main.main(["generate", "--model", *files, *given, "--out", str(out)]) == 0
    made = np.asarray(Image.open(out))
    assert ballast.commands.main.main(["generate", "--model", str(folder), *given, "--out", str(out)]) == 0
    assert np.array_equal(np.asarray(Image.open(out)), made)
    capsys.readouterr()
    assert ballast.commands.main.main(["plan", *files, "--vram", "1GB", *shared]) == 0
    assert "flux" in capsys.readouterr().out


def test_generate_takes_single_files_without_a_base(
    tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, out = tiny_folders("flux"), tmp_path / "boat.png"
    facts_of("flux", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("flux", folder, tmp_path)
    files = [str(given["path"]), "--vae", str(given["vae"])]
    files += [word for path in given["text_encoders"] for word in ("--text-encoder", str(path))]
    tokenizers = [word for kind, at in given["tokenizers"].items() for word in ("--tokenizer", f"{kind}={at}")]
    shared = ["--prompt", "a boat", "--width", "48", "--height", "32", "--steps", "2", "--device", "cpu"]
    assert ballast.commands.main.main(["generate", "--model", *files, *tokenizers, *shared, "--out", str(out)]) == 0
    made = np.asarray(Image.open(out))
    assert ballast.commands.main.main(["generate", "--model", str(folder), *shared, "--out", str(out)]) == 0
    assert np.array_equal(np.asarray(Image.open(out)), made)
    capsys.readouterr()
    assert ballast.commands.main.main(["generate", "--model", *files, *shared, "--out", str(out)]) != 0
    assert "needs the tokenizer of CLIP" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ballast.commands.main.main(["generate", "--model", *files, "--tokenizer", "clip", *shared, "--out", str(out)])
    assert "KIND=FOLDER" in capsys.readouterr().err


def test_generate_takes_the_second_expert(tmp_path: Path, tiny_folders: Folders) -> None:
    """Wan 2.2: the frames of its folder, which are others with one transformer in both places."""
    folder = tmp_path / "wan"
    pipe: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(folder)
    base = base_of(folder, tmp_path / "base", "transformer_2")
    for part in ("transformer", "transformer_2"):
        save_file(original("wan", state_of(folder, part)), tmp_path / f"{part}.safetensors")
    files = [str(tmp_path / "transformer.safetensors"), "--transformer-2", str(tmp_path / "transformer_2.safetensors")]
    width, height = tiny.FAMILIES["wan"].size
    shared = ["--prompt", "a boat", "--width", str(width), "--height", str(height), "--frames", "5", "--steps", "2"]
    made = {}
    for name, model in (("folder", [str(folder)]), ("files", [*files, "--base", str(base)])):
        out = tmp_path / name / "boat.png"
        given = ["generate", "--model", *model, *shared, "--device", "cpu", "--out", str(out)]
        assert ballast.commands.main.main(given) == 0
        made[name] = [np.asarray(Image.open(path)) for path in sorted(out.parent.iterdir())]
    assert len(made["files"]) == 5
    assert all(np.array_equal(one, other) for one, other in zip(made["folder"], made["files"], strict=True))


def test_generate_starts_from_pictures(tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The picture, the mask and the strength reach the run; the plan takes them too."""
    image, mask, out = tmp_path / "first.png", tmp_path / "mask.png", tmp_path / "boat.png"
    Image.fromarray((picture(48, 32)[0] * 255).byte().numpy()).save(image)
    Image.new("L", (48, 32), 0).save(mask)  # nothing is painted anew
    folder = str(tiny_folders("flux"))
    given = ["--image", str(image), "--mask", str(mask), "--strength", "0.6", "--steps", "3"]
    shared = ["--model", folder, "--prompt", "a boat", "--device", "cpu", "--out", str(out)]
    assert ballast.commands.main.main(["generate", *shared, *given]) == 0
    kept = Image.open(out).convert("RGB")
    pipe = ballast.open_pipeline(folder, device="cpu")
    image_again = open_image(image, None, None)
    run = {"steps": 3, "strength": 0.6, "image": image_again, "mask": torch.zeros(32, 48)}
    made = pipe.decode(pipe.sample(pipe.encode("a boat", ""), **run))
    assert np.array_equal(np.asarray(kept), (made[0] * 255).round().byte().numpy())
    capsys.readouterr()
    assert ballast.commands.main.main(["plan", folder, "--vram", "1GB", *given]) == 0
    assert "encode picture" in capsys.readouterr().out
    assert ballast.commands.main.main(["generate", *shared, "--strength", "0.6"]) == 1
    assert "strength is 0.6, but there is no picture to start from." in capsys.readouterr().err


def test_an_edit_model_takes_several_pictures(tiny_folders: Folders, tmp_path: Path) -> None:
    """Each --image of one goes with its prompt, whatever its size."""
    images = [tmp_path / f"{side}.png" for side in (64, 96)]
    for side, path in zip((64, 96), images, strict=True):
        Image.fromarray((picture(side, 64, side)[0] * 255).byte().numpy()).save(path)
    shared = ["generate", "--model", str(tiny_folders("flux2_klein")), "--prompt", "a boat", "--device", "cpu"]
    shared += ["--width", "48", "--height", "32", "--steps", "2"]
    made = []
    for count in (1, 2):
        given = [word for path in images[:count] for word in ("--image", str(path))]
        assert ballast.commands.main.main([*shared, *given, "--out", str(tmp_path / "boat.png")]) == 0
        made.append(np.asarray(Image.open(tmp_path / "boat.png")).copy())
    assert made[0].shape == (32, 48, 3) and not np.array_equal(*made)


@needs_sim
def test_two_runs_share_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first writes its latents, from which the second goes on: the picture is that of one run."""
    left, two, one = tmp_path / "left.latent", tmp_path / "two.png", tmp_path / "one.png"
    run = ["--model", "demo", "--prompt", "a red circle", "--device", "sim", "--steps", "6", "--scheduler", "euler"]

    def generate_with(*more: str) -> int:
        return ballast.commands.main.main(["generate", *run, *more])

    assert generate_with("--end-step", "2", "--out", str(left)) == 0
    assert generate_with("--start-step", "2", "--latent", str(left), "--out", str(two)) == 0
    assert generate_with("--out", str(one)) == 0
    assert np.array_equal(np.asarray(Image.open(two)), np.asarray(Image.open(one)))
    capsys.readouterr()
    for more, words in (
        (["--end-step", "2", "--out", str(one)], "leaves latents, no picture. Give --out"),
        (["--start-step", "2", "--out", str(one)], "nothing to go on from. Give --latent."),
        (["--latent", str(left), "--out", str(one)], "left at step 2 of 6, and are no picture yet"),
        (["--latent", str(left), "--end-step", "2", "--out", str(left)], "is decoded without --start-step"),
        (["--start-step", "3", "--latent", str(left), "--out", str(one)], "goes on at step 3 of 6"),
    ):
        assert generate_with(*more) == 1
        assert words in capsys.readouterr().err.splitlines()[-1]
    args = ["plan", "demo", "--device", "sim", "--vram", "64MB,32MB", *run[6:], "--start-step", "2"]
    assert ballast.commands.main.main(args) == 0
    assert "steps 2 to 6 of 6, 4 steps" in capsys.readouterr().out


def test_errors_are_one_line(capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(["generate", "--prompt", "a boat", "--model", "nowhere", "--out", "x.png"]) == 1
    said = capsys.readouterr().err.strip()
    assert "nowhere is not a folder" in said
    assert "\n" not in said


def test_output_of_unknown_kind_is_refused_before_anything_runs(
    tiny_folders: Folders, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["generate", "--prompt", "a boat", "--model", str(tiny_folders("lumina2")), "--out", "boat.mov"]
    assert ballast.commands.main.main(arguments) == 1
    assert "boat.mov" in capsys.readouterr().err


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture) -> None:
    status = ballast.commands.main.main(["doctor"])
    said = capsys.readouterr().out
    for word in ("torch", "device", "RAM", "pinning", "diffusers", "transformers", "ComfyUI", "cache"):
        assert word in said
    assert status == (1 if "MISS" in said else 0)


def test_doctor_reads_the_contract_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ballast.commands.doctor import examine

    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfyui_version.py").write_text('__version__ = "9.9.9"\n')
    source = "class LoadedModel:\n    def go(self):\n        return self.model.model_size() + self.model.brand_new(1)\n"
    (tmp_path / "comfy" / "model_management.py").write_text(source)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    (finding,) = [finding for finding in examine() if finding.what == "ComfyUI"]
    assert not finding.ok
    assert "9.9.9" in finding.detail
    assert "brand_new" in finding.detail
    assert "model_size" not in finding.detail
