"""On a real accelerator: the same result as resident, and nothing left. The same bodies run on the simulated one.

`pytest tests/memory/test_gpu.py -m gpu` runs those on a real one, and only those: torch has one accelerator at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ballast
import pytest
import streamed_models
import striped_vaes
import tiny
import torch
from ballast.bench.models import encode
from ballast.memory import ManagedModel, manager, simulated, striped
from ballast.memory.accelerator import Accelerator, resolve_device
from ballast.memory.codecs import fused
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.four_bit import FourBit
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.codecs.int8 import Int8
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from ballast.memory.engine.placement import Placement
from ballast.memory.planning.fit import sizes_of
from ballast.memory.simulated import card as simulated_card
from ballast.memory.weights import hostbuffer
from ballast.pipelines.decoding.precision import full_float32
from ballast.pipelines.sampling.kernels import kernels
from places import ROOT
from selection import few
from streamed_models import Blocks, least_bytes, nbytes, resident_engine, run, streamed_engine
from torch.utils._pytree import tree_map_only

Folders = Callable[[str], Path]
REAL = pytest.param("real", marks=pytest.mark.gpu)
ASYNC = "backend:cudaMallocAsync"


@pytest.fixture(params=["sim", REAL])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device, which is found empty and must be left so."""
    if request.param == "sim":
        card = request.getfixturevalue("sim")
        yield torch.device("sim:0")
        assert card.stats().hazards == 0
        return
    if resolve_device().type == "cpu":
        pytest.skip("torch sees no accelerator")
    if simulated.is_enabled():
        pytest.skip("the simulated card has taken the accelerator's place in this process: run with -m gpu")
    accelerator = Accelerator(found := resolve_device())
    left_bytes = accelerator.allocated_bytes()
    yield found
    manager(found).free()
    accelerator.empty_cache()
    assert accelerator.allocated_bytes() == left_bytes, "the test left something on the device"


def to(device: torch.device, arguments: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)


def check(placement: Placement, arguments: dict[str, Any], expected: torch.Tensor | None = None) -> torch.Tensor:
    """Place it, run it three times, take it away: the result is the expected one each time."""
    placement.place()
    try:
        streamed_models.rests(placement)
        for _ in range(3):
            found = run(placement.module, **to(placement.device, arguments))[0].cpu()
            assert expected is None or torch.equal(found, expected)
    finally:
        placement.remove()
    return found


def noise(width: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(device)}


def wide(device: torch.device) -> int:
    """The width of blocks of which a few fill more than an allocator's rounding."""
    return 64 if device.type == "sim" else 2048


# Streaming


@pytest.mark.parametrize("name", few(["flux", "lumina2", "wan"], "flux", "wan"))
def test_any_share_streams_to_the_resident_result(name: str, device: torch.device) -> None:
    module, arguments = streamed_models.model(name)
    expected = check(resident_engine(module, device), arguments)
    streamed = []
    for share in (0, 0.3, 0.7, 1):
        placement = streamed_engine(module, device, streamed_models.budget(module, share))
        streamed.append(placement.layout.copied_bytes)
        check(placement, arguments, expected)
    assert streamed == sorted(streamed, reverse=True) and streamed[0] > streamed[-1]


