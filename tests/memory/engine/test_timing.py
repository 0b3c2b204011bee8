"""The seconds of calls with all weights on the device, on the clock of the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from ballast.memory.engine.engine import Engine
from streamed_models import Blocks, nbytes, noise, resident_engine
from torch import nn


@pytest.fixture
def module(sim: ModuleType) -> nn.Module:
    sim.enable(total="1GB", tflops=1e-6)
    return Blocks(3)


@pytest.fixture
def engine(module: nn.Module) -> Iterator[Engine]:
    engine = resident_engine(module)
    engine.place()
    yield engine
    engine.remove()


def call(engine: Engine, rows: int, failed: bool = False) -> tuple[bool, float]:
    """Whether a call was timed, and the seconds that it takes."""
    engine.complete()
    timed = engine.time_call()
    before = torch.sim.current_stream().ready
    with torch.inference_mode():
        engine.module(noise(rows))
    engine.rest(failed)
    return timed, torch.sim.current_stream().ready - before


def test_the_call_after_the_first_is_timed_once(engine: Engine) -> None:
    assert not call(engine, 500)[0], "it may have chosen kernels, and brought weights"
    torch.sim.synchronize()
    timed, seconds = call(engine, 300)
    assert timed and engine.take_seconds() is None, "the device is not done with it"
    assert not call(engine, 200)[0], "nobody has asked for the last one"
    torch.sim.synchronize()
    measured = engine.take_seconds() or pytest.fail("it was timed")
    assert sum(measured.seconds) + measured.before_seconds == pytest.approx(seconds, rel=0.01)
    expected = [group.seconds for group in engine.layout.loads.groups]
    assert [each / sum(measured.seconds) for each in measured.seconds] == pytest.approx(
        [each / sum(expected) for each in expected]
    )
    assert engine.take_seconds() is None


def test_calls_that_failed_compiled_or_left_tell_nothing(engine: Engine, module: nn.Module) -> None:
    def timed() -> bool:
        torch.sim.synchronize()
        return engine.take_seconds() is not None

    call(engine, 10)
    call(engine, 10, failed=True)
    assert not timed()
    call(engine, 10)
    assert not timed(), "the first since then"
    call(engine, 10)
    assert timed()
    call(engine, 10)
    assert engine.shrink(nbytes(module)) > 0
    assert not timed()
    call(engine, 10)
    assert not timed(), "it brought weights again"
    engine.complete()
    assert engine.time_call()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    engine.rest()
    assert not timed()
    call(engine, 10)
    assert timed()


def test_a_module_that_runs_on_the_cpu_is_not_timed(sim: ModuleType) -> None:
    engine = Engine(Blocks(2), torch.device("cpu"))
    engine.place()
    for _ in range(2):
        engine.complete()
        assert not engine.time_call()
        with torch.inference_mode():
            engine.module(noise().cpu())
        engine.rest()
    engine.remove()
