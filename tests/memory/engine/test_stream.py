"""The streaming engine on the simulated device: the same results, within its bytes, at the speed of the copies."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.engine import streams as queues
from ballast.memory.engine.engine import Engine
from ballast.memory.planning.solver import GroupLoad, Layout, Loads
from ballast.memory.simulated import lazy
from ballast.memory.weights import hostbuffer
from ballast.memory.weights.groups import CallOrder, divide
from ballast.memory.weights.structure import block_lists, parameter_refs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import THREE, few
from streamed_models import (
    SIM,
    WIDTH,
    Block,
    Blocks,
    budget,
    least_bytes,
    model,
    nbytes,
    noise,
    on_disk,
    output,
    planned_bytes,
    put,
    refit,
    resident_engine,
    rests,
    run,
    settle,
    streamed_engine,
)
from torch import nn

GB = 1e9


def test_block_lists_are_the_top_ones_that_are_called() -> None:
    names = {name: [path for path, _ in block_lists(model(name)[0])] for name in ("flux", "hidream", "t5", "llama")}
    assert names["flux"] == ["transformer_blocks", "single_transformer_blocks"]
    assert {"double_stream_blocks", "single_stream_blocks"} <= set(names["hidream"])
    assert names["t5"] == ["encoder.block"]
    assert names["llama"] == ["layers"]
    assert block_lists(nn.Sequential(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])]))) != []
    assert block_lists(nn.ModuleList([nn.ParameterList([torch.ones(2)])])) == []


# Results


@pytest.mark.parametrize("name", few(["lumina2", "flux", "sd3", "hidream", "wan", "t5", "clip", "llama"], *THREE, "t5"))
def test_real_models_give_what_they_give_resident(name: str, sim: ModuleType) -> None:
    module, arguments = model(name)
    resident = resident_engine(module, torch.device(SIM))
    resident.place()
    sim.reset_stats()
    expected = output(module, arguments)
    back = sim.stats().d2h_bytes  # the result, and what the model itself looks at
    resident.remove()
    for share in (0, 0.25, 0.5, 0.75, 1):
        allowed = budget(module, share)
        sim.enable(total="1GB", tflops=1e-4, h2d_gbps=0.01)
        placement = put(module, allowed)
        assert sim.stats().allocated_bytes == placement.resident_bytes <= allowed
        assert sim.stats().peak_bytes <= allowed
        for _ in range(2):
            torch.testing.assert_close(output(module, arguments), expected, atol=0, rtol=0)
        assert sim.stats().hazards == 0
        placement.remove()
        assert sim.stats().d2h_bytes == 2 * back
        assert sim.stats().allocated_bytes == 0
        assert all("forward" not in vars(block) for _, blocks in block_lists(module) for block in blocks)
        assert all(t.device.type == "cpu" for t in (*module.parameters(), *module.buffers()))


def placed(module: nn.Module, share: float) -> Engine:
    return put(module, budget(module, share))


def truth(module: nn.Module, *args: Any) -> torch.Tensor:
    resident = resident_engine(module, torch.device(SIM))
    resident.place()
    expected = run(module, noise(), *args).cpu()
    resident.remove()
    return expected


def check(module: nn.Module, expected: torch.Tensor, *args: Any) -> None:
    torch.testing.assert_close(run(module, noise(), *args).cpu(), expected, atol=0, rtol=0)


def test_blocks_of_several_dtypes_with_buffers_and_tied_weights(sim: ModuleType) -> None:
    module = Blocks(6)
    for i, block in enumerate(module.blocks):
        block.up = nn.Linear(WIDTH, WIDTH, bias=True, dtype=torch.bfloat16).requires_grad_(False)
        block.register_buffer("table", torch.tensor(float(i)))
        block.empty = nn.Parameter(torch.empty(0), requires_grad=False)
        block.crossed = nn.Parameter(torch.randn(3, 5).T, requires_grad=False)
        block.twin = nn.Linear(WIDTH, WIDTH, bias=False)
        block.twin.weight = block.down.weight
    module.blocks[4].up.weight = module.blocks[1].up.weight
    expected = truth(module)
    placement = placed(module, 0)
    assert module.blocks[1].up.weight.device.type == "sim", "what two blocks share is resident"
    assert module.blocks[1].table.device.type == "sim"
    seen: list[Any] = []
    module.blocks[2].middle = lambda: seen.append(module.blocks[2].crossed.stride())
    check(module, expected)
    assert seen == [(1, 5)]
    assert sim.stats().hazards == 0
    placement.remove()
    assert module.blocks[2].twin.weight is module.blocks[2].down.weight


class Odd(torch.Tensor):
    """Stands for quantized weights: more than the bytes of their elements."""


def test_block_of_subclass_weights_is_resident(sim: ModuleType) -> None:
    module = Blocks(6)
    weight = module.blocks[3].up.weight.data.as_subclass(Odd)
    module.blocks[3].up.weight = nn.Parameter(weight, requires_grad=False)
    assert len(streamed_engine(module, torch.device(SIM))._groups) == 11


def test_less_than_the_least_is_refused_and_small_modules_are_whole(sim: ModuleType) -> None:
    module = Blocks(6)
    with pytest.raises(ValueError, match="too little to stream Blocks"):
        streamed_engine(module, torch.device(SIM), least_bytes(module) - 1)
    plain = nn.Linear(4, 4)
    assert least_bytes(plain) == nbytes(plain)
    placement = put(plain)
    assert placement.resident_bytes == nbytes(plain)
    assert placement.shrink(100) == 0
    placement.remove()
    assert least_bytes(Blocks(6).to("meta")) == least_bytes(module)


def test_any_order_shape_and_thread(sim: ModuleType) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = Blocks(7)
    orders = [None, [0, 1, 2, 6], [5, 3, 3, 0], [6, 5, 4, 3, 2, 1, 0], [2], None, [1, 1, 1], None]
    expected = [truth(module, order) for order in orders]
    placement = placed(module, 0.2)
    for order, wanted in zip(orders, expected, strict=True):
        check(module, wanted, order)
    run(module, noise(9))
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            assert not torch.is_inference_mode_enabled()
            with torch.no_grad():
                torch.testing.assert_close(module(noise()).cpu(), expected[0], atol=0, rtol=0)
        except BaseException as error:
            errors.append(error)

    for target in (elsewhere, elsewhere):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        check(module, expected[0])
    assert not errors
    with torch.inference_mode(), torch.inference_mode():
        check(module, expected[0])
    assert sim.stats().hazards == 0
    placement.remove()


def test_order_of_calls_is_learnt(sim: ModuleType) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = Blocks(8)
    order = [4, 5, 6, 7, 0, 1, 2, 3]
    placement = placed(module, 0)
    for _ in range(2):
        run(module, noise(), order)
    settle(placement)
    sim.reset_stats()
    for _ in range(3):
        run(module, noise(), order)
    settle(placement)
    assert sim.stats().h2d_bytes - 3 * noise().nbytes == 3 * placement.layout.copied_bytes
    placement.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_a_block_and_then_all_is_well(error: type[BaseException], sim: ModuleType) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = Blocks(8)
    expected = truth(module)
    placement = placed(module, 0.25)

    def fail() -> None:
        raise error("stop")

    for block in module.blocks:
        block.middle = fail
        with pytest.raises(error):
            run(module, noise())
        block.middle = None
        if block is not module.blocks[5]:  # twice in a row, too
            check(module, expected)
    check(module, expected)
    assert sim.stats().hazards == 0
    placement.remove()
    assert sim.stats().allocated_bytes == 0


def test_out_of_memory_at_every_allocation_of_placing_leaves_nothing(sim: ModuleType) -> None:
    module = Blocks(5)
    expected = truth(module)
    sim.reset_stats()
    placed(module, 0.5).remove()
    for n in range(1, sim.stats().allocation_count + 1):
        with sim.fail_after(n), pytest.raises(torch.OutOfMemoryError):
            placed(module, 0.5)
        assert sim.stats().allocated_bytes == 0
    placement = placed(module, 0.5)
    check(module, expected)
    placement.remove()


def test_without_streams_copies_block_and_the_result_is_the_same(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Blocks(6)
    expected = truth(module)
    monkeypatch.delattr(torch.sim, "Stream")
    placement = placed(module, 0.2)
    assert placement._queues.copying is None
    for _ in range(2):
        check(module, expected)
    placement.remove()
    placement.remove()
    assert sim.stats().allocated_bytes == 0


# Growing and shrinking


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(8, 48), min_size=3, max_size=10),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 9), st.integers(-40_000, 40_000), st.booleans()), max_size=8),
)
def test_grow_and_shrink_in_mid_forward(
    sim: ModuleType, widths: list[int], share: float, moves: list[tuple[int, int, bool]]
) -> None:
    """Of blocks of any size, at any block, with errors thrown in: within the budget, the same result, nothing left."""
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = Blocks(0)
    module.blocks = nn.ModuleList(Block() for _ in widths).requires_grad_(False)
    for block, width in zip(module.blocks, widths, strict=True):
        block.up = nn.Linear(WIDTH, width, bias=False).requires_grad_(False)
        block.down = nn.Linear(width, WIDTH, bias=False).requires_grad_(False)
    expected, least = truth(module), least_bytes(module)
    placement = placed(module, share)
    try:
        for at, change, fails in moves:
            block = module.blocks[at % len(widths)]
            moved: list[int] = []

            def move(change: int = change, moved: list[int] = moved, fails: bool = fails) -> None:
                before = placement.resident_bytes
                method = placement.grow if change > 0 else placement.shrink
                thread = threading.Thread(target=lambda: moved.append(method(abs(change))))
                thread.start()
                thread.join()
                moved.append(abs(placement.resident_bytes - before))
                moved.append(placement._unsettled)
                if fails:
                    raise KeyError("in mid-forward")

            block.middle = move
            planned, layout = planned_bytes(placement), placement.layout
            if fails:
                with pytest.raises(KeyError):
                    run(module, noise())
            else:
                check(module, expected)
            block.middle = None
            said, was, unsettled = moved
            assert said == was or unsettled
            assert change < 0 or said <= change
            assert sim.stats().allocated_bytes == placement.resident_bytes == planned_bytes(placement)
            room = planned if placement.layout == layout else planned + change
            assert placement.resident_bytes <= max(room, least)
            check(module, expected)
        assert sim.stats().hazards == 0
    finally:
        placement.remove()
    assert sim.stats().allocated_bytes == 0


def test_shrink_from_all_resident_frees_what_was_asked(sim: ModuleType) -> None:
    module = Blocks(8)
    expected = truth(module)
    placement = placed(module, 1)
    group = placement._groups[0].held_bytes
    assert (placement.resident_bytes, placement.layout.copied_bytes) == (nbytes(module), 0)
    assert placement.shrink(2 * group) == 2 * group
    assert placement.layout.copied_bytes == 4 * group
    check(module, expected)
    assert placement.shrink(10**9) == 12 * group
    assert placement.resident_bytes == least_bytes(module)
    check(module, expected)
    assert placement.grow(3 * group + 5) == 3 * group
    check(module, expected)
    assert sim.stats().allocated_bytes == placement.resident_bytes
    placement.remove()
    assert placement.grow(group) == 0


def test_grow_into_memory_that_is_not_there_streams_on(sim: ModuleType) -> None:
    module = Blocks(8)
    expected = truth(module)
    placement = placed(module, 0)
    group = placement._groups[0].held_bytes
    sim.enable(total=placement.resident_bytes + 2 * group + 10_000)
    assert placement.grow(12 * group) == 2 * group
    check(module, expected)
    assert placement.grow(0) == 0
    placement.remove()


def test_refit_sits_as_one_placed_anew(sim: ModuleType) -> None:
    """Through a ring of the size that suits, whatever was there before, and for what the calls compute now."""
    module = Blocks(8)
    expected = truth(module)
    even = Loads.even(divide(module, list(parameter_refs(module)), CallOrder()).groups)
    idle = Loads(tuple(replace(group, seconds=0.0) for group in even.groups))
    first = put(module, nbytes(module) - 1, loads=even)
    for share, loads in ((0.2, even), (0.8, idle), (0.8, even), (0.0, idle), (0.5, even)):
        refit(first, budget(Blocks(8), share), loads)
        check(module, expected)
        anew = streamed_engine(Blocks(8), torch.device(SIM), budget(Blocks(8), share), loads=loads)
        assert first.layout == anew.layout
        assert first.resident_bytes == sim.stats().allocated_bytes <= budget(Blocks(8), share)
    first.remove()
    assert sim.stats().allocated_bytes == 0


# The host's memory


def storages(module: nn.Module) -> dict[int, int]:
    tensors = (*module.parameters(), *module.buffers())
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_weights_are_held_once_in_ram_in_one_buffer_a_group(sim: ModuleType) -> None:
    module = Blocks(8)
    before = sum(storages(module).values())
    old = weakref.ref(module.blocks[0].up.weight)
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    placed(module, 0).remove()
    assert old() is None
    flat = storages(module)
    assert sum(flat.values()) == before
    assert len(flat) == 2 * len(module.blocks) + 1
    assert all(t.untyped_storage().data_ptr() % 4096 == 0 for t in module.blocks.parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.state_dict().items())
    placement = placed(module, 0)
    placement.remove()
    del placement
    assert storages(module) == flat, "packed once"
    addresses = set(hostbuffer._pages) & set(flat)
    assert len(addresses) == 2 * len(module.blocks)
    fresh = Blocks(8)
    for mine, other in zip(module.modules(), fresh.modules(), strict=True):
        mine._parameters.update(other._parameters)
    assert not addresses & set(hostbuffer._pages), "the pages went with the weights"
    expected = truth(module)
    placement = placed(module, 0)
    check(module, expected)
    placement.remove()


def test_pages_are_pinned_where_the_device_takes_them_and_let_go_before_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    class Cudart:
        refuse = False

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("register", size))
            return int(self.refuse)

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", address))
            return 0

    cudart = Cudart()
    monkeypatch.delitem(sys.modules, "comfy.model_management", raising=False)  # it would pin them itself
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    before = hostbuffer._pinned_bytes
    flat, views = hostbuffer.pack([torch.ones(1000), torch.zeros(3, dtype=torch.int8)])
    assert hostbuffer.pin(flat, torch.device("cuda:0"))
    assert hostbuffer.pin(flat, torch.device("cuda:0"))
    assert not hostbuffer.pin(flat, torch.device("cpu"))
    address = flat.data_ptr()
    assert calls == [("register", 4352)]
    assert hostbuffer._pinned_bytes == before + 4352
    del flat
    assert len(calls) == 1
    del views
    assert calls[1:] == [("unregister", address)]
    assert hostbuffer._pinned_bytes == before
    cudart.refuse = True
    assert not hostbuffer.pin(hostbuffer.pack([torch.ones(5)])[0], torch.device("cuda:0"))
    monkeypatch.setattr(hostbuffer, "_PINNED_SHARE", 0)
    assert not hostbuffer.pin(hostbuffer.pack([torch.ones(5)])[0], torch.device("cuda:0"))
    assert len(calls) == 3


# Speed, on the virtual clock

TOKENS = 64
WIDE = 256
WEIGHT = 2 * WIDE * WIDE * 4


def timed(sim: ModuleType, ratio: float, resident: int, bunched: bool = False, steps: int = 20) -> tuple[float, float]:
    """Seconds per steady step, and the bound, where a block's copy takes `ratio` of its computing."""
    compute_seconds = 4 * TOKENS * WIDE * WIDE / (1e-2 * 1e12)
    sim.enable(total="1GB", tflops=1e-2, h2d_gbps=WEIGHT / (ratio * compute_seconds) / GB)
    module = Blocks(16, WIDE)
    room = 4 * WEIGHT + resident * WEIGHT + module.scale.nbytes
    given = loads(module, {"": TOKENS}, ratio)
    if bunched:
        copied_bytes = (16 - resident) * WEIGHT
        layout = Layout("streamed", WEIGHT, tuple(range(2 * resident, 32)), copied_bytes=copied_bytes, loads=given)
        placement = Engine(module, torch.device(SIM), layout)
        placement.place()
        rests(placement)
    else:
        placement = put(module, room, given)
    x = noise(TOKENS, WIDE)
    for _ in range(3):
        run(module, x)
    settle(placement)
    sim.reset_stats()
    run(module, x)
    start = sim.stats().clock_seconds
    settle(placement)
    sim.reset_stats()
    for _ in range(steps + 1):
        run(module, x)
    settle(placement)
    stats = sim.stats()
    assert (stats.hazards, stats.d2h_bytes) == (0, 0)
    assert stats.h2d_bytes == (steps + 1) * placement.layout.copied_bytes
    copying = placement.layout.copied_bytes / (WEIGHT / (ratio * compute_seconds))
    placement.remove()
    return (stats.clock_seconds - start) / steps, max(16 * compute_seconds, copying)


