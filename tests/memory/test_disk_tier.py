"""Weights that are not in pinned memory: through a few windows to the device, and RAM holds no more than these."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.engine import ring
from ballast.memory.engine import staging_buffers as stager
from ballast.memory.engine import streams as queues
from ballast.memory.engine.engine import Engine
from ballast.memory.errors import release_frames
from ballast.memory.host import management as host
from ballast.memory.weights import hostbuffer, reader
from ballast.memory.weights.stored import Stored
from ballast.memory.weights.structure import parameter_refs
from ballast.pipelines.files.components import read_components, read_model_index
from fault_points import FaultError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import few
from streamed_models import (
    SIM,
    WIDTH,
    Blocks,
    budget,
    nbytes,
    noise,
    on_disk,
    output,
    planned_bytes,
    put,
    resident_engine,
    run,
    settle,
    streamed_engine,
    varied,
    weight_pages,
)
from streamed_models import model as model_and_arguments
from torch import nn

Source = dict[str, Stored]
NOISE = 4 * WIDTH * 4  # bytes of the input
SECONDS = 20.0  # after which a disk gives what it was asked for


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ballast")]


def truth(module: nn.Module) -> torch.Tensor:
    resident = resident_engine(module, torch.device(SIM))
    resident.place()
    expected = run(module, noise()).cpu()
    resident.remove()
    return expected


def placed(module: nn.Module, source: Source | None, share: float) -> Engine:
    return put(module, budget(module, share), source=source)


def check(module: nn.Module, expected: torch.Tensor, order: list[int] | None = None) -> None:
    torch.testing.assert_close(run(module, noise(), order).cpu(), expected, atol=0, rtol=0)


def assert_gone(module: nn.Module, sim: ModuleType, kept: str = "") -> None:
    gc.collect()
    assert sim.stats().allocated_bytes == 0
    assert sim.stats().hazards == 0
    for name, parameter in module.named_parameters():
        assert parameter.device.type == ("cpu" if name.split(".")[1:2] and name.split(".")[1] in kept else "meta")
    assert all("forward" not in vars(part) for part in module.modules())


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("shards", [1, 3])
def test_runs_from_disk_as_resident_and_ram_holds_the_windows(
    share: float, shards: int, sim: ModuleType, tmp_path: Path
) -> None:
    module = varied([20, 90, 33, 64, 64, 64, 12])
    expected = truth(module)
    source = on_disk(module, tmp_path, shards)
    size = nbytes(module)
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    gc.collect()
    before = set(weight_pages())
    placement = placed(module, source, share)
    assert sim.stats().allocated_bytes == placement.resident_bytes <= budget(module, share)
    windows = set(weight_pages()) - before
    assert len(windows) == stager.WINDOWS
    assert placement.host_bytes == stager.WINDOWS * max(group.packed_bytes for group in placement._groups)
    for _ in range(3):
        check(module, expected)
    settle(placement)
    sim.reset_stats()
    placement.take_bytes_in(), placement.take_bytes_read()
    ring_bytes = placement.layout.ring_bytes  # by which it may be more or less ahead of the step
    for step in range(3):
        check(module, expected)
        settle(placement)
        asked = (step + 1) * (placement.layout.copied_bytes + NOISE)
        assert abs(sim.stats().h2d_bytes - asked) <= ring_bytes
    came = placement.take_bytes_in()
    assert came == sim.stats().h2d_bytes - 3 * NOISE
    read = [placement._called[i] for i in placement.layout.from_disk]
    gaps = sum(p.packed_bytes - sum(ref.tensor.nbytes for ref in p.refs if ref.tensor.is_meta) for p in read)
    assert abs(came - placement.take_bytes_read() - 3 * gaps) <= gaps, "files have no gaps"
    assert all(ref.tensor.is_meta for ref in placement.host_refs if isinstance(ref.tensor, nn.Parameter))
    assert set(weight_pages()) - before == windows
    placement.remove()
    assert_gone(module, sim)
    assert nbytes(module) == size
    gc.collect()
    assert set(weight_pages()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_cast_on_the_way(dtype: torch.dtype, sim: ModuleType, tmp_path: Path) -> None:
    module = varied([20, 90, 33, 64]).to(dtype)
    for parameter in module.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    module = module.to(torch.float32)
    expected = truth(module)
    source = on_disk(module, tmp_path, 2, torch.bfloat16)
    placement = placed(module, source, 0.4)
    check(module, expected)
    check(module, expected)
    came, read = placement.take_bytes_in(), placement.take_bytes_read()
    assert 0.48 * came < read <= 0.5 * came, "half as much in files"
    placement.remove()
    assert_gone(module, sim)


@pytest.mark.parametrize("name", few(["flux", "hidream", "wan", "t5"], "hidream", "t5"))
def test_real_models_run_from_disk(name: str, sim: ModuleType, tmp_path: Path) -> None:
    module, arguments = model_and_arguments(name)
    values = list(parameter_refs(module))
    resident = resident_engine(module, torch.device(SIM))
    resident.place()
    expected = output(module, arguments)
    resident.remove()
    try:
        source = on_disk(module, tmp_path, 2)
        for share in (0, 0.5, 1):
            placement = streamed_engine(module, torch.device(SIM), budget(module, share), source)
            placement.place()
            for _ in range(2):
                torch.testing.assert_close(output(module, arguments), expected, atol=0, rtol=0)
            placement.remove()
            assert sim.stats().allocated_bytes == 0
    finally:
        for ref in values:
            ref.restore()


def test_unit_of_a_folder_tells_where_its_weights_lie(
    sim: ModuleType, tiny_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    component = read_components(tiny_folders("flux"), read_model_index(tiny_folders("flux")), torch.bfloat16)
    unit = component["transformer"].unit("")
    source = unit.source()
    assert source is not None
    placement = streamed_engine(unit.module, torch.device(SIM), 0, source)
    placement.place()
    placement.remove()
    assert (unit.tier, unit.host_bytes) == ("disk", 0)
    unit.load()
    assert ManagedModel.from_module("a", "other", Blocks(2)).source() is None


def test_source_that_does_not_name_all_weights(sim: ModuleType, tmp_path: Path) -> None:
    module = varied([20, 90])
    source = on_disk(module, tmp_path)
    del source["blocks.1.up.weight"]
    with pytest.raises(ValueError, match="do not name all weights of Blocks: it must be loaded"):
        streamed_engine(module, torch.device(SIM), 0, source)


def test_module_without_blocks_and_less_than_a_window(sim: ModuleType, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).requires_grad_(False)
    x = torch.randn(2, 40)
    expected = module(x)
    placement = streamed_engine(module, torch.device(SIM), 0, on_disk(module, tmp_path))
    placement.place()
    torch.testing.assert_close(run(module, x.to(SIM)).cpu(), expected)
    placement.remove()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize("kept", ["", "1357", "0128", "7"])
def test_any_order_of_calls(kept: str, sim: ModuleType, tmp_path: Path) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = varied([64] * 9)
    orders = [None, [0, 1, 2, 6], [5, 3, 3, 0], [8, 7, 6, 5, 4, 3, 2, 1, 0], [2], None, [1, 1, 1], [4, 8, 0, 4], None]
    resident = resident_engine(module, torch.device(SIM))
    resident.place()
    expected = [run(module, noise(), order).cpu() for order in orders]
    resident.remove()
    placement = placed(module, on_disk(module, tmp_path, kept=kept), 0)
    for order, wanted in zip(orders, expected, strict=True):
        check(module, wanted, order)
    placement.remove()
    assert_gone(module, sim, kept)


@pytest.mark.parametrize("streams", [True, False])
def test_slow_disk_does_not_deadlock(
    streams: bool, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = varied([64] * 6)
    expected = truth(module)
    source = on_disk(module, tmp_path)
    if not streams:
        monkeypatch.delattr(torch.sim, "Stream")
    monkeypatch.setattr(reader, "BATCH_BYTES", 4096)
    quick = reader._read_exactly

    def slow(*args: Any) -> None:
        time.sleep(0.0005)
        quick(*args)

    monkeypatch.setattr(reader, "_read_exactly", slow)
    placement = placed(module, source, 0)
    for order in (None, None, [5, 0, 3], None):
        resident_result = expected if order is None else None
        result = run(module, noise(), order).cpu()
        if resident_result is not None:
            assert torch.equal(result, resident_result)
    placement.remove()
    assert_gone(module, sim)


def test_reader_is_ahead_of_the_ring(sim: ModuleType, tmp_path: Path) -> None:
    module = varied([64] * 10)
    placement = placed(module, on_disk(module, tmp_path), 0)
    for _ in range(2):
        run(module, noise())
        settle(placement)
        assert placement._source._staging is not None
        ahead = {w.fill.group for w in placement._source._staging._windows if w.fill}
        assert placement._ring is not None
        inside = {place.group for place in placement._ring.slots if place.holds}
        assert inside | ahead == set(placement._groups[: len(inside) + stager.WINDOWS])
    placement.remove()


def test_windows_are_not_filled_anew_before_their_copy_is_done(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies here happen as late as they may: when the host, or what computes, waits for them."""
    queued: list[tuple[torch.Tensor, torch.Tensor]] = []
    lock = threading.Lock()

    def flush() -> None:
        with lock, torch.inference_mode():
            while queued:
                target, source = queued.pop(0)
                target.copy_(source)

    class Late(sim.Event):  # type: ignore[name-defined, misc]
        def synchronize(self) -> None:
            flush()

        wait_aside = synchronize  # of readers

    def copy(self: queues.Queues, target: torch.Tensor, source: torch.Tensor, after: Any, done: Any) -> None:
        with lock:
            queued.append((target, source))

    waits = queues.Queues.wait

    def wait(self: queues.Queues, event: Any) -> None:
        flush()
        waits(self, event)

    module = varied([64] * 9)
    expected = truth(module)
    source = on_disk(module, tmp_path)
    monkeypatch.setattr(queues.Queues, "event", lambda self, waited_for=False: Late())
    monkeypatch.setattr(queues.Queues, "copy", copy)
    monkeypatch.setattr(queues.Queues, "wait", wait)
    placement = placed(module, source, 0)
    for _ in range(10):
        check(module, expected)
        time.sleep(0.005)  # for the reader to be ahead
    placement.remove()
    flush()
    queued.clear()


