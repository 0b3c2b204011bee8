"""Attention at a rate of its own: counted apart, planned by it, and weights placed by what each group then takes."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from ballast.commands.plan import _named_rates
from ballast.memory import ManagedModel, probe
from ballast.memory.planning.batches import scaled
from ballast.memory.planning.dry_run import dry_run, dry_run_known
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.planning.known_calls import KnownCalls
from ballast.memory.planning.planner import Plan, make_plan
from ballast.memory.planning.room import Room
from ballast.memory.planning.runplan import RunPlan
from ballast.memory.rates import ASSUMED, Rates
from ballast.memory.simulated.attention import never
from streamed_models import SIM, put, run
from torch import nn
from torch.nn import functional

TOKENS, WIDTH, HEADS, BLOCKS = 256, 128, 4, 12
FLOPS = 1e10
PRODUCTS, ATTENTION = 4 * TOKENS * WIDTH**2, 4 * TOKENS**2 * WIDTH  # of a block, and of attention in one


class Block(nn.Module):
    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.attends = attends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.attends:
            heads = inner.view(1, TOKENS, HEADS, -1).transpose(1, 2)
            inner = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return x + self.down(inner)


class Halves(nn.Module):
    """Blocks, of which the second half attends: twice as many operations more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(2 * i >= BLOCKS) for i in range(BLOCKS)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def foreseen(fused: bool = True) -> UnitForecast:
    with torch.device("meta"):
        module = Halves()

    def call(device: torch.device) -> None:
        module(torch.zeros(1, TOKENS, WIDTH, device=device))

    return dry_run({"dit": module}, call, fuses=None if fused else never)[0].units["dit"]


def test_attention_is_counted_apart_and_by_module() -> None:
    work = foreseen()
    assert work.operations == Operations(BLOCKS * PRODUCTS, BLOCKS / 2 * ATTENTION)
    found = dict(work.modules)
    assert found["blocks.0.up"] == found["blocks.11.down"] == Operations(PRODUCTS / 2)
    assert found["blocks.11.up"] == Operations(PRODUCTS / 2, ATTENTION)
    parts = foreseen(fused=False)
    assert parts.operations == Operations(work.operations.total), "without a kernel it is made of products"
    twice = scaled(Forecast(0, {"dit": work}), 2).units["dit"]
    assert twice.operations == work.operations * 2
    assert dict(twice.modules)["blocks.11.up"] == Operations(PRODUCTS, 2 * ATTENTION)


