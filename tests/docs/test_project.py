"""The repository itself: what is shipped, what is installed."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import ballast
import pytest
from ballast import requirements
from ballast.nodes.load import LoadPipeline
from host import page, run_node
from places import ROOT

EXTRAS = ("charts", "demo", "test")
SHIPPED = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not {".venv", "tests", "build", "bench"} & set(path.relative_to(ROOT).parts[:1])
]


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, relative ones as `.name` from the pack's root."""
    found: set[str] = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text("ascii"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            found |= {".".join(("", *base, node.module or alias.name)) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_code_makes_no_call_that_the_registry_forbids(path: Path) -> None:
    tree = ast.parse(path.read_text("ascii"))
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not names & {"eval", "exec", "__import__", "compile"}
    attributes = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not attributes & {"torch.load", "os.system", "importlib.import_module"}
    assert not imports(path) & {"pickle", "subprocess", "socket", "urllib.request", "requests"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_text_are_told_their_encoding(path: Path) -> None:
    """Without one Windows takes its own, which has no Chinese."""
    tree = ast.parse(path.read_text("ascii"))
    for call in (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ):
        if (name := call.func.attr) in ("read_text", "write_text"):
            said = len(call.args) > (name == "write_text") or any(each.arg == "encoding" for each in call.keywords)
            assert said, f"{path}:{call.lineno}"


def test_requirements_are_those_of_the_project_and_name_no_torch() -> None:
    wanted = (ROOT / "requirements.txt").read_text("ascii").split()
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.findall('"(.+?)"', project.split("\ndependencies = [")[1].split("]")[0])
    extras = {name: re.findall('"(.+?)"', re.search(rf"\n{name} = \[(.+)\]", project)[1]) for name in EXTRAS}
    assert sorted(listed + extras["charts"]) == wanted, "ComfyUI installs what draws, too"
    assert all(set(extras["charts"]) < set(extras[name]) for name in EXTRAS[1:])
    assert not [name for name in wanted if name.startswith("torch")]


def test_importing_the_pack_loads_nothing_heavy() -> None:
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', {str(ROOT / '__init__.py')!r},"
        f" submodule_search_locations=[{str(ROOT)!r}])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['pack'] = module\n"
        "spec.loader.exec_module(module)\n"
        "heavy = {'accelerate', 'diffusers', 'matplotlib', 'rich', 'transformers'}\n"
        "print(sorted(({'torch'} | heavy) & set(sys.modules)))\n"
        "import pack.pipelines, pack.memory.charts, pack.memory.planning.runplan, pack.memory.reports.timeline\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr


def test_bundled_data_stays_small() -> None:
    held = sum(path.stat().st_size for path in (ROOT / "demo" / "shapes").rglob("*") if path.is_file())
    data = sum(path.stat().st_size for path in (ROOT / "tests" / "data").rglob("*") if path.is_file())
    assert held <= 8 * 2**20
    assert held + data <= 24 * 2**20


# What is not installed


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without diffusers, with an old transformers, and with a Pillow that does not say its version."""
    versions = {"transformers": "4.50.3", "accelerate": "1.15.0.dev0"}

    def version(name: str) -> str:
        if name in ("diffusers", "pillow"):
            raise requirements.PackageNotFoundError(name)
        return versions.get(name) or metadata.version(name)

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "diffusers" else name)


def test_all_that_is_needed_is_installed_here() -> None:
    assert requirements.complaint() is None


@pytest.mark.usefixtures("lacking")
def test_what_is_missing_or_old_is_said_in_one_line_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(ballast.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    file = ROOT / "requirements.txt"
    assert line == (
        "Ballast: not installed: diffusers; transformers is 4.50.3 and must be 4.57 or newer. "
        f'Run "{sys.executable}" -m pip install -r "{file}" and start ComfyUI again.'
    )


def test_without_matplotlib_only_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws pictures of VRAM, and nothing else."""

    def version(name: str) -> str:
        if name == "matplotlib":
            raise requirements.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    assert "not installed: matplotlib." in str(requirements.complaint())
    assert requirements.complaint(optional=False) is None


@pytest.mark.usefixtures("lacking")
def test_what_is_missing_is_said_in_the_loader() -> None:
    with page() as shown, pytest.raises(ImportError, match="not installed: diffusers"):
        run_node(LoadPipeline)
    assert "not installed: diffusers" in shown.texts[-1][1] and "pip install -r" in shown.texts[-1][1]


@pytest.mark.parametrize(
    ("found", "lowest", "enough"),
    [("0.36.0", "0.36", True), ("0.9", "0.36", False), ("1.0.dev0", "0.36", True), ("0.35.9", "0.36", False),
     ("", "9", True), ("2.13.0+cpu", "2.6", True)],
)  # fmt: skip
def test_versions_are_compared_by_number(found: str, lowest: str, enough: bool) -> None:
    assert requirements.at_least(found, lowest) == enough
