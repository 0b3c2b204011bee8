"""Which modules are computed once: what a dry run finds at published widths, and what is worth it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from ballast.memory.once.choice import Schedule, choose_once, first_part, other_part
from ballast.memory.planning.dry_run import dry_run
from ballast.memory.planning.forecast import Forecast, OnceModule, Operations, UnitForecast
from ballast.pipelines.files.single.published import FACTS
from hypothesis import given, settings
from hypothesis import strategies as st

MB = 2**20

# The share of the weights that sees no latents, in percent, as counted by hand from the modules' names.
SHARES: dict[str, tuple[float, dict[str, tuple[int, ...]]]] = {
    "FLUX.1-dev": (
        27.9,
        {
            "hidden_states": (1, 4096, 64),
            "encoder_hidden_states": (1, 512, 4096),
            "pooled_projections": (1, 768),
            "timestep": (1,),
            "img_ids": (4096, 3),
            "txt_ids": (512, 3),
            "guidance": (1,),
        },
    ),
    "Wan2.1-I2V-720P": (
        27.0,
        {
            "hidden_states": (1, 36, 21, 60, 104),
            "timestep": (1,),
            "encoder_hidden_states": (1, 512, 4096),
            "encoder_hidden_states_image": (1, 257, 1280),
        },
    ),
    "Wan2.1-T2V": (
        16.3,
        {"hidden_states": (1, 16, 21, 60, 104), "timestep": (1,), "encoder_hidden_states": (1, 512, 4096)},
    ),
    "AuraFlow": (34.1, {"hidden_states": (1, 4, 128, 128), "encoder_hidden_states": (1, 256, 2048), "timestep": (1,)}),
}


def forecast_of(model: str) -> tuple[UnitForecast, int]:
    """The forecast of one call of a published transformer, and the bytes of its weights."""
    config = json.loads((FACTS / "models" / model / "transformer" / "config.json").read_text("utf-8"))
    cls = getattr(diffusers, config["_class_name"])
    taken = inspect.signature(cls.__init__).parameters
    with init_empty_weights(include_buffers=False):
        module = cls.from_config({name: value for name, value in config.items() if name in taken}).to(torch.bfloat16)
    shapes = SHARES[model][1]

    def run(device: torch.device) -> Any:
        arguments = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        return module.eval()(**arguments, return_dict=False)

    total = sum(parameter.nbytes for parameter in module.parameters())
    return dry_run({"transformer": module}, run)[0].units["transformer"], total


@pytest.mark.parametrize("model", [*SHARES][:2] + [pytest.param(m, marks=pytest.mark.long) for m in [*SHARES][2:]])
def test_shares_of_published_models(model: str) -> None:
    work, total = forecast_of(model)
    share = 100 * sum(module.weight_bytes for module in work.once) / total
    assert abs(share - SHARES[model][0]) <= 0.5
    known = {module.path for module in work.once}
    assert all(need in known for module in work.once for need in module.needs)


def module(path: str, weight: int, row: int, step: bool = True, text: bool = False, *needs: str) -> OnceModule:
    return OnceModule(path, weight, row, step, text, needs)


def work_of(*modules: OnceModule, calls: int = 1) -> UnitForecast:
    operations = tuple((each.path, Operations(1.0)) for each in modules)
    whole = Operations(float(len(modules)))
    return UnitForecast(MB, MB, MB, calls, whole, operations, argument_bytes=10, step_bytes=1, once=modules)


def choose(work: UnitForecast, steps: int = 10, passes: int = 1) -> frozenset[str]:
    return choose_once(work, {each.path for each in work.once}, Schedule(steps, passes)).paths


def test_what_costs_more_than_it_saves_is_left() -> None:
    large, small = module("large", 10 * MB, 2 * MB), module("small", 10 * MB, MB // 2)
    assert choose(work_of(large, small)) == {"small"}
    assert choose(work_of(large, small), steps=4) == {"large", "small"}
    assert choose(work_of(module("text", 10 * MB, 4 * MB, False, True)), passes=2) == {"text"}
    assert not choose(work_of(module("text", 10 * MB, 4 * MB, False, True)), passes=3)


def test_experts_share_the_steps_among_them() -> None:
    """So passes are told by the calls of all, and a unit without such modules tells nothing."""
    each = work_of(module("a", MB, 1), calls=4)
    assert Schedule.of(Forecast(0, {"one": each}, 4), 30) == Schedule(30, 1)
    assert Schedule.of(Forecast(0, {"one": each, "two": each, "other": work_of(calls=9)}, 4), 30) == Schedule(30, 2)


def test_what_a_module_needs_comes_with_it() -> None:
    """Unless that costs more than all is worth that needs it."""
    dear = module("dear", MB, MB)
    assert choose(work_of(dear, module("wanted", 100 * MB, MB, True, False, "dear"))) == {"dear", "wanted"}
    assert not choose(work_of(dear, module("wanted", 11 * MB, MB, True, False, "dear")))
    assert not choose(work_of(module("wanted", 100 * MB, MB, True, False, "unknown")))
    lost = module("near", MB, MB, True, False, "unknown")
    assert not choose(work_of(lost, module("wanted", 100 * MB, MB, True, False, "near")))
    far, near = module("far", MB, MB), module("near", MB, MB, True, False, "far")
    assert choose(work_of(far, near, module("wanted", 100 * MB, MB, True, False, "near"))) == {"far", "near", "wanted"}


SIZES = st.integers(1, 100)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(SIZES, SIZES, st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 3),
    st.data(),
)
def test_properties(found: list[tuple[int, int, bool, bool]], steps: int, passes: int, data: Any) -> None:
    """What is chosen is closed under needs and takes fewer bytes than its weights; the parts make up the whole."""
    paths = [f"m{i}" for i in range(len(found))]

    def needs(i: int) -> list[str]:
        return data.draw(st.lists(st.sampled_from(paths[:i]), unique=True)) if i else []

    modules = [module(paths[i], *each, *needs(i)) for i, each in enumerate(found)]
    work, schedule = work_of(*modules, calls=passes), Schedule(steps, passes)
    once = choose_once(work, set(paths), schedule)
    known = {each.path: each for each in modules}
    assert all(need in once.paths for path in once.paths for need in known[path].needs)
    assert once.table_bytes == sum(schedule.rows(known[path]) * known[path].row_bytes for path in once.paths)
    assert once.table_bytes < once.weight_bytes or not once.paths
    first, other = first_part(work, once, schedule, 1), other_part(work, once, once.held_bytes)
    assert {path for path, _ in first.modules} == once.paths
    assert {path for path, _ in other.modules} == set(paths) - once.paths
    assert other.operations.total == len(paths) - len(once.paths)
    assert other.live_bytes == work.live_bytes + once.table_bytes + once.argument_bytes
