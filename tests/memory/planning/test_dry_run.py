"""Dry runs: any process can run a model on shapes; small values stay known, bytes and operations are counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from ballast.memory.planning.dry_run import dry_run
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.simulated.card import Card
from ballast.memory.simulated.dry import dry_card
from ballast.memory.simulated.shapes import KEPT_BYTES
from ballast.memory.weights.unit import ManagedModel
from diffusers.models.embeddings import PatchEmbed
from places import TESTS
from torch import nn


@pytest.fixture
def card() -> Iterator[Card]:
    with torch.inference_mode(), dry_card() as card:
        yield card


def test_small_values_are_known_and_large_ones_are_not(card: Card) -> None:
    small = torch.arange(4, device="meta") * 2
    assert small.tolist() == [0, 2, 4, 6]
    assert small.device.type == "meta"
    assert [int(step) for step in small] == [0, 2, 4, 6]
    assert torch.tensor([small[1], small[2]]).tolist() == [2, 4]
    assert (small == 4).nonzero().item() == 2
    large = torch.ones(3000, 2000, device="meta")
    assert card.allocated_bytes() == 4 * 3000 * 2000 + small.nbytes
    positive = large > 0
    for needs_values in (large.sum().item, large.long().cpu, positive.nonzero, positive.tolist):
        with pytest.raises(RuntimeError, match="dry run"):
            needs_values()
    with pytest.raises(RuntimeError, match="dry run"):
        large[positive]
    assert large.cpu().shape == large.shape, "the host gets zeros for floats that are not known"
    known = torch.tensor([True, False, True], device="meta")
    assert torch.ones(3, 2_000_000, device="meta")[known].shape == (2, 2_000_000)
    assert small[[0, -1]].tolist() == [0, 6]
    assert torch.from_numpy(torch.ones(2).numpy()).to("meta", torch.float64).tolist() == [1, 1]
    small += 1
    assert small.tolist() == [1, 3, 5, 7]
    with torch.autocast("meta", torch.float32):
        assert small.sum().item() == 16
    del needs_values, large, positive, known
    assert card.allocated_bytes() == small.nbytes


def test_large_tables_of_a_module_keep_their_shapes_and_cost_nothing() -> None:
    """Stable Diffusion 3.5 Medium has positions of 384 x 384 tokens."""
    patches = PatchEmbed(32, 32, 2, 4, embed_dim=64, pos_embed_max_size=160)
    assert patches.pos_embed.nbytes > KEPT_BYTES
    patches.proj.to("meta")
    seen = []

    def run(device: torch.device) -> None:
        seen.append(patches(torch.zeros(1, 4, 16, 16, device=device)).shape)

    forecast, _ = dry_run({"patches": patches}, run)
    assert seen == [(1, 64, 64)]
    assert forecast.units["patches"].working_bytes < KEPT_BYTES


def test_what_is_on_the_host_is_not_counted(card: Card) -> None:
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert noise.device.type == "cpu"
    assert card.allocated_bytes() == 0
    moved = noise.to("meta")
    assert card.allocated_bytes() == noise.nbytes
    torch.testing.assert_close(moved.cpu(), noise)
    with pytest.raises(RuntimeError, match="same device"):
        moved + noise


def test_simulated_device_is_as_it_was(sim: Any) -> None:
    kept = torch.ones(4, device="sim")
    before, stream = sim.stats(), torch.sim.current_stream()  # type: ignore[attr-defined]
    ready = stream.ready
    with torch.inference_mode(), dry_card():
        torch.ones(1000, 1000, device="meta") @ torch.ones(1000, 1000, device="meta")
    assert sim.stats() == before
    assert (torch.sim.current_stream(), stream.ready) == (stream, ready)  # type: ignore[attr-defined]
    assert kept.tolist() == [1, 1, 1, 1]
    with pytest.raises(NotImplementedError):
        torch.ones(2, device="meta").tolist()


def test_no_device_is_registered_in_a_process_that_only_plans() -> None:
    code = (
        "import conftest, torch\n"
        "from ballast.memory.simulated.dry import dry_card\n"
        "with torch.inference_mode(), dry_card() as card: torch.ones(8, device='meta').add(1)\n"
        "assert card.peak_bytes() == 64\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Tables(nn.Module):
    """A block that keeps a table from its first call, as models keep their rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.zeros(1000, 64, device=x.device)
        x = x[: int(mask.sum())]
        for block in self.blocks:
            x = block(x)
        return x + self.table[: len(x)]


