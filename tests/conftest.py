"""What all tests share: the pack from this checkout, caches of their own, the simulated card."""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
from host import can_run_host, find_host
from import_pack import import_pack
from node_runner import use_modules

import_pack()
settings.register_profile("ballast", deadline=None)  # how long a test takes says nothing: see `bench`
settings.load_profile("ballast")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tiny models: more threads only wait for each other

if copies := os.environ.get("BALLAST_COPIES"):  # "cuda" or "xpu": the simulated card is lazy in all tests
    from ballast.memory import simulated

    simulated.enable = functools.partial(simulated.enable, copies=copies)

# The nodes import the host's modules: a real ComfyUI's where this Python can run one, else the stand-ins.
HOST = find_host() if can_run_host() else None
_base = tempfile.TemporaryDirectory(prefix="ballast_tests_")
os.environ["XDG_CACHE_HOME"] = str(Path(_base.name) / "cache")  # of what runs outside of any one test
use_modules(HOST, _base.name)


os.environ.setdefault("BALLAST_CRASHES", _base.name)  # where workers write what they crash of: of their parent


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A crash tells where the thread was that crashed, which is lost among many that only wait."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        faulthandler.enable(open(crash_file(worker), "w"), all_threads=False)  # noqa: SIM115
    elif fault_handler_stderr_fd_key in config.stash:
        faulthandler.enable(config.stash[fault_handler_stderr_fd_key], all_threads=False)


def crash_file(worker: str) -> Path:
    return Path(os.environ["BALLAST_CRASHES"]) / f"crash_{worker}.txt"


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    """A worker's crash is told with the place, at the end, where all failures are."""
    if (file := crash_file(report.node.gateway.id)).is_file():
        report.longrepr = "\n".join([str(report.longrepr), *file.read_text().splitlines()[:30]])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make check` runs the long tests with BALLAST_LONG=1. `make soak` runs the longest with BALLAST_SOAK=1, and takes
    more values in others. Tests at published size run with BALLAST_SOAK=full."""
    if os.environ.get("BALLAST_SOAK") != "full":
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="takes hours: with BALLAST_SOAK=full"))
    if os.environ.get("BALLAST_SOAK"):
        return
    skipped = {"soak": "make soak"} if os.environ.get("BALLAST_LONG") else {"long": "make check", "soak": "make soak"}
    for item in items:
        for mark, where in skipped.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"takes long: in {where}"))


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


@pytest.fixture(autouse=True)
def _no_cached_copies() -> Iterator[None]:
    """Each test begins without what the pipelines of earlier ones have left in RAM."""
    from ballast.memory.memory_manager import managers
    from ballast.memory.vocabulary import ROLES

    for manager in managers():
        with manager._lock:
            manager._residency.host_cache.drop_cached(ROLES)
    yield


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
    assert not manager("sim").timeline.is_in_stage, "a stage of the test has not ended"


@pytest.fixture
def card(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The simulated accelerator as the device of a real ComfyUI in this process."""
    if HOST is None:
        pytest.skip("no ComfyUI in this Python: run with its own, such as ~/host-venv/bin/python -m pytest")
    from comfy import model_management as mm
    from sim_device_pack.switch import switch

    switch("64MB", monkeypatch.setattr)
    sim.reset_stats()
    yield sim
    with torch.inference_mode():
        mm.unload_all_models()
