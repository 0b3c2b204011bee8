"""Every command in the documents, as written: its options are known, its files exist, and those of ballast run."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ballast.bench
import ballast.commands.main
import pyramid_folders
import pytest
from ballast.pipelines.decoding.rescue import save_latents
from pictured import pipelines
from pictured.pictures import picture, pil
from places import ROOT
from selection import few
from single_files import transformer_file
from torch.distributed.run import get_args_parser

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SKILL.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^ *```(?:sh|bat)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:ballast|make|pip|ray|py) [^`]+|[.\\\w]*(?:python\w*|pip)(?:\.exe)? [^`]+)`")
MANY = ("--ray", "--cards")  # want Ray, or cards that talk by NCCL: `test_ray` and `test_cards_command` run these
NAMES = ("ballast generate", "ballast batch", "ballast plan", "ballast convert")  # of commands, in a sentence


def commands() -> list[str]:
    """Each command once, without comments."""
    found: dict[str, None] = {}
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        lines = [line.strip() for block in BLOCK.findall(text) for line in block.splitlines()]
        lines += [part for span in SPAN.findall(BLOCK.sub("", text)) for part in span.split(" && ")]
        found |= {re.sub(r"\s+#.*$", "", line): None for line in lines if line and not line.startswith("#")}
    return [" ".join(line.split()) for line in found if line not in NAMES]


COMMANDS = commands()
OURS = [line for line in COMMANDS if line.startswith("ballast ")]
RUN = [line for line in OURS if re.match("ballast ((plan|convert) path|demo|doctor)", line) or "--model" in line]
RUN = [line for line in RUN if not any(word in line for word in MANY)]
# Two of the longest: `make test` runs the demo, and others draw from pictures.
OFTEN = ("ballast demo", "ballast generate --model path/to/flux-kontext ")
CONVERSIONS = [line for line in RUN if line.startswith("ballast convert ")]  # later commands read what they write


def words(line: str) -> list[str]:
    return [word for word in shlex.split(line.replace("\\", "/")) if not re.fullmatch(r"[A-Z_]+=\S+", word)]


def parse_ballast(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = given
    if command == "bench":
        with pytest.raises(SystemExit, match="^0$"):
            ballast.bench.main([*rest[:1], "--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in rest if word.startswith("--")), given
        return
    if "--help" not in rest:  # a span in a sentence leaves out what it does not speak of
        rest = ["demo", *rest] if command == "plan" and (not rest or rest[0].startswith("-")) else rest
        rest += ["--model", "demo", "--prompt", "a"] if command == "generate" and "--model" not in rest else []
        ballast.commands.main._parser().parse_args([command, *rest])
        return
    with pytest.raises(SystemExit, match="^0$"):
        ballast.commands.main._parser().parse_args(given)


def check_pip(given: list[str]) -> None:
    if "-r" in given:
        assert (ROOT / given[given.index("-r") + 1].split("/")[-1]).is_file()
    for extra in re.findall(r"\[(\w+)\]", " ".join(given)):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE), extra
    named = {word for word in given[1:] if not word.startswith(("-", ".")) and not word.endswith("requirements.txt")}
    assert {re.sub("[=>].*", "", word) for word in named} <= {"torch", "pre-commit", "diffusers", "accelerate"}, given


def check_pytest(given: list[str]) -> None:
    files = [word for word in given if word.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files), given
    if "-k" in given and (word := given[given.index("-k") + 1]) not in ("NAME", "TQ2_0"):  # these are to be added
        folders = [ROOT / file for file in files]
        assert any(word in path.read_text("ascii") for path in [*folders, *(ROOT / "tests" / "support").glob("*.py")])


@pytest.mark.parametrize("line", COMMANDS, ids=range(len(COMMANDS)))
def test_every_command_is_understood(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, *given = words(line)
    tool = Path(first).name.removesuffix(".exe")
    if tool == "ballast":
        parse_ballast(given, capsys)
    elif tool == "make":
        assert shutil.which("make"), "make is needed to run the tests"
        done = subprocess.run(["make", "-n", *given], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif tool == "pip":
        check_pip(given)
    elif tool == "pre-commit":
        assert given == ["install"] and (ROOT / ".pre-commit-config.yaml").is_file()
    elif tool in ("python", "python3", "py"):
        rest = given[given.index("-m") + 1 :]
        if rest[0] == "bench":
            parse_ballast(rest, capsys)
        else:
            {"pytest": check_pytest, "pip": check_pip, "venv": lambda _: None}[rest[0]](rest[1:])
    elif tool == "git":
        address = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
        assert address
        assert given == ["clone", address[1]] or given[0] == "checkout" and (ROOT / given[1]).is_file()
    elif tool == "torchrun":
        arguments = get_args_parser().parse_args(given)
        assert arguments.module and arguments.training_script == "ballast.commands.main"
        parse_ballast(arguments.training_script_args, capsys)
    elif tool == "ray":
        assert given[0] == "start" and len(given) == 2 and re.fullmatch(r"--head|--address=\S+", given[1])
    else:
        assert tool == "cd" and given[0].startswith("ComfyUI/custom_nodes"), line


def test_commands_are_found_in_all_documents() -> None:
    assert len(COMMANDS) > 45 and len(RUN) > 10
    tools = {words(line)[0].split("/")[-1] for line in COMMANDS}
    assert tools >= {"ballast", "make", "pip", "python", "torchrun", "ray", "git", "cd"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Callable[[str], Path]) -> Path:
    """A working folder that has what the commands name: tiny models, pictures and lists of prompts."""
    root = tmp_path_factory.mktemp("commands")
    models = root / "path" / "to"
    models.mkdir(parents=True)
    shutil.copytree(tiny_folders("sd3"), models / "pipeline")
    shutil.copytree(tiny_folders("flux"), models / "flux-dev")
    pipelines.save("kontext", models / "flux-kontext")
    pyramid_folders.save("flux", models / "pyramid-flow-miniflux")
    transformer_file("flux", models / "flux-dev", root / "flux1-dev.safetensors")
    for name in ("boat", "first"):
        pil(picture(64, 64)).save(root / f"{name}.png")
    (root / "prompts.txt").write_text("a red boat\na green boat\n", "utf-8")
    (json,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "command-line.md").read_text("utf-8"), re.DOTALL)
    (root / "prompts.jsonl").write_text(json.replace("1024", "32"), "utf-8")
    with contextlib.chdir(root):
        for line in CONVERSIONS:
            assert ballast.commands.main.main(words(line)[1:]) == 0
    return root


@pytest.mark.long
@pytest.mark.parametrize("line", few(RUN, *(line for line in RUN if not line.startswith(OFTEN))), ids=range(len(RUN)))
def test_every_command_of_ballast_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = words(line)[1:]
    if given[0] == "plan":
        given[1] = "path/to/flux-dev"  # of the tiny ones, this takes 1024 x 1024
    if given[0] in ("generate", "batch"):
        given += ["--steps", "2"]  # in place of the model's own, which only takes longer
    if "--latent" in given:
        save_latent(folder / given[given.index("--latent") + 1])
    named = given[2:3] if given[0] == "convert" else given[given.index("--out") + 1 :][:1] if "--out" in given else []
    out = folder / named[0] if named else None
    before = out.stat().st_mtime_ns if out and out.is_file() else 0
    assert ballast.commands.main.main(given) == 0
    if out:
        assert any(out.iterdir()) if out.is_dir() else out.stat().st_mtime_ns > before


def save_latent(path: Path) -> None:
    pipe = ballast.open_pipeline(path.parent / "path" / "to" / "pipeline", device="cpu")
    save_latents(pipe.sample(pipe.encode("a red boat"), width=32, height=32, steps=2), path)
