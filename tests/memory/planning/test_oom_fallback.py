"""Out of memory while sampling: the call is made again in less, earlier steps are kept, the result is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import DoesNotFitError, ManagedModel, manager, speeds
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.planning.oom_fallback import Fallback, describe, next_fallback
from ballast.memory.weights.batch import batch_of, in_parts, joined
from torch import nn

Folders = Callable[[str], Path]
BATCHED = ["sd3", "hidream", "pixart_sigma", "sana", "auraflow", "ltx", "cogvideox", "mochi", "zimage"]


def test_order_of_what_is_given_up() -> None:
    attempt: Fallback | None = Fallback()
    seen = []
    while attempt := next_fallback(attempt, streams=True, batch=2):
        seen.append((attempt.alone, attempt.strategy, attempt.share, attempt.parts))
    assert seen == [
        (True, "auto", 1.0, 1),
        (True, "streamed", 0.5, 1),
        (True, "streamed", 0.25, 1),
        (True, "streamed", 0.0, 1),
        (True, "streamed", 0.0, 2),
    ]
    assert next_fallback(Fallback(alone=True), streams=False, batch=1) is None
    assert next_fallback(Fallback("leafwise", True, 0.0), streams=True, batch=1) is None
    assert describe(Fallback("streamed", True, 0.25)) == "with 25% of the weights that could stay"


def captured(name: str, folder: Path) -> tuple[Any, Any, list[tuple[tuple, dict]]]:
    """The pipeline of a family, its transformer on the CPU, and the arguments of the calls of one step."""
    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(folder, device="cpu")
    cond = pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
    unit = pipe.denoisers[0]
    unit.load()
    calls: list[tuple[tuple, dict]] = []
    forward = unit.module.forward

    def remembered(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return forward(*args, **kwargs)

    vars(unit.module)["forward"] = remembered
    width, height = family.size
    pipe.sample(
        cond, width=width, height=height, steps=2, guidance=family.guidance, frames=family.frames, **family.call_kwargs
    )
    return unit, forward, calls


@pytest.mark.soak
def test_all_families_with_a_batch_are_tested(tiny_folders: Folders) -> None:
    batched = [
        name
        for name in tiny.FAMILIES
        if (seen := captured(name, tiny_folders(name))) and batch_of(*seen[2][0], seen[0].batch_dims) > 1
    ]
    assert sorted(batched) == sorted([*BATCHED, "ltx_timestep"])


@pytest.mark.parametrize("name", BATCHED)
def test_batch_in_parts_gives_what_it_gives_whole(name: str, tiny_folders: Folders) -> None:
    unit, forward, calls = captured(name, tiny_folders(name))
    for args, kwargs in calls:
        with torch.inference_mode():
            whole = forward(*args, **kwargs)
            parts = in_parts(args, kwargs, unit.batch_dims, 2)
            assert len(parts) == 2
            again = joined([forward(*some, **named) for some, named in parts])
        leaves = torch.utils._pytree.tree_leaves
        for expected, result in zip(leaves(whole), leaves(again), strict=True):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_batch_is_not_cut_where_it_is_not_clear() -> None:
    hidden = torch.zeros(2, 5, 4)
    assert batch_of((hidden,), {"other": torch.zeros(3, 2, 5, 4)}, {}) == 1
    assert batch_of((hidden,), {"other": torch.zeros(3, 2, 5, 4)}, {"other": 1}) == 2
    assert batch_of((hidden,), {"ids": torch.zeros(5, 3), "size": (2, 3)}, {}) == 2
    assert batch_of((), {"x": [torch.zeros(4), torch.zeros(4)]}, {}) == 2
    assert batch_of((), {"step": torch.zeros(2)}, {}) == 1
    layers = [torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)]
    assert batch_of((hidden,), {"residuals": layers}, {}) == 1, "one for each layer, not for each of the batch"
    assert batch_of((hidden,), {"added": {"sizes": torch.zeros(2, 2)}}, {}) == 2
    given = (hidden, [(1, 64, 64), (1, 32, 32)], [3, 4], {"sizes": torch.zeros(2, 2)})
    (first, _), (second, _) = in_parts(given, {}, {}, 2)
    assert [first[1], second[1]] == [[(1, 64, 64)], [(1, 32, 32)]]
    assert first[2] == second[2] == [3, 4], "numbers may be anything, such as layers to skip"
    assert first[3]["sizes"].shape == (1, 2)


class Dit(nn.Module):
    """Blocks whose working memory grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * scale[:, None, None]
        return x