# Failures


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> list[int]:
    whole, calls = reader._read_exactly, [0]

    def read(*args: Any) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise error
        whole(*args)

    monkeypatch.setattr(reader, "_read_exactly", read)
    return calls


def test_error_of_the_reader_at_any_read_surfaces_and_leaves_nothing(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = varied([64] * 6)
    expected = truth(module)
    source = on_disk(module, tmp_path)
    for after in range(0, 40, 3):
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, OSError(5, "Input/output error"), after)
            placement = streamed_engine(module, torch.device(SIM), budget(module, 0.3), source)
            with pytest.raises(OSError, match="0.safetensors cannot be read.*Check the disk") as caught:
                placement.place()
                for _ in range(20):
                    run(module, noise())
            assert "\n" not in str(caught.value)
            release_frames(caught.value)
            placement.remove()
        assert_gone(module, sim)
    placement = placed(module, source, 0.3)
    check(module, expected)
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, OSError(5, "Input/output error"), 0)
        with pytest.raises(OSError, match="cannot be read"):
            for _ in range(5):
                run(module, noise())
    for _ in range(6):  # errors that were read ahead surface too; then all is well again
        try:
            check(module, expected)
        except OSError:
            continue
    check(module, expected)
    placement.remove()
    assert_gone(module, sim)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kept", ["", "034"])
