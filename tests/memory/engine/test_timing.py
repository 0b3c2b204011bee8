"""The seconds of calls of units that are wholly on the device, on the clock of the simulated one."""

from __future__ import annotations

import weakref
from types import ModuleType

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.engine.timing import CallTimes
from torch import nn

SIM = "sim:0"


@pytest.fixture
def unit(sim: ModuleType) -> ManagedModel:
    sim.enable(total="1GB", tflops=1e-6)
    return ManagedModel.from_module("dit", "transformer", nn.Linear(8, 8))


def call(times: CallTimes[str], unit: ManagedModel, rows: int, failed: bool = False) -> float:
    """A call, and the seconds that it takes."""
    times.begins(unit, f"{rows} rows")
    x = torch.ones(rows, 8).to(SIM)
    before = torch.sim.current_stream().ready
    with torch.inference_mode():
        x @ x.T
    times.ended(unit, failed)
    return torch.sim.current_stream().ready - before


def test_the_call_after_the_first_is_timed_once(unit: ManagedModel) -> None:
    times: CallTimes[str] = CallTimes(torch.device(SIM))
    call(times, unit, 500)
    torch.sim.synchronize()
    assert times.take(unit) is None, "it may have chosen kernels"
    call(times, unit, 300)
    assert times.take(unit) is None, "the device is not done with it"
    call(times, unit, 200)  # before anybody asked
    torch.sim.synchronize()
    about, seconds = times.take(unit) or pytest.fail("it was timed")
    assert about == "300 rows"
    assert seconds == pytest.approx(2 * 300 * 300 * 8 / 1e6, rel=0.01)
    assert times.take(unit) is None


def test_calls_that_failed_compiled_or_left_tell_nothing(unit: ManagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    times: CallTimes[str] = CallTimes(torch.device(SIM))

    def timed() -> bool:
        torch.sim.synchronize()
        return times.take(unit) is not None

    call(times, unit, 10)
    call(times, unit, 10, failed=True)
    assert not timed()
    call(times, unit, 10)
    assert not timed(), "the first since then"
    call(times, unit, 10)
    times.forget(unit)
    assert not timed()
    call(times, unit, 10)
    assert not timed()
    times.begins(unit, "compiling")
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    times.ended(unit, False)
    assert not timed()
    call(times, unit, 10)
    assert timed()
    gone = weakref.ref(unit)
    assert len(times._timed) == 0 and gone() in times._warm
