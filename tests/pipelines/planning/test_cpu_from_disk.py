"""On the CPU with less RAM than the model: layer by layer from disk, as planned, and equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import manager
from ballast.memory.errors import DoesNotFitError
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.planner import least_ram_on_cpu

RUN: dict[str, Any] = {"width": 64, "height": 64, "steps": 3}


@pytest.mark.parametrize(
    "family", ["sd3", pytest.param("flux", marks=pytest.mark.soak), pytest.param("wan", marks=pytest.mark.long)]
)
def test_runs_in_the_least_ram_as_planned(family: str, tiny_folders: Callable[[str], Path]) -> None:
    run = RUN | ({"frames": 5} if family == "wan" else {})
    folder, on = tiny_folders(family), manager("cpu")
    whole = ballast.open_pipeline(folder, device="cpu")
    cond = whole.encode("a boat")
    expected = whole.sample(cond, **run)
    picture = whole.decode(expected)
    plan = whole.plan(strategy="cpu", ram="1GB", **run)
    assert plan.fits and not plan.sampling.read_bytes and "of RAM" in str(plan)
    (unit,) = whole.denoisers
    least = max(least_ram_on_cpu(sizes_of(each)) for each in [*whole.encoders, *whole.denoisers, whole.decoder])
    del whole
    on.free()

    pipe = ballast.open_pipeline(folder, device="cpu", ram=least)
    plan = pipe.plan(cond=cond, strategy="cpu", **run)
    sampling = plan.sampling
    assert plan.fits and plan.peak_vram_bytes == 0, str(plan)
    assert sampling.ram_bytes <= least < unit.size_bytes
    assert sampling.read_bytes > 0 and "are read from disk in each step" in str(plan)
    held: list[int] = []
    read: list[int] = []

    def watch(*_: Any) -> None:
        held.append(on.report().host_bytes)
        read.append(on.report().disk_bytes_read)

    latents = pipe.sample(cond, **run, on_step=watch)
    assert torch.equal(latents, expected)
    assert max(held) == sampling.ram_bytes
    assert on.timeline.stages[-1].planned.units[0].read_bytes == sampling.read_bytes
    calls = 2 if read[2] - read[1] > 1.5 * sampling.read_bytes else 1
    assert read[2] - read[1] == pytest.approx(calls * sampling.read_bytes, rel=0.05)
    assert torch.equal(pipe.decode(latents), picture)
    again = pipe.encode("a boat by night")
    assert on.report().host_bytes <= least
    del pipe
    on.free()
    whole = ballast.open_pipeline(folder, device="cpu")
    for name, tensor in whole.encode("a boat by night").tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


def test_less_than_the_least_is_refused_in_one_line(tiny_folders: Callable[[str], Path]) -> None:
    whole = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    cond = whole.encode("a boat")
    least = least_ram_on_cpu(sizes_of(whole.denoisers[0]))
    del whole
    manager("cpu").free()
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu", ram=least - 1)
    assert not pipe.plan(cond=cond, strategy="cpu", **RUN).samples
    with pytest.raises(DoesNotFitError, match="nothing fits .* of RAM.*Raise the ram budget to") as why:
        pipe.sample(cond, **RUN)
    assert "\n" not in str(why.value)
    why.value.__traceback__ = None
