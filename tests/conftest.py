"""Import the pack as `ballast` from this checkout, whatever folder it lies in."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from host import can_run_host, find_host
from node_runner import use_modules

ROOT = Path(__file__).resolve().parents[1]

# The tests must see the working tree, installed or not; ComfyUI itself loads the folder under another name still.
_spec = importlib.util.spec_from_file_location("ballast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
assert _spec and _spec.loader
sys.modules["ballast"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["ballast"])

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tiny models: more threads only wait for each other

# The nodes import the host's modules: a real ComfyUI's where this Python can run one, else the stand-ins.
HOST = find_host() if can_run_host() else None
_base = tempfile.TemporaryDirectory(prefix="ballast_tests_")
use_modules(HOST, _base.name)


@pytest.fixture(autouse=True, scope="module")
def _quick_gc() -> Iterator[None]:
    """Collecting garbage, which most tests do, takes little time: what the imports made is left out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own embedding cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny pipeline, written when first asked for. Not to be changed by tests."""
    import tiny

    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else tiny.save(name, root / name)

    return folder


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """The simulated accelerator, large and empty, with counters at zero."""
    from ballast.memory import manager, simulated

    if reason := simulated.supported():
        pytest.skip(reason)
    simulated.enable(total="4GB")
    manager("sim").limit()
    manager("sim").timeline.clear()
    yield simulated
    manager("sim").free()
    gc.collect()
    assert simulated.stats().allocated_bytes == 0, "the test left something on the device"