BLOCK = 64 * 64 * 4


def test_each_rung_is_reached_and_gives_the_same(sim: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """Ever smaller cards, and a forecast that promises too much: from all resident to none, in parts."""
    caplog.set_level(logging.ERROR)
    module = Dit().requires_grad_(False)
    x, scale = torch.randn(2, 256, 64), torch.tensor([0.5, 2.0])
    with torch.inference_mode():
        expected = module(x, scale)
    work = UnitForecast(live_bytes=x.nbytes, working_bytes=1, first_bytes=1, calls=1, operations=Operations(1.0))
    reached: list[Fallback | None] = []
    for total in range(5 * x.nbytes + 9 * BLOCK, x.nbytes, -BLOCK):
        sim.enable(total=total)
        speeds._groups.clear()  # what a run was seen to take, and the next would go by
        speeds._groups_file().unlink(missing_ok=True)
        unit = ManagedModel.from_module("dit", "transformer", module)
        attempt: Fallback | None = None
        try:
            with manager("sim").stage("sample", [unit], forecast=Forecast(0, {"dit": work})):
                result = unit.module(x.to("sim"), scale.to("sim")).cpu()
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
            attempt = manager("sim").work.of(unit).attempt
        except DoesNotFitError as error:
            assert "even with no weights staying, the batch in 2 parts" in str(error) or total < x.nbytes + 4 * BLOCK
        assert sim.stats().allocated_bytes == 0
        if attempt not in reached:
            reached.append(attempt)
    assert reached[0] == Fallback()
    assert reached[-1] is None
    rungs = [(attempt.strategy, attempt.share, attempt.parts) for attempt in reached if attempt]
    assert {("streamed", 0.5, 1), ("streamed", 0.0, 2)} <= set(rungs), rungs
    order = [("auto", 1.0, 1), ("streamed", 0.5, 1), ("streamed", 0.25, 1), ("streamed", 0.0, 1), ("streamed", 0.0, 2)]
    assert rungs == [rung for rung in order if rung in rungs]


def test_steps_before_the_one_that_failed_are_kept(tiny_folders: Folders, sim: ModuleType) -> None:
    family = tiny.FAMILIES["flux"]
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim")
    cond = pipe.encode("a red boat")
    size = {"width": family.size[0], "height": family.size[1], "steps": 4, "guidance": 1.0}
    steps: list[int] = []
    expected = pipe.sample(cond, **size, on_step=lambda step, of, latents: steps.append(step))
    sim.reset_stats()
    pipe.sample(cond, **size)
    allocations = sim.stats().allocation_count
    calls: list[int] = []
    for at in range(allocations // 5, allocations - 10, allocations // 5):
        steps.clear()
        calls.clear()
        forward = type(pipe.denoisers[0].module).forward

        def counted(self: Any, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, sim.fail_after(at):
            patch.setattr(type(pipe.denoisers[0].module), "forward", counted)
            latents = pipe.sample(cond, **size, on_step=lambda step, of, latents: steps.append(step))
        torch.testing.assert_close(latents, expected, atol=0, rtol=0)
        assert steps == [1, 2, 3, 4]
        assert len(calls) == 5, "one call of four was made again"


@pytest.mark.soak
def test_out_of_memory_at_any_allocation_of_a_small_run(
    tiny_folders: Folders, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """The run finishes with the same result, or says in one line that it cannot; nothing stays."""
    caplog.set_level(logging.ERROR)
    family = tiny.FAMILIES["chroma"]
    pipe = ballast.open_pipeline(tiny_folders("chroma"), device="sim")
    cond = pipe.encode("a red boat")
    size = {"width": family.size[0], "height": family.size[1], "steps": 1, "guidance": 1.0, "strategy": "leafwise"}
    expected = pipe.sample(cond, **size)
    sim.reset_stats()
    pipe.sample(cond, **size)
    allocations = sim.stats().allocation_count
    assert allocations > 300
    refused = 0
    for count in range(1, allocations + 1, 3):
        try:
            with sim.fail_after(count):
                result = pipe.sample(cond, **size)
            assert torch.equal(result, expected), count
        except DoesNotFitError as error:
            assert "\n" not in str(error)
            refused += 1
        assert sim.stats().allocated_bytes == 0, count
        assert not any(unit.leases for unit in pipe.denoisers)
    # What has given all up already can only be tried once more: where that fails too, it says so.
    assert refused <= 0.1 * allocations / 3