@pytest.mark.parametrize("ratio", [0.5, 1, 2])
@pytest.mark.parametrize("resident", [0, 6, 11])
def test_first_step_computes_while_weights_come(ratio: float, resident: int, sim: ModuleType) -> None:
    """Those that stay and those that pass through come by one stream, in the order of the calls.

    On CUDA the host waits for the copies of those that stay, from pageable RAM. It launches each block late by a bit.
    """
    late = 1.25 if lazy.copies.mode == "cuda" else 1.05
    compute_seconds = 4 * TOKENS * WIDE * WIDE / (1e-2 * 1e12)
    sim.enable(total="1GB", tflops=1e-2, h2d_gbps=WEIGHT / (ratio * compute_seconds) / GB)
    module = Blocks(16, WIDE)
    room = 4 * WEIGHT + resident * WEIGHT + module.scale.nbytes
    x = noise(TOKENS, WIDE)
    start = sim.stats().clock_seconds
    placement = put(module, room, loads(module, {"": TOKENS}, ratio))
    run(module, x).cpu()
    seconds = sim.stats().clock_seconds - start
    placement.remove()
    assert sim.stats().hazards == 0
    assert seconds <= late * 16 * compute_seconds * max(1, ratio) + ratio * compute_seconds


def test_first_call_computes_while_all_weights_come_from_pageable_ram(sim: ModuleType) -> None:
    """On CUDA the host would launch nothing before the last copy if it queued them all at once."""
    compute_seconds = 4 * TOKENS * WIDE * WIDE / (1e-2 * 1e12)
    sim.enable(total="1GB", tflops=1e-2, h2d_gbps=WEIGHT / compute_seconds / GB, copies="cuda")
    module = Blocks(20, WIDE)
    paths = tuple(f"blocks.{i}.{layer}" for i in range(20) for layer in ("up", "down"))
    x = noise(TOKENS, WIDE)
    start = sim.stats().clock_seconds
    placement = resident_engine(module, torch.device(SIM), calls=CallOrder(paths))
    placement.place()
    run(module, x, list(range(16))).cpu()
    seconds = sim.stats().clock_seconds - start
    placement.end_call()
    assert placement._uploads.pending, "the last blocks have not been called"
    placement.complete()
    assert not placement._gates and not placement._uploads.pending
    placement.remove()
    assert sim.stats().hazards == 0
    assert seconds <= 1.2 * 16 * compute_seconds