def test_error_in_a_block(error: type[BaseException], kept: str, sim: ModuleType, tmp_path: Path) -> None:
    module = varied([64] * 6)
    expected = truth(module)
    placement = placed(module, on_disk(module, tmp_path, kept=kept), 0.25)

    def fail() -> None:
        raise error("stop")

    for block in module.blocks:
        block.middle = fail
        with pytest.raises(error):
            run(module, noise())
        block.middle = None
        check(module, expected)
    placement.remove()
    assert_gone(module, sim, kept)


@pytest.mark.parametrize("waits_for", ["the ring", "residents"])
def test_a_disk_that_gives_nothing_can_be_stopped(
    waits_for: str, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = varied([64] * 6)
    expected, source, gives = truth(module), on_disk(module, tmp_path), threading.Event()
    placement = placed(module, source, 0)
    check(module, expected)
    fill, start = stager.fill_batch, time.monotonic()

    def stop() -> None:
        if time.monotonic() - start > 0.5:
            gives.set()  # what is being read, nothing can stop
            raise FaultError

    with monkeypatch.context() as patch:
        patch.setattr(stager, "fill_batch", lambda *job: gives.wait(SECONDS) and fill(*job))
        patch.setattr(host, "throw_if_interrupted", stop)
        with pytest.raises(FaultError):
            if waits_for == "residents":
                placed(varied([64] * 6).to("meta"), source, 1)
            else:
                run(module, noise()), run(module, noise())
    assert time.monotonic() - start < SECONDS / 2
    check(module, expected)
    placement.remove()
    assert_gone(module, sim)


def test_interrupt_while_waiting_for_the_disk(sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = varied([64] * 6)
    expected = truth(module)
    placement = placed(module, on_disk(module, tmp_path), 0)

    def interrupted(ref: Any) -> None:
        raise KeyboardInterrupt

    check(module, expected)
    assert placement._source._staging is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement._source._staging, "wait", interrupted)
        patch.setattr(reader, "_read_exactly", lambda *args: time.sleep(0.05))
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                run(module, noise())
        placement.remove()
    assert_gone(module, sim)


def test_a_stop_is_seen_wherever_weights_come_from_the_disk(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = varied([64] * 6)
    expected, source = truth(module), on_disk(module, tmp_path)
    looks: list[int] = []

    def stop_at(number: int) -> None:
        def look() -> None:
            looks.append(1)
            if len(looks) == number:
                raise KeyboardInterrupt

        looks.clear()
        monkeypatch.setattr(host, "throw_if_interrupted", look)

    monkeypatch.setattr(stager, "_LOOK_SECONDS", SECONDS)  # or it would look more often when the machine is busy
    stop_at(0)
    placement = placed(module, source, 0.5)
    placing = len(looks)
    check(module, expected)
    in_all = len(looks)
    placement.remove()
    assert placing >= 2 and in_all - placing >= 3
    for number in range(1, placing + 1):
        stop_at(number)
        with pytest.raises(KeyboardInterrupt):
            placed(module, source, 0.5)
        assert_gone(module, sim)
    for number in range(placing + 1, in_all + 1):
        stop_at(number)
        placement = placed(module, source, 0.5)
        with pytest.raises(KeyboardInterrupt):
            run(module, noise())
        stop_at(0)
        check(module, expected)
        placement.remove()
        assert_gone(module, sim)


def test_out_of_memory_at_every_allocation_of_placing(sim: ModuleType, tmp_path: Path) -> None:
    module = varied([64] * 5)
    source = on_disk(module, tmp_path)
    sim.reset_stats()
    placed(module, source, 0.5).remove()
    count = sim.stats().allocation_count
    assert count >= 8
    for n in range(1, count + 1):
        with sim.fail_after(n), pytest.raises(torch.OutOfMemoryError):
            placed(module, source, 0.5)
        assert_gone(module, sim)


def test_taken_away_while_it_waits(sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = varied([64] * 6)
    placement = placed(module, on_disk(module, tmp_path), 0)
    monkeypatch.setattr(reader, "_read_exactly", lambda *args: time.sleep(0.1))
    timer = threading.Timer(0.15, placement.remove)
    timer.start()
    with pytest.raises(RuntimeError, match="taken off the device"):
        for _ in range(50):
            run(module, noise())
    timer.join()
    placement.remove()
    assert_gone(module, sim)


# Growing and shrinking


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(8, 48), min_size=3, max_size=10),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 9), st.integers(-40_000, 40_000)), max_size=12),
    st.sampled_from(["paged", "", "0246", "123"]),
)
def test_grow_and_shrink_in_mid_forward(
    sim: ModuleType, tmp_path: Path, widths: list[int], share: float, moves: list[tuple[int, int]], where: str
) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    module = varied(widths)
    expected = truth(module)
    with pytest.MonkeyPatch.context() as patch:
        if where == "paged":
            pins(patch, room=stager.WINDOWS)
        placement = placed(module, None if where == "paged" else on_disk(module, tmp_path, kept=where), share)
        try:
            for at, change in moves:
                block = module.blocks[at % len(widths)]

                def move(change: int = change) -> None:
                    method = placement.grow if change > 0 else placement.shrink
                    thread = threading.Thread(target=method, args=(abs(change),))
                    thread.start()
                    thread.join()

                block.middle = move
                check(module, expected)
                block.middle = None
                assert sim.stats().allocated_bytes == placement.resident_bytes == planned_bytes(placement)
                check(module, expected)
            assert sim.stats().hazards == 0
        finally:
            placement.remove()
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_others_grow_and_shrink_it_all_the_time(sim: ModuleType, tmp_path: Path) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.1)
    for turn in range(8) if os.environ.get("BALLAST_SOAK") else (1, 2):
        chance = random.Random(turn)
        module = varied([chance.randint(8, 90) for _ in range(chance.randint(3, 9))])
        expected = truth(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "BATCH_BYTES", 6000)
            if turn % 2:
                pins(patch, room=chance.randint(3, 8))
            kept = ("", "024")[turn // 2 % 2]
            source = None if turn % 2 else on_disk(module, tmp_path, 2, kept=kept)
            placement = placed(module, source, chance.random())
            done, errors = threading.Event(), []

            def churn(seed: int, placement: Engine = placement, done: Any = done, errors: Any = errors) -> None:
                mine = random.Random(seed)
                try:
                    while not done.is_set():
                        (placement.grow if mine.random() < 0.5 else placement.shrink)(mine.randint(0, 60_000))
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(2)]
            for thread in threads:
                thread.start()
            try:
                for _ in range(6):
                    check(module, expected)
            finally:
                done.set()
                for thread in threads:
                    thread.join()
            assert not errors
            check(module, expected)
            assert sim.stats().allocated_bytes == placement.resident_bytes == planned_bytes(placement)
            placement.remove()
        assert sim.stats().allocated_bytes == 0
        assert sim.stats().hazards == 0


