"""What a machine can do: measured when asked, once, and remembered; pinned memory within the host's account."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ballast.memory import accelerator, files, probe, speeds
from ballast.memory.accelerator import Accelerator
from ballast.memory.codecs import fused
from ballast.memory.planning.forecast import Operations
from ballast.memory.rates import ASSUMED, Rates
from ballast.memory.weights import direct, hostbuffer, reader
from ballast.memory.weights.stored import stored_tensors
from safetensors.torch import save_file

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
FOUND = {"pinned": 20e9, "paged": 8e9, "operations": 50e12, "memory": 400e9, "float32": 12e12, "float16": 45e12}
FOUND |= {"attention": 40e12, "kernel": 6e-6}
DISK, OTHER = 2049, 2065  # device numbers


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(speeds, "_known", {})
    monkeypatch.setattr(hostbuffer, "_left_paged", set())
    yield


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A pretend card; the list tells how often it was measured."""
    measured: list[torch.device] = []

    def measure(device: torch.device) -> dict[str, float]:
        measured.append(device)
        return dict(FOUND)

    monkeypatch.setattr(probe, "_measure", measure)
    monkeypatch.setattr(
        probe, "Accelerator", lambda device: SimpleNamespace(identity="A card", empty_cache=lambda: None)
    )
    return measured


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_known", {})


def test_simulated_card_is_as_fast_as_it_was_made(sim: ModuleType) -> None:
    sim.enable(total="1GB", h2d_gbps=12, tflops=3)
    expected = Rates(12e9, 12e9, ASSUMED.disk_bytes_per_second, 3e12, "simulated", math.inf, 0.0, 3e12)
    assert probe.rates(torch.device("sim:0")) == expected
    sim.enable(total="1GB", h2d_gbps=12, tflops=3, attention_tflops=1)
    assert probe.rates(torch.device("sim:0")) == replace(expected, attention=1e12)
    sim.enable(total="1GB")
    assert probe.rates(torch.device("sim:0")).operations_per_second == math.inf


def test_each_type_has_a_rate_of_its_own() -> None:
    rates = Rates(1e9, 1e9, 1e9, 50e12, float32=12e12, float16=45e12)
    assert [rates.operations_in(each) for each in ("F32", "F16", "BF16", "F8_E4M3")] == [12e12, 45e12, 50e12, 50e12]
    assert [ASSUMED.operations_in(each) for each in ("F32", "F16", "BF16")] == [15e12, 60e12, 60e12]


def test_attention_has_a_rate_of_its_own_in_each_type() -> None:
    """0.8 of that of products, as it was measured in bfloat16; as fast as they are where nothing tells."""
    rates = Rates(1e9, 1e9, 1e9, 50e12, float32=12e12, float16=45e12, attention=40e12)
    assert [rates.attention_in(each) for each in ("F32", "F16", "BF16")] == pytest.approx([9.6e12, 36e12, 40e12])
    assert [ASSUMED.attention_in(each) for each in ("F32", "F16", "BF16")] == [15e12, 60e12, 60e12]
    work = Operations(100e12, 20e12)
    assert (work.total, work.seconds(rates, "BF16"), work.seconds(ASSUMED, "BF16")) == (120e12, 2.5, 2.0)


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_devices_that_are_not_measured_are_assumed(kind: str) -> None:
    assert probe.rates(torch.device(kind)) == ASSUMED