def test_both_survive_a_file_and_older_ones_are_made_anew() -> None:
    forecast = Forecast(0, {"dit": foreseen()})
    data = json.loads(json.dumps(forecast.to_dict()))
    assert Forecast.from_dict(data) == forecast
    facts = data["units"]["dit"]
    older = {**facts, "operations": 7.0, "modules": [[path, 1.0] for path, _ in facts["modules"]]}
    negative = {**facts, "operations": {"products": 1.0, "attention": -1.0}}
    for damaged in (older, negative, {**facts, "modules": older["modules"]}, {**facts, "operations": {"products": 1}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Forecast.from_dict({**data, "units": {"dit": damaged}})


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)[:, None]
        return self.last(functional.scaled_dot_product_attention(x, x, x))


def encoded(known: KnownCalls, tokens: int) -> UnitForecast:
    """Of one text, by the calls that are known."""
    unit = ManagedModel("encoder", "text_encoder", lambda: Encoder().to("meta"))

    def encode(device: torch.device, modules: Mapping[str, nn.Module]) -> None:
        modules["encoder"](torch.ones(1, tokens, dtype=torch.long, device=device))

    return dry_run_known([unit], {"encoder": known}, encode)[0].units["encoder"]


def test_attention_of_a_call_between_two_known_ones_is_between_theirs() -> None:
    known = KnownCalls()
    low, high = encoded(known, 10), encoded(known, 70)
    assert [each.operations.attention for each in (low, high)] == [4 * 10**2 * WIDTH, 4 * 70**2 * WIDTH]
    known = KnownCalls.from_dict(json.loads(json.dumps(known.to_dict())))
    half = encoded(known, 40)
    assert len(known) == 2 and half.operations == (low.operations + high.operations) * 0.5
    assert sum((done for _, done in half.modules), Operations()) == half.operations


def placed(work: UnitForecast, rates: Rates, room: int, sim: ModuleType) -> tuple[float, Plan]:
    """Seconds of a steady step on the card that is there, what stays chosen by these rates; and the plan by them."""
    module = Halves()
    unit = ManagedModel.from_module("dit", "transformer", module)
    unit.learn(work.call_order)
    sizes = sizes_of(unit)
    plan = make_plan("dit", sizes, work, Room(room + work.peak_bytes, 2**30), rates)
    placement = put(module, room, sizes.loads(work, rates), calls=work.call_order)
    x = torch.zeros(1, TOKENS, WIDTH, device=SIM)
    for _ in range(3):
        run(module, x)
    sim.reset_stats()
    run(module, x)
    start, steps = sim.stats().clock_seconds, 10
    sim.reset_stats()
    for _ in range(steps + 1):
        run(module, x)
    assert sim.stats().hazards == 0
    placement.remove()
    return (sim.stats().clock_seconds - start) / steps, plan


def test_what_streams_is_chosen_by_the_seconds_of_attention(sim: ModuleType) -> None:
    """Where attention is 3 times slower, copies hide behind it: what computes little stays."""
    work, nbytes = foreseen(), BLOCKS * 2 * WIDTH**2 * 4
    copied_in = 3 * work.operations.total / FLOPS  # seconds, of all weights
    sim.enable(total="1GB", tflops=FLOPS / 1e12, attention_tflops=FLOPS / 3e12, h2d_gbps=nbytes / copied_in / 1e9)
    rates, room = probe.rates(torch.device(SIM)), nbytes * 5 // 8
    seconds, plan = placed(work, rates, room, sim)
    assert plan.placement == "streamed" and plan.step_seconds == pytest.approx(seconds, rel=0.01)
    assert seconds == pytest.approx((work.operations.products + 3 * work.operations.attention) / FLOPS, rel=0.01)
    attending = sum(2 * group >= plan.groups for group in plan.streamed)
    assert attending >= 3 * (len(plan.streamed) - attending)
    as_products, wrong = placed(work, replace(rates, attention=0.0), room, sim)
    assert as_products > 1.1 * seconds and wrong.step_seconds < 0.95 * as_products


def test_what_is_resident_takes_the_seconds_of_both() -> None:
    work, rates = foreseen(), Rates(25e9, 10e9, 3e9, FLOPS, float32=FLOPS, attention=FLOPS / 3)
    sizes = sizes_of(ManagedModel.from_module("dit", "transformer", Halves()))
    plan = make_plan("dit", sizes, work, Room(2**30, 2**30), rates)
    assert plan.placement == "resident"
    assert plan.step_seconds == pytest.approx((work.operations.products + 3 * work.operations.attention) / FLOPS)


def test_plans_tell_the_rate_of_attention_where_it_was_measured() -> None:
    rates = Rates(25e9, 10e9, 3e9, 100e12, "measured", attention=72e12)
    for known, words in ((rates, "100.0 TFLOPS (72.0 in attention), measured."), (ASSUMED, "60.0 TFLOPS, assumed.")):
        assert RunPlan("flux", SIM, "", 1, 0, known, ()).basis().endswith(f"3.0 GB/s from disk and {words}")


def test_a_rate_of_products_that_is_named_is_that_of_attention_too() -> None:
    options = Namespace(h2d_gbps=None, disk_gbps=None, tflops=20.0)
    named = _named_rates(Rates(25e9, 10e9, 3e9, 100e12, "measured", attention=72e12), options)
    assert named.operations_in("BF16") == named.attention_in("BF16") == 20e12