# RAM that could not be pinned


def pins(patch: pytest.MonkeyPatch, room: int) -> set[int]:
    """Let the device want pinned memory, of which the host gives so many buffers. Returns those that are."""
    held: set[int] = set()

    def pin(flat: torch.Tensor, device: torch.device) -> bool:
        if flat.data_ptr() not in held and len(held & set(hostbuffer._pages)) < room:
            held.add(flat.data_ptr())
        return flat.data_ptr() in held

    def unpin(flat: torch.Tensor) -> None:
        held.discard(flat.data_ptr())

    gc.collect()
    patch.setattr(hostbuffer, "wants_pinned", lambda device: True)
    for place in (hostbuffer, ring):
        patch.setattr(place, "pin", pin)
        patch.setattr(place, "unpin", unpin)
    return held


@pytest.mark.parametrize("room", [0, 2, 3, 5, 20])
def test_what_could_not_be_pinned_comes_through_windows(
    room: int, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = varied([64] * 8)
    expected = truth(module)
    held = pins(monkeypatch, room)
    placement = placed(module, None, 0)
    through = [group for group in placement._groups if group.parts]
    if room == 20:
        assert placement._source._staging is None, "all blocks are pinned"
        assert not through
    elif room < stager.WINDOWS:
        assert placement._source._staging is None, "without pinned windows nothing is gained"
        assert not through
        assert sum(group.pinned for group in placement._groups) == room
    else:
        assert placement._source._staging is not None
        assert all(window.memory.data_ptr() in held for window in placement._source._staging._windows)
        assert len(through) == 16 - (room - stager.WINDOWS)
        assert not any(block.pinned for block in through)
    for _ in range(3):
        check(module, expected)
    settle(placement)
    sim.reset_stats()
    check(module, expected)
    settle(placement)
    assert sim.stats().h2d_bytes == placement.layout.copied_bytes + NOISE
    placement.remove()
    assert sim.stats().allocated_bytes == 0
    assert sim.stats().hazards == 0