def test_measured_once_and_remembered(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Rates(20e9, 8e9, ASSUMED.disk_bytes_per_second, 50e12, "measured", 400e9, 6e-6, 12e12, 45e12, 40e12)
    expected = replace(expected, fused=fused.has_kernels(CUDA))
    assert probe.rates(CUDA) == probe.rates(CUDA) == expected
    another_process(monkeypatch)
    assert probe.rates(CUDA) == expected
    assert len(card) == 1
    assert (files.cache_home() / "rates.json").is_file()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"x": 1}', "\x00", '{"KEY": 3}', '{"KEY": {"pinned": "fast"}}', "NAN", "ZERO"]
)
def test_damaged_file_is_measured_again(
    content: str, card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.rates(CUDA)
    path = files.cache_home() / "rates.json"
    key = next(iter(json.loads(path.read_text())))
    bad = {"NAN": FOUND | {"paged": math.nan}, "ZERO": FOUND | {"operations": 0}}.get(content)
    path.write_text(json.dumps({key: bad}) if bad else content.replace("KEY", key))
    another_process(monkeypatch)
    assert probe.rates(CUDA).pinned_bytes_per_second == 20e9
    assert len(card) == 2
    another_process(monkeypatch)
    probe.rates(CUDA)
    assert len(card) == 2


def test_another_torch_is_measured_anew(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is known of each stays."""
    probe.rates(CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.0")
        assert probe.known_rates(CUDA) == ASSUMED
        probe.rates(CUDA)
    another_process(monkeypatch)
    assert probe.rates(CUDA).source == probe.known_rates(CUDA).source == "measured"
    assert len(card) == 2


def test_what_was_kept_without_a_rate_of_attention_is_measured_again(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(FOUND, "attention")
        with pytest.raises(KeyError):
            probe.rates(CUDA)
    another_process(monkeypatch)
    assert probe.known_rates(CUDA) == ASSUMED
    assert probe.rates(CUDA).attention == 40e12
    assert len(card) == 2


def test_unwritable_directory_costs_nothing(
    card: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert probe.rates(CUDA).source == "measured"
    speeds.observe_disk(2**30, 1.0, DISK)
    assert probe.rates(CUDA, DISK).disk_bytes_per_second == 2**30
    assert len(card) == 1


def test_failing_probe_is_no_failure(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: torch.device) -> dict[str, float]:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "_measure", measure)
        assert probe.rates(CUDA) == ASSUMED
    assert probe.rates(CUDA).source == "measured"


def test_nothing_is_pinned_where_it_gains_nothing(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hostbuffer.wants_pinned(CUDA)
    probe.rates(CUDA)
    assert hostbuffer.wants_pinned(CUDA)
    monkeypatch.setitem(FOUND, "paged", 31e9)
    (files.cache_home() / "rates.json").unlink()
    another_process(monkeypatch)
    probe.rates(CUDA)
    assert not hostbuffer.wants_pinned(CUDA)
    assert not hostbuffer.pin(hostbuffer.allocate(10), CUDA)


def test_refused_pinning_is_not_remembered(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(FOUND, "pinned")
        assert probe.rates(CUDA).pinned_bytes_per_second == 8e9
        assert probe.rates(CUDA).pinned_bytes_per_second == 8e9
    assert len(card) == 1
    assert hostbuffer.wants_pinned(CUDA)
    another_process(monkeypatch)
    assert probe.rates(CUDA).pinned_bytes_per_second == 20e9


@pytest.mark.parametrize("fused", [True, False])
def test_measuring_runs_and_leaves_nothing(fused: bool, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is made of products it has their rate, and no matrices of scores are made to find that out."""
    sim.enable(total="1GB", fused_attention=fused)
    monkeypatch.setattr(probe, "COPY_BYTES", 2**20)
    for name in ("_TOKENS", "_WIDTH", "_INNER", "_HEAD", "_CHANNELS", "_SIDE"):
        monkeypatch.setattr(probe, name, 64)
    found = probe._try_to_measure(torch.device("sim:0"))
    assert found is not None
    assert found.keys() == {"pinned", "paged", "operations", "memory", "float32", "float16", "attention", "kernel"}
    assert fused or found["attention"] == found["operations"]
    assert all(value > 0 for value in found.values())
    assert sim.stats().allocated_bytes == 0


def test_disk_is_observed_in_large_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds.observe_disk(2**20, 1e-3, DISK)
    speeds.observe_disk(2**30, 0, DISK)
    speeds.observe_disk(2**30, 0.1, None)  # of the page cache, or of several
    assert probe.rates(CPU, DISK) == probe.rates(CPU) == ASSUMED
    speeds.observe_disk(2**30, 0.5, DISK)
    another_process(monkeypatch)
    assert probe.rates(CPU, DISK).disk_bytes_per_second == 2**31
    speeds.observe_disk(2**30, 1, DISK)
    assert probe.rates(CPU, DISK).disk_bytes_per_second == 1.5 * 2**30
    assert probe.rates(CPU, OTHER) == ASSUMED, "another disk"


def test_a_read_tells_which_disk_it_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And that it came from none, where the page cache had the file."""
    seen: list[tuple[int, int | None]] = []
    monkeypatch.setattr(reader, "observe_disk", lambda nbytes, seconds, disk: seen.append((nbytes, disk)))
    save_file({"x": torch.ones(1000)}, file := tmp_path / "a.safetensors")
    stored = stored_tensors([file])["x"]

    def read() -> None:
        reader.read([(reader.extent_of(stored, torch.bfloat16, 0), hostbuffer.allocate(2000))])

    file.read_bytes()
    read()
    with monkeypatch.context() as patch:
        patch.setattr(direct, "is_cached", lambda *_: False)  # not all systems can be made to forget a file
        read()
    cached = hasattr(os, "RWF_NOWAIT")
    assert seen == [(4000, None if cached else file.stat().st_dev), (4000, file.stat().st_dev)]


def test_reads_of_several_disks_tell_of_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(reader, "observe_disk", lambda nbytes, seconds, disk: seen.append(disk))
    monkeypatch.setattr(direct, "is_cached", lambda *_: False)
    numbers = {"a.safetensors": DISK, "b.safetensors": OTHER}
    monkeypatch.setattr(reader, "disk_number", lambda path: numbers[path.name])
    for names in (["a.safetensors"], ["b.safetensors"], list(numbers)):
        for name in names:
            save_file({"x": torch.ones(1000)}, tmp_path / name)
        jobs = [reader.extent_of(stored_tensors([tmp_path / name])["x"], torch.float32, 0) for name in names]
        reader.read([(job, hostbuffer.allocate(4000)) for job in jobs])
    assert seen == [DISK, OTHER, None]


def test_cards_of_one_name_are_told_apart(sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what the driver says of them, and by the width of their slot."""
    device = torch.device("sim:0")
    first = probe.card_of(device)
    sim.enable(total="1GB", slot=3)
    second = probe.card_of(device)
    assert first != second == probe.card_of(device)
    assert Accelerator(device).identity == "Simulated accelerator, simulated-3, ffff:03:00.0"
    slot = tmp_path / "ffff:03:00.0"
    slot.mkdir()
    (slot / "current_link_width").write_text("4\n")
    monkeypatch.setattr(accelerator, "_BUS", tmp_path)
    assert Accelerator(device).identity == "Simulated accelerator, simulated-3, ffff:03:00.0, x4"
    sim.enable(total="1GB", tflops=1)
    fast = probe.card_of(device)
    sim.enable(total="1GB", tflops=1, attention_tflops=0.5)
    assert probe.card_of(device) not in (first, fast), "what is measured there is another thing"
    sim.enable(total="1GB")
    assert probe.card_of(device) == first
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    assert probe.card_of(device) not in (first, second), "another torch has other kernels"
    assert Accelerator(CPU).identity == "CPU"


# Pinned memory, in ComfyUI


class Host(ModuleType):
    """The host's pinning, as ComfyUI 0.33 has it."""

    def __init__(self, cap: int) -> None:
        super().__init__("comfy.model_management")
        self.cap = cap
        self.pinned: dict[int, int] = {}
        self.types: set[str] = set()

    def ensure_pin_registerable(self, size: int) -> bool:
        return sum(self.pinned.values()) + size <= self.cap

    def pin_memory(self, tensor: torch.Tensor) -> bool:
        self.types.add(type(tensor).__name__)
        if self.cap <= 0:
            return False
        self.pinned[tensor.data_ptr()] = tensor.nbytes
        return True

    def unpin_memory(self, tensor: torch.Tensor) -> bool:
        assert self.pinned.pop(tensor.data_ptr()) == tensor.nbytes
        tensor[0] = 1  # the memory is still there
        return True


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Host]:
    def use(cap: int) -> Host:
        found = Host(cap)
        monkeypatch.setitem(sys.modules, "comfy.model_management", found)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("pinned past the host"))
        return found

    return use