def test_calls_are_told_apart_by_their_masks_and_tables_count_once() -> None:
    unit = ManagedModel("dit", "transformer", lambda: Tables().to("meta"))
    module = unit.skeleton()
    runs = []

    def run(device: torch.device) -> None:
        for ones in (8, 4, 8, 4, 8):
            mask = (torch.arange(8, device=device) < ones).long()[None]
            runs.append(module(torch.zeros(8, 64, device=device), mask).shape)

    forecast, _ = dry_run({"dit": module}, run)
    dit = forecast.units["dit"]
    assert runs == [(8, 64), (4, 64), (8, 64), (4, 64), (8, 64)]
    assert dit.calls == 5
    assert dit.operations == Operations(3 * 2 * 64 * 64 * (8 + 4 + 8 + 4 + 8))
    assert dit.modules == (
        ("", Operations()),
        *((f"blocks.{i}", Operations(dit.operations.products / 3)) for i in range(3)),
    )
    assert dit.call_order.order == ("blocks.0", "blocks.1", "blocks.2")
    row = 64 * 4
    assert dit.live_bytes == 8 * row + 8 * 8
    assert dit.working_bytes == (1000 + 16) * row, "the table once, what goes into a block and what comes out of it"


def test_full_size_flux_takes_no_memory_and_says_what_it_works_in() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return diffusers.FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)

    module = ManagedModel("flux", "transformer", build).skeleton()

    def run(device: torch.device) -> None:
        with device:
            module(
                hidden_states=torch.empty(1, 4096, 64, dtype=torch.bfloat16),
                encoder_hidden_states=torch.empty(1, 512, 4096, dtype=torch.bfloat16),
                pooled_projections=torch.empty(1, 768, dtype=torch.bfloat16),
                timestep=torch.ones(1, dtype=torch.bfloat16),
                guidance=torch.ones(1),
                img_ids=torch.zeros(4096, 3),
                txt_ids=torch.zeros(512, 3),
            )

    forecast, _ = dry_run({"flux": module}, run)
    assert forecast.units["flux"].working_bytes == pytest.approx(468 * 2**20, rel=0.02)
    assert forecast.units["flux"].operations.total == pytest.approx(74.4e12, rel=0.01)


def test_what_is_held_when_each_module_is_called() -> None:
    """The input, what a caller holds besides, and in a second call what the first has given."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.inside = nn.Linear(8, 64), nn.Linear(64, 8), nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(self.narrow(self.wide(x)))

    with torch.device("meta"):
        module = Pair()
    row = 4 * 8

    def twice(device: torch.device) -> None:
        first = module(torch.ones(3, 8, device=device))
        module(first + 1)

    forecast, _ = dry_run({"pair": module}, twice)
    work = forecast.units["pair"]
    # The second call finds what the first has given, whose own input is gone.
    held = {"": 3 * row, "wide": 3 * row, "narrow": 3 * (row + 8 * row), "inside": 6 * row, "inside.0": 6 * row}
    assert dict(work.held) == held
    assert Forecast.from_dict(forecast.to_dict()) == forecast


@pytest.mark.parametrize(
    ("decoding", "first", "working"),
    [
        ((), 80, 100),
        ((("a", 20),), 80, 100),
        ((("a", 60),), 110, 110),
        ((("b", 5),), 95, 100),
        ((("b", 40), ("a", 41)), 130, 130),
        ((("new", 7),), 107, 107),
        ((("", 99),), 99, 100),
    ],
)
def test_decoding_counts_where_it_is_above_the_peak(decoding: Any, first: int, working: int) -> None:
    work = UnitForecast(10, 100, 80, 2, Operations(1.0), held=(("a", 50), ("b", 90)))
    found = work.with_dequantizing(decoding)
    assert (found.live_bytes, found.first_bytes, found.working_bytes) == (10, first, working)
