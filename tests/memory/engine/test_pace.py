"""A device that pages silently: no error, but calls that take many times what was planned, until less stays there."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory.accelerator import is_wddm
from ballast.memory.engine import streams as queues
from ballast.memory.engine.streams import Queues
from ballast.memory.planning.oom_fallback import next_share
from ballast.memory.simulated import card, clock
from streamed_models import SIM

STEPS = 6


@pytest.mark.parametrize(
    ("share", "seconds", "planned", "before", "following"),
    [
        (1.0, 1.9, 1.0, None, None),
        (1.0, 2.1, 1.0, None, 0.5),
        (0.5, 5.0, 1.0, 9.0, 0.25),
        (0.25, 5.0, 1.0, 9.0, 0.0),
        (0.0, 5.0, 1.0, 9.0, None),
        (0.5, 5.0, 1.0, 5.0, 1.0),  # that was of no use
        (0.5, 1.5, 1.0, 9.0, None),
        (1.0, 5.0, 0.0, None, None),  # nothing is known of it
    ],
)
def test_share_falls_while_calls_are_slow_and_that_helps(
    share: float, seconds: float, planned: float, before: float | None, following: float | None
) -> None:
    assert next_share(share, seconds, planned, before) == following


def test_windows_manages_its_cards() -> None:
    windows, linux, wsl = (
        ("win32", "10"),
        ("linux", "6.8.0-45-generic"),
        ("linux", "5.15.153.1-microsoft-standard-WSL2"),
    )
    assert [is_wddm("cuda", *each) for each in (windows, linux, wsl)] == [True, False, True]
    assert [is_wddm(kind, *each) for kind in ("cpu", "xpu") for each in (windows, wsl)] == [False] * 4


@pytest.mark.parametrize("flushes", [True, False])
def test_queued_copies_are_flushed_where_they_would_wait(
    flushes: bool, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(queues, "is_wddm", lambda kind: flushes)
    monkeypatch.setattr(torch.sim.Stream, "query", lambda stream: asked.append(stream))
    queue = Queues(torch.device(SIM))
    target = torch.empty(8, dtype=torch.uint8, device=SIM)
    queue.copy(target, torch.ones(8, dtype=torch.uint8), (), queue.event())
    assert asked == [queue.copying] * flushes


@pytest.fixture
def sampled(tiny_folders: Callable[[str], Path], sim: ModuleType) -> Callable[..., tuple[torch.Tensor, list[float]]]:
    """Samples on a card that may page; gives the latents, and the seconds of each step but the first."""
    family = tiny.FAMILIES["sd3"]
    sim.enable(total="1GB", h2d_gbps=0.1, tflops=5e-3)
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim", vram="1GB")
    cond = pipe.encode("a red boat", "blurry", **family.encode_kwargs)
    size: dict[str, Any] = {"width": family.size[0], "height": family.size[1], "guidance": family.guidance}
    peak = pipe.plan(**size, steps=STEPS, cond=cond).sampling.peak_vram_bytes

    def sample(pages: float | None) -> tuple[torch.Tensor, list[float]]:
        above = None if pages is None else int(pages * peak)
        sim.enable(total="1GB", h2d_gbps=0.1, tflops=5e-3, pages_above=above)
        ends: list[float] = []

        def waiting(*_: Any) -> None:
            torch.sim.synchronize()
            ends.append(sim.stats().clock_seconds)

        result = pipe.sample(cond, **size, steps=STEPS, seed=0, on_step=waiting)
        return result, [end - begin for begin, end in itertools.pairwise(ends)]

    return sample


def test_step_after_a_paged_one_is_near_its_plan(
    sampled: Callable[..., tuple[torch.Tensor, list[float]]], caplog: pytest.LogCaptureFixture
) -> None:
    expected, plain = sampled(None)
    with caplog.at_level(logging.WARNING, "ballast"):
        latents, seconds = sampled(0.76)
    planned = plain[0]
    assert torch.equal(latents, expected)
    assert seconds[0] > 2 * planned
    assert seconds[1] < 1.5 * planned, "it brings its weights anew"
    assert max(seconds[2:]) < 1.25 * planned
    assert len([record for record in caplog.records if "paged" in record.message]) == 1


def test_what_is_slow_for_another_reason_keeps_its_room(
    sampled: Callable[..., tuple[torch.Tensor, list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try with less, which is of no use; then as planned, and nothing is learned of paging."""
    expected, plain = sampled(None)
    for name, operations in list(clock.OPERATIONS.items()):
        slow = functools.partial(lambda made, *each: made(*each) * (1 if card.card.dry else 4), operations)
        monkeypatch.setitem(clock.OPERATIONS, name, slow)
    latents, seconds = sampled(2.0)
    assert torch.equal(latents, expected)
    assert seconds[-1] == pytest.approx(4 * plain[0], rel=0.01)