@pytest.mark.parametrize("weights", ["exact12", "int8", "fp8"])
def test_encoded_weights_stream_to_the_resident_result(weights: str, device: torch.device) -> None:
    module, arguments = Blocks(6).bfloat16(), {"x": noise(64, torch.device("cpu"))["x"].bfloat16()}
    plain = check(resident_engine(module, device), arguments)
    encode(module, weights)
    expected = check(resident_engine(module, device), arguments, plain if weights == "exact12" else None)
    check(streamed_engine(module, device), arguments, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not fused.has_kernels(resolve_device()), reason="there is no CUDA card with Triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_kernel_decodes_what_the_steps_do(dtype: torch.dtype) -> None:
    on = torch.device("cuda", torch.cuda.current_device())
    codecs: list[Codec] = [
        *(codec_of(kind, (33, 1536), dtype) for kind in TYPES.values() if kind.decode),
        Int8((33, 1530), dtype, torch.int8, 33),
        Fp8((33, 1530), dtype, torch.float8_e4m3fn, 1),
        Mxfp8((33, 1530), dtype),
        Nvfp4((33, 1530), dtype),
        FourBit((33, 1530), dtype, 64, 0.3),
    ]
    for codec in codecs:
        assert fused.is_proved(codec, on), codec
        parts = [torch.randint(0, 100, (part.nbytes,), dtype=torch.uint8).view(part.dtype) for part in codec.parts]
        expected = torch.empty(codec.count, dtype=dtype)
        codec.decode(parts, expected)
        found = torch.empty(codec.count, dtype=dtype, device=on)
        fused.decode(codec, [part.to(on) for part in parts], found)
        assert torch.equal(found.cpu(), expected), codec


@pytest.mark.parametrize("ram_share", few([0, 0.5], 0.5))
def test_what_ram_has_no_room_for_comes_from_disk(
    ram_share: float, device: torch.device, tiny_folders: Folders
) -> None:
    pipe, encode, sample, _ = tiny.stages("flux", tiny_folders("flux"), str(device))
    cond, (dit,) = encode(), pipe.denoisers
    expected, before = sample(cond), manager(device).disk_bytes_read
    windows = 3 * max(group.packed_bytes for group in sizes_of(dit).groups)
    dit.drop()
    poor = pipe.within(ram=windows + int(ram_share * (dit.size_bytes - windows)))
    family = tiny.FAMILIES["flux"]
    size = {"width": family.size[0], "height": family.size[1], "steps": 2, "guidance": family.guidance}
    found = poor.sample(
        cond, **size, **family.call_kwargs, strategy="streamed", on_step=lambda *_: manager(device).shrink(dit, 10**9)
    )
    assert torch.equal(found, expected)
    assert dit.host_bytes < dit.size_bytes
    assert manager(device).disk_bytes_read - before > dit.size_bytes, "what gave way is read again"


def test_refused_pins_stream_from_pages(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = streamed_models.model("sd3")
    expected = check(resident_engine(module, device), arguments)
    monkeypatch.setattr(hostbuffer, "_PINNED_SHARE", 0.0)
    before = hostbuffer._pinned_bytes
    check(streamed_engine(module, device), arguments, expected)
    assert hostbuffer._pinned_bytes <= before


def test_grow_and_shrink_in_mid_forward(device: torch.device) -> None:
    module, x = Blocks(8, wide(device)), noise(wide(device), device)
    placement = streamed_engine(module, device, streamed_models.budget(module, 0.5))
    expected = run(module, x["x"].cpu())
    placement.place()
    try:
        streamed_models.rests(placement)
        first = run(module, **x)
        torch.testing.assert_close(first.cpu(), expected, atol=1e-3, rtol=1e-3)
        for move in (placement.shrink, placement.grow, placement.shrink, placement.grow):
            module.blocks[3].middle = lambda move=move: move(nbytes(module) // 3)
            assert torch.equal(run(module, **x), first)
            assert least_bytes(module) <= placement.resident_bytes <= nbytes(module)
    finally:
        module.blocks[3].middle = None
        placement.remove()


# Memory


@contextmanager
def little_memory(device: torch.device, nbytes: int) -> Iterator[None]:
    """So many bytes can be had at first; no counter of free memory tells. On the simulated device one request fails."""
    if device.type == "sim":
        with simulated.fail_after(3):
            yield
            assert not simulated_card.card.fail_in, "nothing ran out of memory"
        return
    Accelerator(device).empty_cache()
    held, total = torch.cuda.memory_reserved(device), Accelerator(device).total_bytes()
    failed = torch.cuda.memory_stats(device).get("num_ooms", 0)
    torch.cuda.set_per_process_memory_fraction((held + nbytes) / total, device)
    try:
        yield
        assert torch.cuda.memory_stats(device).get("num_ooms", 0) > failed, "nothing ran out of memory"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_out_of_memory_is_survived_by_streaming(device: torch.device) -> None:
    if device.type not in ("sim", "cuda"):
        pytest.skip("its allocator has no cap")
    module, x = Blocks(16, wide(device)), noise(wide(device), device)
    unit, mgr = ManagedModel.from_module("blocks", "transformer", module), manager(device)
    with mgr.stage("sample", [unit]):
        expected = run(unit.module, **x)
    assert "resident" in mgr.timeline.stages[-1].units["blocks"].placement
    with little_memory(device, int(0.6 * nbytes(module))), mgr.stage("sample", [unit]):
        assert torch.equal(run(unit.module, **x), expected)
    assert mgr.report().resident_bytes == 0


def test_interrupt_leaves_nothing_and_the_next_run_works(device: torch.device, tiny_folders: Folders) -> None:
    pipe, encode, sample, _ = tiny.stages("lumina2", tiny_folders("lumina2"), str(device), keep=True)
    cond = encode()
    expected = sample(cond)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(cond, on_step=stop)
    assert manager(device).report().resident_bytes == 0
    assert not any(unit.leases for unit in pipe.denoisers)
    assert torch.equal(sample(cond), expected)


def test_stripes_give_the_picture_of_the_whole(device: torch.device) -> None:
    vae, latents = striped_vaes.build("flux")
    placement = resident_engine(vae, device)
    placement.place()
    try:
        with torch.inference_mode(), full_float32():
            whole = striped_vaes.decode(vae, latents.to(device)).cpu()
            found = striped.run(lambda z: striped_vaes.decode(vae, z), latents, device=device, budget_bytes=60_000)
    finally:
        placement.remove()
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


# The whole


def test_two_devices_at_a_time_give_the_same(device: torch.device, tiny_folders: Folders) -> None:
    other = torch.device("cpu") if device.type == "sim" else torch.device(device.type, 1)
    if device.type != "sim" and torch.get_device_module(device).device_count() < 2:
        pytest.skip("there is one device")
    runs = [tiny.stages("flux", tiny_folders("flux"), str(each)) for each in (device, other)]
    conds = [encode() for _, encode, _, _ in runs]
    one, same = (sample(cond) for (_, _, sample, _), cond in zip(runs, conds, strict=True))
    torch.testing.assert_close(one, same, atol=1e-4, rtol=1e-4)
    manager(other).free()
    assert manager(other).report().resident_bytes == 0


def test_compiled_blocks_stream(device: torch.device) -> None:
    module, arguments = Blocks(5), noise(64, torch.device("cpu"))
    expected = check(resident_engine(module, device), arguments)
    with kernels([module], compile=True):  # which says so where nothing can compile, and runs as it is
        placement = streamed_engine(module, device)
        placement.place()
        try:
            streamed_models.rests(placement)
            for _ in range(3):
                found = run(module, **to(device, arguments))[0].cpu()
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        finally:
            placement.remove()


@pytest.mark.parametrize("kind", [pytest.param("sim", marks=pytest.mark.soak), REAL])
def test_cuda_malloc_async_streams_too(kind: str, tmp_path: Path) -> None:
    """In a process of its own, since the allocator is chosen once; the simulated device has no such thing."""
    if kind == "real" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    settings = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ASYNC, "PYTORCH_ALLOC_CONF": ASYNC}
    chosen = f"(any_share or mid_forward) and {kind}"
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-k", chosen]
    command += ["-m", "gpu" if kind == "real" else "not gpu", f"--basetemp={tmp_path / 'inner'}"]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(resolve_device().type == "cpu", reason="torch sees no accelerator")
@pytest.mark.parametrize("name", ["lumina2", "flux", "hidream", "wan", "qwenimage"])
@pytest.mark.parametrize("strategy", ["resident", "leafwise"])
def test_staged_on_the_accelerator_equals_stock(
    name: str, strategy: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    family = tiny.FAMILIES[name]
    expected, _ = tiny.stock(tiny_folders(name))
    accelerator = manager().accelerator
    start = accelerator.allocated_bytes()
    pipe = ballast.open_pipeline(tiny_folders(name), cache_dir=tmp_path)
    cond = pipe.encode("a red boat", "blurry, grey", **family.encode_kwargs)
    assert accelerator.allocated_bytes() == start
    width, height = family.size
    latents = pipe.sample(
        cond, width=width, height=height, steps=2, guidance=family.guidance, frames=family.frames, strategy=strategy,
        **family.call_kwargs,
    )  # fmt: skip
    assert accelerator.allocated_bytes() == start
    picture = pipe.decode(latents)
    assert accelerator.allocated_bytes() == start
    assert picture.isfinite().all()
    torch.testing.assert_close(latents, expected.float(), atol=1e-2, rtol=1e-2)