def test_host_pins_and_unpins_before_the_memory_goes(comfy: Callable[[int], Host]) -> None:
    found = comfy(10_000)
    before = hostbuffer._pinned_bytes
    flat, views = hostbuffer.pack([torch.ones(1000), torch.ones(5)])
    assert hostbuffer.pin(flat, CUDA)
    assert hostbuffer.pin(flat, CUDA)
    assert found.pinned == {flat.data_ptr(): 4352}
    assert found.types == {"Parameter"}
    assert hostbuffer._pinned_bytes == before
    hostbuffer.unpin(flat)
    assert not found.pinned
    assert hostbuffer.pin(flat, CUDA)
    del flat
    assert found.pinned
    del views
    gc.collect()
    assert not found.pinned


def test_cap_and_flag_of_the_host_are_obeyed(comfy: Callable[[int], Host]) -> None:
    comfy(10_000)
    kept = [hostbuffer.allocate(4096) for _ in range(3)]
    assert [hostbuffer.pin(flat, CUDA) for flat in kept] == [True, True, False]
    del kept
    gc.collect()
    comfy(-1)  # --disable-pinned-memory
    assert not hostbuffer.pin(hostbuffer.allocate(100), CUDA)


def test_pins_of_a_running_model_are_spared_where_the_host_can(
    comfy: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI 0.38.1 asks with `evict_active`, True unless said otherwise; so does 0.33, but not in `pin_memory`."""
    found, asked = comfy(10_000), []

    def pin_memory(tensor: torch.Tensor, evict_active: bool = True) -> bool:
        asked.append(("pin", evict_active))
        return Host.pin_memory(found, tensor)

    def make_room(size: int, evict_active: bool = True) -> bool:
        asked.append(("room", evict_active))
        return True

    monkeypatch.setattr(found, "ensure_pin_registerable", make_room)
    flat = hostbuffer.allocate(100)
    assert hostbuffer.pin(flat, CUDA)
    hostbuffer.unpin(flat)
    monkeypatch.setattr(found, "pin_memory", pin_memory)
    assert hostbuffer.pin(flat, CUDA)
    assert asked == [("room", False), ("room", False), ("pin", False)]


def test_host_that_does_not_pin_leaves_it_to_us(comfy: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    comfy(0)
    monkeypatch.setitem(sys.modules, "comfy.model_management", ModuleType("comfy.model_management"))
    calls: list[str] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append("register") or 0,
        cudaHostUnregister=lambda *args: calls.append("unregister") or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    flat = hostbuffer.allocate(100)
    assert hostbuffer.pin(flat, CUDA)
    del flat
    gc.collect()
    assert calls == ["register", "unregister"]
