"""Encoded groups that stay decoded while others stream: the same results, bytes as planned, nothing left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import manager, simulated
from ballast.memory.engine.engine import Engine
from ballast.memory.engine.ring import State
from ballast.memory.errors import is_out_of_memory
from ballast.memory.planning.kept_dequantized import moment_bytes
from ballast.memory.planning.measured import Measured
from ballast.memory.planning.solver import GroupLoad, Loads
from ballast.memory.simulated import card
from encoded_folders import Pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import few
from streamed_models import least_bytes, planned_bytes, refit, resident_engine, rests, streamed_engine
from torch.utils._pytree import tree_map_only

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0}
SIM = "sim:0"


class Model:
    """A tiny Flux transformer in Q8_0 whose decoding is most of its work, and what a call of it gives.

    With `blocks` a group is a whole block, of several layers.
    """

    def __init__(self, folder: Path, where: Path, blocks: bool = False) -> None:
        pipe = self.pipe = Pair(folder, ["transformer"], "q8_0", where).open()
        (self.unit,) = pipe.denoisers
        self.arguments: dict[str, Any] = {}
        noted = self.unit.module.register_forward_pre_hook(
            lambda _, given, named: self.arguments.update(tree_map_only(torch.Tensor, torch.Tensor.cpu, named)),
            with_kwargs=True,
        )
        pipe.sample(pipe.encode("a red boat"), **SIZE)
        noted.remove()
        manager("sim").free()
        self.unit.load()
        self.calls = replace(self.unit.calls, blocks=True) if blocks else self.unit.calls
        bare = streamed_engine(self.unit.module, torch.device("cpu"), calls=self.calls)
        self.groups = bare._called
        self.loads = Loads(
            tuple(
                GroupLoad(
                    group.packed_bytes,
                    group.held_bytes,
                    10.0,
                    8.0 * bool(group.codecs),
                    group.plain_bytes - group.held_bytes,
                    moment_bytes(group.codecs),
                )
                for group in self.groups
            ),
            bytes_per_second=sum(group.packed_bytes for group in self.groups) / 20.0,
        )
        self.least = least_bytes(self.unit.module, self.calls)
        most = sum(group.plain_bytes for group in self.groups)
        self.fixed_bytes = bare._outside_bytes
        self.all_decoded = self.fixed_bytes + most + max(moment_bytes(group.codecs) for group in self.groups)
        placement = self.put(self.all_decoded)
        self.expected = self.call()
        placement.remove()

    def put(self, weights_bytes: int) -> Engine:
        """Placed, not called yet: what is to stay decoded does so from the second call on."""
        placement = streamed_engine(
            self.unit.module, torch.device(SIM), weights_bytes, calls=self.calls, loads=self.loads
        )
        placement.place()
        return placement

    def resident_bytes(self, share: float) -> int:
        """Room for all as it is stored, and for a share of what all take more as plain tensors."""
        stored = self.fixed_bytes + sum(group.held_bytes for group in self.groups)
        return int(stored + share * (self.all_decoded - stored))

    def put_resident(self, share: float) -> Engine:
        weights_bytes = self.resident_bytes(share)
        placement = resident_engine(self.unit.module, SIM, None, self.calls, self.loads, weights_bytes)
        placement.place()
        return placement

    def put_and_called(self, weights_bytes: int) -> Engine:
        placement = self.put(weights_bytes)
        rests(placement)
        assert torch.equal(self.call(), self.expected)
        placement.complete()
        return placement

    def call(self) -> torch.Tensor:
        with torch.inference_mode():
            arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(SIM), self.arguments)
            return self.unit.module(**arguments)[0].cpu()

    def budget(self, share: float) -> int:
        return int(self.least + share * (self.all_decoded - self.least))


@pytest.fixture(scope="module", params=[pytest.param("layers", marks=pytest.mark.soak), "blocks"])
def model(
    request: pytest.FixtureRequest, tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Model:
    simulated.enable(total="1GB", h2d_gbps=25)
    return Model(tiny_folders("flux"), tmp_path_factory.mktemp("decoded"), request.param == "blocks")


def decoded(placement: Engine) -> list[Any]:
    return [group for group in placement._groups if group.state is State.DEQUANTIZED]


@pytest.mark.parametrize("share", few([0.0, 0.25, 0.5, 0.75, 1.0], 0.0, 0.5, 1.0))
def test_what_stays_is_decoded_once(model: Model, sim: ModuleType, share: float) -> None:
    sim.take_interval_peak()
    placement = model.put(model.budget(share))
    assert not decoded(placement), "the first call waits for no more than its first group"
    assert torch.equal(model.call(), model.expected)
    sim.take_interval_peak()
    placement.end_call()
    placement.complete()
    rests(placement)
    assert sim.take_interval_peak() <= model.budget(share)
    assert placement.resident_bytes == sim.stats().allocated_bytes
    assert placement.resident_bytes <= planned_bytes(placement) <= model.budget(share)
    assert bool(decoded(placement)) == (share > 0)
    assert bool(placement.layout.copied_bytes) or share > 0.25
    for _ in range(2):
        assert torch.equal(model.call(), model.expected)
    placement.remove()
    assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0
    placement.place()
    assert not decoded(placement)
    assert torch.equal(model.call(), model.expected)
    assert placement.resident_bytes == sim.stats().allocated_bytes
    placement.remove()
    assert sim.stats().allocated_bytes == 0


@settings(
    max_examples=12 if os.environ.get("BALLAST_SOAK") else 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from(["grow", "shrink", "refit"]), st.floats(0, 1)), min_size=1, max_size=8))
def test_budgets_that_change(model: Model, sim: ModuleType, changes: list[tuple[str, float]]) -> None:
    """Between calls and in the middle of a layer's: books are bytes, what a call gives is the same."""
    inside: list[Callable[[], Any]] = []
    layers = [layer for path, layer in model.unit.module.named_modules() if path.endswith("to_q")]
    for layer in layers:

        def forward(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            if inside:
                inside.pop()()
            return type(layer).forward(layer, x)

        layer.forward = forward
    placement = model.put_and_called(model.budget(0.5))
    for i, (change, share) in enumerate(changes):
        amount = int(share * (model.all_decoded - model.least))

        def do(change: str = change, amount: int = amount) -> None:
            if change == "refit":
                refit(placement, model.least + amount, model.loads)
            else:
                getattr(placement, change)(amount)

        if i % 2:
            inside.append(do)
        else:
            do()
        assert torch.equal(model.call(), model.expected)
        inside.clear()
        placement.complete()
        assert placement.resident_bytes == sim.stats().allocated_bytes
        assert placement.resident_bytes <= max(planned_bytes(placement), model.least)
        arrived = {group for group in placement._to_dequantize() if not group.uploads}  # others come in the next call
        assert set(decoded(placement)) == arrived
    placement.remove()
    for layer in layers:
        del layer.forward
    assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0


@pytest.mark.soak
def test_out_of_memory_at_any_allocation(model: Model, sim: ModuleType) -> None:
    for at in range(1, 600):
        placement, left = None, at
        with sim.fail_after(at):
            try:
                placement = model.put(model.budget(0.6))
            except Exception as error:
                assert is_out_of_memory(error), error
            left = card.card.fail_in
        was_hit = left == 0
        if placement is not None and left:
            for group in placement._groups:
                placement._uploads.enter(group)  # as a call does
            with sim.fail_after(left):
                placement.end_call()
                placement.complete()
                refit(placement, model.budget(0.9), model.loads)
                was_hit = card.card.fail_in == 0
        if placement is not None:
            gc.collect()
            assert placement.resident_bytes == sim.stats().allocated_bytes
            assert torch.equal(model.call(), model.expected)
            placement.remove()
        assert sim.stats().allocated_bytes == 0
        if not was_hit:
            return
    raise AssertionError("there are more allocations than were tried")


def test_measured_seconds_are_those_with_decoding(model: Model) -> None:
    placement = model.put_and_called(model.budget(0.5))
    assert 0 < len(decoded(placement)) < len(model.groups)
    found = [10.0 - 8.0 * (group.state is State.DEQUANTIZED) for group in placement._called]

    class Watch:
        runs = False

        def seconds(self) -> dict[Any, float]:
            return {None: 0.5, **dict(zip(placement._called, found, strict=True))}

    placement._watch = Watch()  # type: ignore[assignment]
    measured = placement.take_seconds()
    placement.remove()
    assert isinstance(measured, Measured) and measured.before_seconds == 0.5
    assert set(measured.seconds) == {10.0} and len(measured.seconds) == len(model.groups)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_resident_module_tells_which_groups_are_dequantized(model: Model, sim: ModuleType, share: float) -> None:
    placement = model.put_resident(share)
    assert torch.equal(model.call(), model.expected)
    placement.end_call()
    placement.complete(alone=False)
    assert not placement.dequantized, "another call may be under way"
    placement.complete()
    assert torch.equal(model.call(), model.expected)
    assert placement.resident_bytes == sim.stats().allocated_bytes <= planned_bytes(placement)
    encoded = {i for i, group in enumerate(placement._called) if group.codecs}
    found = {i for i in encoded if all(ref.here is None for ref in placement._called[i].refs)}
    assert placement.dequantized == found <= encoded
    assert (not found, found == encoded) == (share == 0, share == 1)
    refit(placement, 0, model.loads)
    assert not placement.dequantized and torch.equal(model.call(), model.expected)
    placement.remove()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.soak
def test_dequantizing_a_resident_module_fails_at_any_allocation(model: Model, sim: ModuleType) -> None:
    """It stays as it is stored then, as far as it is."""
    encoded = {i for i, group in enumerate(model.groups) if group.codecs}
    for at in range(1, 200):
        placement = model.put_resident(1.0)
        model.call()
        placement.end_call()
        with sim.fail_after(at):
            placement.complete()
            was_hit = card.card.fail_in == 0
        assert placement.is_whole and placement.resident_bytes == sim.stats().allocated_bytes
        assert torch.equal(model.call(), model.expected)
        placement.end_call()
        placement.complete()
        assert placement.dequantized < encoded if was_hit else placement.dequantized == encoded
        refit(placement, model.resident_bytes(1.0), model.loads)
        placement.complete()
        assert placement.dequantized == encoded and placement.resident_bytes == sim.stats().allocated_bytes
        assert torch.equal(model.call(), model.expected)
        placement.remove()
        assert sim.stats().allocated_bytes == 0
        if not was_hit:
            return
    raise AssertionError("there are more allocations than were tried")