@pytest.mark.parametrize("mode", ["cuda", "xpu"])
def test_staging_buffers_are_filled_anew_once_their_copies_are_made(
    mode: lazy.Mode, sim: ModuleType, tmp_path: Path
) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1, disk_gbps=0.1, copies=mode)
    module = Blocks(8)
    expected, room = truth(module), budget(module, 0.2)
    placement = put(module, room, source=on_disk(module, tmp_path))
    for _ in range(3):
        check(module, expected)
    placement.remove()
    assert sim.stats().hazards == sim.stats().allocated_bytes == 0


def loads(module: nn.Module, tokens: dict[str, int], ratio: float) -> Loads:
    """What the groups compute, by how many tokens their lists are called with, where full ones take 1 / `ratio`."""
    groups = divide(module, list(parameter_refs(module)), CallOrder()).groups
    made = []
    for group in groups:
        count = next(count for prefix, count in tokens.items() if group.owners[0].path.startswith(prefix))
        made.append(GroupLoad(group.packed_bytes, group.held_bytes, group.packed_bytes * count / TOKENS / ratio))
    return Loads(tuple(made), 1.0)


@pytest.mark.parametrize("ratio", few([0.3, 1, 1.5, 3], 1, 3))
@pytest.mark.parametrize("resident", few([0, 3, 5, 8, 12], 0, 5, 12))
def test_steady_steps_take_what_the_bound_says(ratio: float, resident: int, sim: ModuleType) -> None:
    step, bound = timed(sim, ratio, resident)
    assert bound * 0.999 <= step <= bound * 1.02


