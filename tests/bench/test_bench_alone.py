"""`ballast bench` after `pip install -e .` alone: without the tests, and what only they need."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
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
_START = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("ballast", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["ballast"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from ballast.commands.main import main
assert importlib.util.find_spec("hypothesis") is None
sys.exit(main(["bench", *sys.argv[2:]]))
"""


long, soak = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.long, pytest.mark.soak))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        soak(["stream", "--device", "sim", "--models", "FLUX.1-dev"], "stream.json"),
        long(["newbie", "--device", "cpu"], "newbie-predicted.json"),
        long(["codecs", "--device", "cpu", "--megaweights", "0.1", "--rounds", "1"], "codecs.json"),
        long(["load", "--gb", "0.01", "--rounds", "1"], "load.json"),
        long(["peers", "--device", "sim", "--only", "resident,ballast", "--shares", "0"], "peers-sim-tiny.json"),
        long(["gpu", "--dry", "--only", "tests"], ""),
        soak(["plans"], ""),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_it_needs_no_tests(given: list[str], written: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_HIDDEN, "utf-8")
    out = [] if given == ["plans"] else ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _START, str(ROOT), *given, *out]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", env=environment)
    said = made.stdout + made.stderr
    assert "ModuleNotFoundError" not in said and "No module named" not in said, said
    if given[0] == "gpu":
        assert "the tests are not part of this install" in said
    elif given[0] != "plans":  # which judges the seconds of a machine that may be busy
        assert made.returncode == 0 and (tmp_path / "out" / written).is_file(), said
