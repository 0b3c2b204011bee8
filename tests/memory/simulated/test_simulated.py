"""The books of the simulated accelerator: bytes, copies, failures on purpose, dry runs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from ballast.memory import simulated
from ballast.memory.simulated.dry import dry_card
from places import TESTS

if simulated.supported():
    pytest.skip(simulated.supported() or "", allow_module_level=True)

MB = 2**20


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """A fresh card of 64 MB, empty before and after."""
    gc.collect()
    simulated.enable("64MB")
    before = simulated.stats().allocated_bytes
    yield
    gc.collect()
    assert simulated.stats().allocated_bytes == before


def held() -> int:
    return simulated.stats().allocated_bytes


def floats(megabytes: float) -> torch.Tensor:
    return torch.zeros(int(megabytes * MB / 4), device="sim")


def test_bytes_are_counted_by_storage() -> None:
    base = held()
    x = torch.empty(1000, dtype=torch.float16, device="sim")
    assert held() - base == 2000
    y = x[10:20].view(2, 5)
    assert held() - base == 2000
    del x
    assert held() - base == 2000, "a view keeps its storage"
    z = y + 1
    assert held() - base == 2020
    del y, z
    assert held() == base
    assert simulated.stats().peak_bytes - base == 2020
    assert torch.empty(0, device="sim").numel() == 0


def test_out_of_memory_as_cuda_says_it() -> None:
    keep = floats(40)
    before = held()
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.0 MB\. sim:0 has a total"):
        floats(32)
    with pytest.raises(torch.OutOfMemoryError), torch.inference_mode():
        torch.cat([keep, keep])
    assert held() == before
    free, total = torch.sim.mem_get_info()
    assert total == 64 * MB and free == total - before
    simulated.enable("64MB", reserved="20MB")
    assert torch.sim.mem_get_info() == (64 * MB - 20 * MB - before, 64 * MB)
    with pytest.raises(torch.OutOfMemoryError):
        floats(5)


def test_enable_again_keeps_what_is_live() -> None:
    keep = floats(1)
    simulated.enable("1GB", tflops=1)
    stats = simulated.stats()
    assert stats.total_bytes == 2**30 and stats.allocated_bytes == stats.peak_bytes >= keep.nbytes
    assert stats.h2d_bytes == stats.clock_seconds == 0
    with pytest.raises(ValueError, match="h2d_gbps"):
        simulated.enable(h2d_gbps=0)
    with pytest.raises(ValueError, match="size"):
        simulated.enable("huge")
    assert simulated.stats().total_bytes == 2**30


def test_interval_peak_leaves_the_peak_alone() -> None:
    simulated.take_interval_peak()
    base = held()
    del (x := [floats(2)])[0]
    assert simulated.take_interval_peak() - base == 2 * MB
    x = [floats(1)]
    assert simulated.take_interval_peak() - base == 1 * MB
    assert simulated.stats().peak_bytes - base == 2 * MB
    assert torch.sim.max_memory_allocated() - base == 2 * MB
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == torch.sim.memory_allocated() == base + x[0].nbytes


def test_copies_are_counted_and_can_be_watched() -> None:
    seen: list[simulated.Transfer] = []
    with simulated.watch(seen.append):
        x = torch.ones(10).to("sim")
        assert seen[0].storage_ptr == x.untyped_storage().data_ptr()
        y = x.clone()
        y.copy_(x)
        x.to(torch.float16)
        x.to("cpu", torch.float64)
        assert x.sum().item() == 10
        torch.zeros(4).copy_(x[:4])
    assert [(t.direction, t.nbytes, t.tensor_shape) for t in seen] == [
        ("h2d", 40, (10,)), ("d2d", 40, (10,)), ("d2h", 80, (10,)), ("d2h", 4, ()), ("d2h", 16, (4,)),
    ]  # fmt: skip
    assert seen[0].storage_ptr == seen[2].storage_ptr == seen[4].storage_ptr != seen[1].storage_ptr
    stats = simulated.stats()
    assert (stats.h2d_bytes, stats.h2d_count, stats.d2h_bytes, stats.d2h_count) == (40, 1, 100, 3)
    torch.ones(1).to("sim")
    assert len(seen) == 5


def test_fail_after_hits_one_allocation() -> None:
    with simulated.fail_after(3):
        floats(1)
        view = floats(1)[:4]
        before = held()
        with pytest.raises(torch.OutOfMemoryError):
            view + 1
        assert held() == before
        view + 1
    with simulated.fail_after(1):
        pass
    floats(1)
    with pytest.raises(ValueError, match="from 1"), simulated.fail_after(0):
        pass


def test_threads() -> None:
    before, failures = held(), []

    def work(seed: int) -> None:
        try:
            with torch.inference_mode():
                x = torch.full((64,), float(seed)).to("sim")
                for _ in range(200):
                    y = (x * 2 + x[:1]).view(8, 8).t().reshape(64)
                    assert y[0].item() == 3 * seed
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and held() == before
    assert simulated.stats().h2d_count == 6


def test_one_clear_error_where_the_place_is_taken() -> None:
    code = (
        "import conftest, torch; torch.utils.rename_privateuse1_backend('other')\n"
        "from ballast.memory import simulated\n"
        "try: simulated.enable()\n"
        "except RuntimeError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS)
    assert "which 'other' has taken" in result.stdout, result.stderr


def test_shapes_change_in_place_in_a_dry_run() -> None:
    """The text encoder of Kolors does it. Views and bytes stay as they are."""
    with torch.inference_mode(), dry_card() as card:
        small, large = torch.arange(6.0).view(2, 3).to("meta"), torch.zeros(2000, 1000, device="meta")
        held = card.allocated_bytes()
        small.unsqueeze_(0).transpose_(1, 2)
        large.t_()
        assert (small.shape, large.shape) == ((1, 3, 2), (1000, 2000))
        assert card.allocated_bytes() == held
        assert (small + 1).cpu().flatten().tolist() == [1, 4, 2, 5, 3, 6]
        assert (large + 1).squeeze_().shape == (1000, 2000)
