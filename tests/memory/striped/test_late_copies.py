"""Stripes on a card that copies as late as it may, and on one that copies slowly when memory runs out in a stripe."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import striped_vaes
import torch
from ballast.memory import striped
from ballast.memory.striped import filling, passes

SHAPES = {"flux": (1, 16, 6, 4), "sd": (2, 4, 4, 3), "wan": (1, 4, 2, 3, 3)}


def build(name: str, times: int = 1) -> Any:
    """A VAE on the device, and latents so many times as high and as wide as told."""
    *outer, height, width = SHAPES[name]
    vae, _ = striped_vaes.build(name)
    return vae.to("sim"), torch.randn(*outer, times * height, times * width, generator=torch.manual_seed(0))


def decode(vae: Any, latents: torch.Tensor, budget: int) -> torch.Tensor:
    if hasattr(vae, "clear_cache"):
        vae.clear_cache()
    with torch.inference_mode():
        return striped.run(lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=budget)


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("flux", "cuda"),
        ("sd", "xpu"),
        pytest.param("wan", "cuda", marks=pytest.mark.long),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("flux", "xpu"), ("sd", "cuda"), ("wan", "xpu"))),
    ],
)
def test_pictures_are_the_same_however_late_copies_are_made(name: str, copies: str, sim: ModuleType) -> None:
    sim.enable(total="1GB")
    vae, latents = build(name)
    expected = decode(vae, latents, 60_000)
    sim.enable(total="1GB", copies=copies)
    assert torch.equal(decode(vae, latents, 60_000), expected)
    stats = sim.stats()
    assert stats.hazards == 0 and stats.h2d_count > 100 and stats.d2h_count > 50


def _out_of_memory(
    copies: str, times: int, budgets: tuple[int, ...], runs: int, sim: ModuleType, patch: pytest.MonkeyPatch
) -> int:
    """How often room was made, with memory run out in so many of the stripes of a decode, one each time."""
    made, relieve, planted, at, relieved = passes._made, filling.InBlocks.relieve, 0, 0, 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal at
        at += 1
        if at == planted:
            raise torch.OutOfMemoryError("planted")
        return made(*args)

    def told(self: filling.InBlocks) -> bool:
        nonlocal relieved
        found = relieve(self)
        relieved += found
        return found

    patch.setattr(passes, "_made", counted)
    patch.setattr(filling.InBlocks, "relieve", told)
    sim.enable(total="1GB", copies=copies, h2d_gbps=0.0005, d2h_gbps=10, tflops=10)
    vae, latents = build("flux", times)
    for budget in budgets:
        planted = at = 0
        expected = decode(vae, latents, budget)
        count = at
        for planted in range(2, count, max(1, count // runs)):
            at = 0
            found = decode(vae, latents, budget)
            assert at >= planted
            assert sim.stats().hazards == 0, (budget, planted)
            assert float((found - expected).abs().max()) < 1e-4, (budget, planted)
    return relieved


@pytest.mark.parametrize("copies", ["cuda"])
def test_rows_under_way_do_no_harm_when_memory_runs_out(
    copies: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _out_of_memory(copies, 1, (150_000,), 5, sim, monkeypatch) > 0


@pytest.mark.soak
@pytest.mark.parametrize("copies", ["cuda", "xpu"])
def test_rows_under_way_do_no_harm_in_whatever_stripe_memory_runs_out(
    copies: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _out_of_memory(copies, 2, (300_000, 600_000), 25, sim, monkeypatch) > 0
