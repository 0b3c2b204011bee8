"""`Engine.apply`: whatever was applied before, the last layout is in force as if the module had been placed with it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ballast.memory.engine.engine import Engine
from ballast.memory.engine.ring import State
from ballast.memory.errors import is_out_of_memory
from ballast.memory.planning.solver import Layout
from ballast.memory.weights import hostbuffer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamed_models import budget, noise, on_disk, put, refit, resident_engine, run, settle, varied
from torch import nn

# A room, as a share of what the weights can take; where in the call it is applied, None for between two calls; and the
# allocation that fails then, 0 for none.
CHANGE = st.tuples(st.floats(0, 1), st.none() | st.integers(0, 9), st.integers(0, 4))


def truth(module: nn.Module) -> torch.Tensor:
    engine = resident_engine(module)
    engine.place()
    expected = run(module, noise()).cpu()
    engine.remove()
    return expected


def check(module: nn.Module, expected: torch.Tensor) -> None:
    assert torch.equal(run(module, noise()).cpu(), expected)


def open_files(folder: Path) -> int:
    """How many files of a folder this process holds open; 0 where the system does not tell."""
    if not (listing := Path("/proc/self/fd")).exists():
        return 0
    paths = [os.path.realpath(link) for link in listing.iterdir()]
    return sum(path.startswith(str(folder)) for path in paths)


def lies(engine: Engine, sim: ModuleType, folder: Path) -> dict[str, Any]:
    """All that the two may differ in, once nothing moves any more."""
    settle(engine)
    return {
        "layout": engine.layout,
        "states": [group.state for group in engine._groups],
        "device": engine.resident_bytes,
        "books": sim.stats().allocated_bytes,
        "ram": engine.host_bytes,
        "pinned": hostbuffer._pinned_bytes,
        "files": open_files(folder),
    }


def apply(engine: Engine, sim: ModuleType, room_bytes: int, fails_at: int) -> None:
    with sim.fail_after(fails_at) if fails_at else contextlib.nullcontext():
        try:
            refit(engine, room_bytes, engine.layout.loads)
        except Exception as error:
            if not is_out_of_memory(error):
                raise


def built(widths: list[int], folder: Path, where: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    module = varied(widths)
    expected = truth(module)
    return module, expected, None if where == "ram" else on_disk(module, folder, kept=where)


@settings(
    max_examples=40 if os.environ.get("BALLAST_SOAK") else 14,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    widths=st.lists(st.integers(8, 48), min_size=3, max_size=8),
    begins=st.floats(0, 1),
    changes=st.lists(CHANGE, min_size=1, max_size=6),
    ends=st.floats(0, 1),
    where=st.sampled_from(["ram", "", "024"]),
)
def test_the_last_layout_is_as_if_it_were_the_first(
    sim: ModuleType,
    tmp_path: Path,
    widths: list[int],
    begins: float,
    changes: list[tuple[float, int | None, int]],
    ends: float,
    where: str,
) -> None:
    """In RAM, on disk and mixed; between calls and in the middle of one, from another thread; memory that runs out."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module, expected, source = built(widths, tmp_path, where)
    last = budget(module, ends)
    fresh = put(module, last, source=source)
    for _ in range(2):
        check(module, expected)
    wanted = lies(fresh, sim, tmp_path)
    fresh.remove()
    assert sim.stats().allocated_bytes == 0

    engine = put(module, budget(module, begins), source=source)
    try:
        for share, at, fails_at in changes:
            room_bytes = budget(module, share)
            if at is None:
                apply(engine, sim, room_bytes, fails_at)
            else:
                block: Any = module.blocks[at % len(widths)]  # type: ignore[index]
                failed: list[BaseException] = []

                def in_another_thread(room_bytes: int = room_bytes, failed: list[BaseException] = failed) -> None:
                    def change() -> None:
                        try:
                            apply(engine, sim, room_bytes, 0)
                        except BaseException as error:
                            failed.append(error)

                    thread = threading.Thread(target=change)
                    thread.start()
                    thread.join()

                block.middle = in_another_thread
            check(module, expected)
            if at is not None:
                block.middle = None
                assert not failed
            assert sim.stats().allocated_bytes == engine.resident_bytes
        apply(engine, sim, last, 0)
        for _ in range(2):
            check(module, expected)
        assert lies(engine, sim, tmp_path) == wanted
        assert sim.stats().hazards == 0
    finally:
        engine.remove()
    assert sim.stats().allocated_bytes == 0 and open_files(tmp_path) == 0
    assert all(group.state is State.ON_HOST for group in engine._groups)


def test_staging_buffers_go_with_the_last_group_that_needs_them(sim: ModuleType) -> None:
    """Of RAM that cannot be pinned, as on XPU, what streams goes through them. What stays there does not."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1, copies="xpu")
    module = varied([16] * 6)
    expected = truth(module)
    part, whole = budget(module, 0.3), budget(module, 1)
    engine = put(module, part)
    for room_bytes, are_there in ((part, True), (whole, False), (part, True), (whole, False)):
        refit(engine, room_bytes, engine.layout.loads)
        assert (engine.host_bytes > 0) == are_there
        for _ in range(2):
            check(module, expected)
        assert (engine.host_bytes > 0) == are_there
    engine.remove()
    assert sim.stats().allocated_bytes == sim.stats().hazards == 0


def test_what_runs_out_of_memory_at_any_allocation_can_be_mended(sim: ModuleType, tmp_path: Path) -> None:
    """From the least room to the most, with each of its allocations failing in turn."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module, expected, source = built([12, 40, 8, 24], tmp_path, "ram")
    seen: set[Layout] = set()
    for fails_at in range(1, 14):
        engine = put(module, budget(module, 0.0), source=source)
        check(module, expected)
        apply(engine, sim, budget(module, 0.9), fails_at)
        seen.add(engine.layout)
        check(module, expected)
        assert sim.stats().allocated_bytes == engine.resident_bytes
        apply(engine, sim, budget(module, 0.9), 0)
        check(module, expected)
        whole = engine.layout
        engine.remove()
    fresh = put(module, budget(module, 0.9), source=source)
    assert fresh.layout == whole and len(seen) > 2
    fresh.remove()
    assert sim.stats().allocated_bytes == 0