class Mix(nn.Module):
    """Lists of blocks of several sizes, run one list after the other; the first on an eighth of the tokens."""

    def __init__(self, lists: list[tuple[int, int]]) -> None:
        super().__init__()
        for number, (count, width) in enumerate(lists):
            self.add_module(f"list{number}", nn.ModuleList(Square(width) for _ in range(count)))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lists = list(self.children())
        for number, blocks in enumerate(lists):
            for block in blocks:  # type: ignore[attr-defined]
                width = block.up.in_features
                block(x[: TOKENS // 8 if len(lists) > 2 and not number else TOKENS, :width])
        return x


class Square(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize("ratio", few([0.3, 1, 1.5, 3], 1, 1.5))
@pytest.mark.parametrize("share", few([0, 0.2, 0.35, 0.5, 0.75], 0.2, 0.5))
@pytest.mark.parametrize(
    "lists", [[(19, 155), (38, 100)], [(49, 20), (16, 131), (32, 100)]], ids=["flux-like", "hidream-like"]
)
def test_mixed_lists_take_what_the_bound_says(
    lists: list[tuple[int, int]], share: float, ratio: float, sim: ModuleType
) -> None:
    """Blocks in the proportions of the real models; HiDream's caption projections have bytes and little to compute."""
    flops = 1e10
    rate = 8 / (ratio * 4 * TOKENS / flops)  # bytes a second: of a block, the copy takes `ratio` of the computing
    sim.enable(total="1GB", tflops=flops / 1e12, h2d_gbps=rate / GB)
    module = Mix(lists)
    ring = 16 * max(p.nbytes for p in module.parameters())
    tokens = {"list0": TOKENS // 8 if len(lists) > 2 else TOKENS, "": TOKENS}
    placement = put(module, min(nbytes(module), ring + int(share * nbytes(module))), loads(module, tokens, ratio))
    x = noise(TOKENS, 160)
    for _ in range(3):
        run(module, x)
    settle(placement)
    sim.reset_stats()
    run(module, x)
    start, steps = sim.stats().clock_seconds, 10
    settle(placement)
    sim.reset_stats()
    for _ in range(steps + 1):
        run(module, x)
    settle(placement)
    stats = sim.stats()
    assert (stats.hazards, stats.d2h_bytes) == (0, 0)
    assert stats.h2d_bytes == (steps + 1) * placement.layout.copied_bytes
    bound = max(stats.compute_seconds / (steps + 1), placement.layout.copied_bytes / rate)
    assert (stats.clock_seconds - start) / steps <= 1.05 * bound
    placement.remove()


def test_bunched_residency_would_be_slower(sim: ModuleType) -> None:
    step, bound = timed(sim, 1.5, 5, bunched=True)
    assert step >= 1.2 * bound


def test_next_steps_first_blocks_are_there_before_it_begins(sim: ModuleType) -> None:
    module = Blocks(6)
    placement = placed(module, 0)
    run(module, noise())
    assert [place.group for place in placement._ring.slots if place.holds] == placement._groups[:2]
    before: list[int] = []
    module.blocks[0].middle = lambda: before.append(sim.stats().h2d_count)
    settle(placement)
    sim.reset_stats()
    run(module, noise())
    assert before == [1], "only the input came before the first block ran"
    placement.remove()


def test_waiting_for_the_device_inside_blocks_keeps_the_overlap(sim: ModuleType) -> None:
    """The copy for the next block is queued before a block runs, so a wait in it does not hold the copy up."""
    compute_seconds = 4 * TOKENS * WIDE * WIDE / (1e-2 * 1e12)
    sim.enable(total="1GB", tflops=1e-2, h2d_gbps=WEIGHT / compute_seconds / GB)
    module = Blocks(16, WIDE)
    placement = placed(module, 0)
    for block in module.blocks:
        block.middle = torch.sim.synchronize
    x = noise(TOKENS, WIDE)
    run(module, x)
    sim.reset_stats()
    for _ in range(10):
        run(module, x)
    assert sim.stats().clock_seconds <= 1.6 * 10 * 16 * compute_seconds
    placement.remove()


def test_no_allocation_and_one_copy_stream(sim: ModuleType) -> None:
    module = Blocks(6)
    counts = []
    for kind in (
        resident_engine(module, torch.device(SIM)),
        streamed_engine(module, torch.device(SIM)),
        streamed_engine(module, torch.device(SIM)),
    ):
        kind.place()
        rests(kind)
        x = noise()
        run(module, x)
        sim.reset_stats()
        run(module, x)
        counts.append(sim.stats().allocation_count)
        kind.remove()
    assert counts[0] == counts[1] == counts[2]
    assert len([device for device in queues._copy_streams if device.type == "sim"]) == 1
