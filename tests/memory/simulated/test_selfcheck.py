"""The simulated accelerator's check of itself: it finds what does not work, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.simulated import card as state
from ballast.memory.simulated import clock, selfcheck, tensor
from places import TESTS

aten = torch.ops.aten
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "views": (tensor.handlers, "t.default", lambda func, args, kwargs: args[0]),
    "writes in place": (tensor.handlers, "clamp_.default", lambda func, args, kwargs: args[0]),
    "modules": (tensor.SimTensor, "__tensor_flatten__", None),
    "copies": (state.Card, "transfer", lambda *args: None),
    "bytes": (state.Card, "allocate", lambda self, nbytes: state.Allocation(self, 0, self.freed)),
    "streams and events": (clock.Event, "elapsed_time", lambda self, end: 0.0),
}


@pytest.fixture
def plant(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def planting(name: str) -> None:
        where, what, fault = FAULTS[name]
        if where is tensor.handlers:
            packet, _, overload = what.partition(".")
            monkeypatch.setitem(where, getattr(getattr(aten, packet), overload), fault)
        elif fault is None:
            monkeypatch.delattr(where, what)
        else:
            monkeypatch.setattr(where, what, fault)

    return planting


def test_what_stays_is_found(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.Allocation, "__del__", lambda self: None)
    assert "bytes stay when all is gone" in str(selfcheck.first_failure(state.card.device))


@pytest.mark.eager  # a card is checked when it is registered, before it is told how to copy
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(plant: Callable[[str], None], name: str) -> None:
    assert selfcheck.first_failure(state.card.device) is None
    plant(name)
    found = selfcheck.first_failure(state.card.device)
    assert found and "\n" not in found
    assert found.startswith(f"{name}: "), found


@pytest.mark.eager
def test_it_is_quick_and_leaves_no_trace(sim: ModuleType) -> None:
    held = torch.ones(3).to("sim")
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        before = sim.stats(), state.card, state.card.timed, clock.default_stream.ready, torch.get_rng_state().tolist()
        start = time.process_time()
        assert selfcheck.first_failure(state.card.device) is None
        assert time.process_time() - start < 0.3
        after = sim.stats(), state.card, state.card.timed, clock.default_stream.ready, torch.get_rng_state().tolist()
        assert after == before
        assert torch.is_inference_mode_enabled()
    del held


FAULTY = (
    "import conftest, sys\n"
    "from ballast.memory import simulated\n"
    "from ballast.memory.simulated import clock\n"
    "clock.Event.elapsed_time = lambda self, end: 0.0\n"
)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    here = TESTS
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=here)


def test_asking_whether_it_works_gives_it_no_size() -> None:
    result = run(
        "import conftest\n"
        "from ballast.memory import simulated\n"
        "from ballast.memory.accelerator import Accelerator, resolve_device\n"
        "assert simulated.supported() is None and not simulated.is_enabled()\n"
        "print(Accelerator(resolve_device('sim')).total_bytes(), simulated.is_enabled())"
    )
    assert result.stdout.split() == [str(256 * 2**20), "True"], result.stderr


def test_where_it_fails_the_device_is_refused_and_all_else_works() -> None:
    result = run(
        FAULTY + "import torch\n"
        "said = []\n"
        "for _ in range(2):\n"
        "    try: simulated.enable()\n"
        "    except RuntimeError as error: said.append(str(error))\n"
        "assert said[0] == said[1] == simulated.supported(), said\n"
        "assert not simulated.is_enabled()\n"
        "clock.Event.elapsed_time = None\n"  # since it is not tried again
        "assert said[0] == simulated.supported()\n"
        "try: torch.zeros(1, device='sim')\n"
        "except (NotImplementedError, RuntimeError): said.append('no kernels')\n"
        "assert not torch.ones(1).is_pinned() and torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward() is None\n"
        "print(*said[1:], sep='\\n')"
    )
    assert result.returncode == 0, result.stderr
    reason, kernels = result.stdout.splitlines()
    assert "does not work on torch" in reason and "streams and events: " in reason
    assert kernels == "no kernels"


@pytest.mark.long
def test_the_demo_goes_on_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "demo.png"
    result = run(
        FAULTY + "import ballast.commands.main\nsys.exit(ballast.commands.main.main(sys.argv[1:]))",
        "demo", "--device", "sim", "--steps", "2", "--out", str(out), "--timeline", str(tmp_path / "timeline.png"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert out.stat().st_size
    (line,) = [line for line in result.stdout.splitlines() if "CPU" in line]
    assert line.startswith("The demo runs on the CPU: the simulated accelerator does not work on torch")
