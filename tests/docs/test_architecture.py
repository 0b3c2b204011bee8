"""Who imports whom: no circles, the contracts in pyproject.toml, and folders that a reader can take in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from places import ROOT, TESTS

ROOMS = ("bench", "commands", "memory", "nodes", "pipelines")
MOST_FILES = 24  # in one folder

PLAIN = "{}"
LATE = "def late():\n    {}"

# For each contract: a file, an import that it forbids, where, and the two modules that a line of the report names.
PLANTS = [
    ("rooms", "memory/sizes.py", "from ..pipelines import options", LATE, "memory.sizes", "pipelines.options"),
    ("rooms", "pipelines/options.py", "from ..nodes import load", LATE, "pipelines.options", "nodes.load"),
    ("rooms", "nodes/load.py", "from ..commands import doctor", PLAIN, "nodes.load", "commands.doctor"),
    ("pipelines", "pipelines/encoding/truncation.py", "from ..decoding import policy", LATE, "truncation", "policy"),
    ("pipelines", "pipelines/planning/forecasts.py", "from ..stages import encode", LATE, "forecasts", "stages"),
    ("memory", "memory/weights/stored.py", "from ..engine import ring", LATE, "weights.stored", "engine.ring"),
    ("memory", "memory/codecs/raw.py", "from ..weights import stored", LATE, "codecs.raw", "weights.stored"),
    (
        "memory",
        "memory/planning/oom_fallback.py",
        "from .. import stage",
        LATE,
        "planning.oom_fallback",
        "memory.stage",
    ),
    ("models", "pipelines/models/hidream/llama.py", "from ..newbie import sizes", LATE, "hidream.llama", "newbie"),
    ("weights", "memory/sizes.py", "import diffusers", LATE, "memory.sizes", "diffusers"),
    ("weights", "memory/weights/stored.py", "from accelerate import hooks", LATE, "weights.stored", "accelerate"),
    ("comfyui", "pipelines/options.py", "import comfy.utils", PLAIN, "pipelines.options", "comfy"),
    ("comfyui", "memory/sizes.py", "import nodes", LATE, "memory.sizes", "nodes"),
    ("tests", "bench/places.py", "import tiny", LATE, "bench.places", "tiny"),
    ("circles", "nodes/shared/graph.py", "from .reference import PipelineReference", LATE, ".graph", ".reference"),
    ("circles", "pipelines/files/trust.py", "from .components import Component", LATE, ".trust", ".components"),
]


def contracts() -> set[str]:
    configure()
    options = read_user_options(str(ROOT / "pyproject.toml"))
    return {contract["id"] for contract in options.contracts_options}


def copy(folder: Path) -> Path:
    """The sources of the package as `folder`/ballast, with its contracts."""
    package = folder / "ballast"
    package.mkdir()
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(file, package)
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=lambda _, names: {"__pycache__", "results"} & set(names))
    return package


def lint(package: Path, *arguments: str) -> subprocess.CompletedProcess:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", script, "--config", str(package / "pyproject.toml"), "--no-cache", *arguments]
    paths = os.pathsep.join(map(str, (package.parent, *filter(None, [os.environ.get("PYTHONPATH")]))))
    settings = os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=package.parent, env=settings, capture_output=True, text=True, encoding="utf-8", check=False
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("package"))


@pytest.fixture
def edited(package: Path) -> Iterator[dict[Path, str]]:
    """Files that a test changes, with what is in them before."""
    before: dict[Path, str] = {}
    yield before
    for path, text in before.items():
        path.write_text(text, "ascii")


def test_no_file_imports_itself_in_a_circle() -> None:
    import grimp

    graph = grimp.build_graph("ballast", cache_dir=None, exclude_type_checking_imports=True)
    assert len(graph.modules) > 100
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_contracts_are_kept(package: Path) -> None:
    done = lint(package)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_contract_has_a_plant() -> None:
    assert contracts() == {plant[0] for plant in PLANTS}


@pytest.mark.parametrize(("contract", "file", "line", "where", "importer", "imported"), PLANTS)
def test_contract_names_a_planted_import(
    contract: str,
    file: str,
    line: str,
    where: str,
    importer: str,
    imported: str,
    package: Path,
    edited: dict[Path, str],
) -> None:
    path = package / file
    edited[path] = path.read_text("ascii")
    path.write_text(f"{edited[path]}\n{where.format(line)}\n", "ascii")
    done = lint(package, "--contract", contract)
    assert done.returncode == 1, done.stderr
    arrows = [text for text in done.stdout.splitlines() if " -> " in text]
    assert any(importer in arrow and imported in arrow for arrow in arrows), done.stdout


def test_folders_are_small_enough_to_take_in() -> None:
    folders = [TESTS, *(ROOT / room for room in ROOMS)]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".js", ".mjs")]
    held = [path.parent for path in files]
    crowded = {str(folder.relative_to(ROOT)): held.count(folder) for folder in set(held)}
    assert not {folder: count for folder, count in crowded.items() if count > MOST_FILES}


def test_packages_are_those_that_are_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = text.split("\npackages = [")[1].split("]")[0].replace('"', "").replace(",", "").split()
    found = [path.parent.relative_to(ROOT).parts for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    assert listed == sorted([".".join(("ballast", *parts)) for parts in [(), *found]])
