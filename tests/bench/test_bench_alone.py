"""`python3 -m bench` in a bare checkout: without the tests, and what only they need; diffusers from a wheel."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from places import ROOT

# Not found, in this process and those that it starts.
_HIDDEN = """
from importlib.machinery import PathFinder
hidden = {"conftest", "gguf", "hypothesis", "parameterized", "peft", "pytest", "_pytest", "tiny", "tiny_parts"}
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in hidden else find(name, *more)
"""
long, soak = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.long, pytest.mark.soak))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        soak(["stream", "--device", "sim", "--models", "FLUX.1-dev"], "stream.json"),
        soak(["stream", "--dry"], "stream-sim-tiny.json"),
        soak(["newbie", "--device", "cpu"], "newbie-predicted.json"),
        soak(["newbie", "--dry"], "newbie-sim.json"),
        long(["codecs", "--dry"], "codecs.json"),
        soak(["load", "--dry"], "load.json"),
        soak(["peers", "--dry"], "peers-sim-tiny.json"),
        soak(["gpu", "--dry", "--only", "tests"], ""),
        soak(["plans", "--dry"], "plans.json"),
        soak(["caches", "--dry"], "caches.json"),
    ],
    ids=lambda given: " ".join(given[:2]) if isinstance(given, list) else "",
)
def test_it_needs_no_tests(given: list[str], written: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_HIDDEN, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "bench", *given, "--out", str(tmp_path / "out")]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", env=environment)
    said = made.stdout + made.stderr
    assert "ModuleNotFoundError" not in said and "No module named" not in said, said
    if given[0] == "gpu":
        assert "the tests are not part of this install" in said
    else:
        assert (tmp_path / "out" / written).is_file(), said
        assert made.returncode == 0 or given[0] == "plans", said  # which judges seconds of a machine that may be busy


def test_what_is_not_installed_comes_from_a_wheel(tmp_path: Path) -> None:
    """A package that only the wheel has, looked for where the harness starts its processes too."""
    for place in ("bench/__main__.py", "__init__.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes((ROOT / place).read_bytes())
    (tmp_path / ".whl").mkdir()
    with zipfile.ZipFile(tmp_path / ".whl" / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("diffusers/__init__.py", "name = 'carried'")
    (tmp_path / "commands").mkdir()
    look = "import subprocess, sys\ndef main(given):\n    sys.exit(subprocess.call([sys.executable, '-c', CODE]))\n"
    code = "import diffusers; print(diffusers.name, diffusers.__file__.endswith('.py'))"
    (tmp_path / "commands" / "main.py").write_text(f"CODE = {code!r}\n{look}", "utf-8")
    hidden = "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
    (tmp_path / "sitecustomize.py").write_text(hidden, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "bench"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert made.stdout == "carried True\n", made.stderr
