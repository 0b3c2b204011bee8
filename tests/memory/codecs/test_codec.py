"""What the engine counts on, of every codec: bytes as stated, work of the device alone, one line for wrong parts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import prod
from types import ModuleType

import pytest
import torch
from ballast.memory.codecs import exact12, fp8, int8, raw
from ballast.memory.codecs.bitsandbytes import LlmInt8
from ballast.memory.codecs.codec import CHUNK_WEIGHTS, Codec, chunks, pair_table, table_of, tiles
from ballast.memory.codecs.four_bit import FourBit
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.codecs.int8 import Int8, RotatedInt8
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from ballast.memory.codecs.raw import Raw
from ballast.memory.codecs.torchao import ShiftedInt8
from hypothesis import given
from hypothesis import strategies as st

Sample = tuple[Codec, tuple[torch.Tensor, ...]]
BF16 = torch.bfloat16
SHAPE = (1031, 1280)  # more than a chunk, and no multiple of one


def weight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def noise(codec: Codec) -> Sample:
    """Parts of any bytes, as a file may hold them."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(part.dtype, part.nbytes) for part in codec.parts]
    return codec, tuple(
        torch.randint(0, 127, (size,), generator=generator).to(torch.uint8).view(dtype) for dtype, size in sizes
    )


def far_apart() -> Sample:
    """So much of it has rare exponents that their places alone are more than one part of the workspace."""
    plain = weight(2100, 2100)
    count = 330_000
    rare = torch.randint(0x4000, 0x7000, (count,), generator=torch.Generator().manual_seed(2)).to(torch.int16)
    plain.view(-1)[:: plain.numel() // count][:count] = rare.view(BF16)
    codec, parts = exact12.encode(plain)
    assert codec.name == "exact12" and codec.apart > 2**18
    return codec, parts


SAMPLES: dict[str, Callable[[], Sample]] = {
    "raw": lambda: raw.encode(weight(*SHAPE)),
    "raw cast": lambda: noise(Raw(SHAPE, BF16, torch.float16)),
    "exact12": lambda: exact12.encode(weight(1031, 1281)),
    "exact12 with much apart": far_apart,
    "int8": lambda: int8.encode(weight(*SHAPE)),
    "int8 one scale": lambda: noise(Int8(SHAPE, BF16, torch.int8, 1, torch.bfloat16)),
    "int8 of a kernel": lambda: int8.encode(weight(515, 256, 3, 3)),
    "int8 convrot": lambda: noise(RotatedInt8(SHAPE, BF16, torch.int8, SHAPE[0])),
    "fp8": lambda: fp8.encode(weight(*SHAPE)),
    "mxfp8": lambda: noise(Mxfp8((1031, 1250), BF16)),
    "nvfp4": lambda: noise(Nvfp4((1031, 1250), BF16)),
    "4 bit": lambda: noise(FourBit((1031, 1281), BF16, 64)),
    "4 bit with codes as scales": lambda: noise(FourBit((1031, 1281), BF16, 32, 0.04)),
    "int8 of bitsandbytes": lambda: noise(LlmInt8(SHAPE, BF16, torch.int8, SHAPE[0])),
    "int8 of torchao": lambda: noise(ShiftedInt8(SHAPE, BF16, torch.int8, SHAPE[0])),
    **{
        f"gguf {kind.name}": lambda kind=kind: noise(codec_of(kind, SHAPE, BF16))
        for kind in TYPES.values()
        if kind.decode
    },
}
TALL = (60_000, 16)  # of which the scales count
SAMPLES |= {
    f"{codec.name}, tall": lambda codec=codec: noise(codec)
    for codec in (
        Int8(TALL, BF16, torch.int8, TALL[0], torch.float16),
        Fp8(TALL, BF16, torch.float8_e4m3fn, TALL[0], torch.float16),
        RotatedInt8(TALL, BF16, torch.int8, TALL[0], group=16),
        LlmInt8(TALL, BF16, torch.int8, TALL[0]),
        ShiftedInt8(TALL, BF16, torch.int8, TALL[0]),
    )
}
PADDED = ("int8 convrot", "mxfp8", "nvfp4", "4 bit", "4 bit with codes as scales")  # to tiles, to blocks
each_codec = pytest.mark.parametrize("name", SAMPLES)


def decoded(codec: Codec, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out = torch.empty(codec.shape, dtype=codec.dtype)
    codec.decode(parts, out)
    return out


@each_codec
def test_bytes_are_those_of_the_parts_and_of_the_result(name: str) -> None:
    codec, parts = SAMPLES[name]()
    assert codec.encoded_bytes == sum(part.nbytes for part in parts)
    assert codec.decoded_bytes == decoded(codec, parts).nbytes


@each_codec
def test_decoding_is_work_of_the_device_alone_within_the_workspace(name: str, sim: ModuleType) -> None:
    """On the simulated card nothing is copied to or from it, which the host would wait for; and the peak is counted."""
    codec, parts = SAMPLES[name]()
    expected = decoded(codec, parts)
    there = tuple(part.to("sim") for part in parts)
    out = torch.empty(codec.shape, dtype=codec.dtype, device="sim")
    sim.reset_stats()
    held = sim.stats().allocated_bytes
    assert held == codec.encoded_bytes + codec.decoded_bytes
    codec.decode(there, out)
    stats = sim.stats()
    assert (stats.h2d_count, stats.d2h_count, stats.allocated_bytes) == (0, 0, held)
    used = stats.peak_bytes - held
    assert used <= codec.workspace_bytes
    assert codec.workspace_bytes <= 1.02 * used + 8192 or (
        name in PADDED and codec.workspace_bytes <= 1.5 * used + 2**20
    )
    assert codec.workspace_bytes <= 12 * CHUNK_WEIGHTS, "bounded, whatever the shape"
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
    del there, out
    gc.collect()


@each_codec
def test_shapes_alone_are_decoded_too(name: str) -> None:
    """As a dry run does."""
    codec, parts = SAMPLES[name]()
    out = torch.empty(codec.shape, dtype=codec.dtype, device="meta")
    codec.decode([part.to("meta") for part in parts], out)


@each_codec
def test_the_result_may_lie_in_a_flat_buffer(name: str) -> None:
    codec, parts = SAMPLES[name]()
    expected = decoded(codec, parts)
    buffer = torch.full((codec.decoded_bytes + 512,), 0x55, dtype=torch.uint8)
    codec.decode(parts, buffer[256:-256].view(codec.dtype).view(codec.shape))
    assert torch.equal(buffer[256:-256], expected.view(-1).view(torch.uint8))
    assert bool((buffer[:256] == 0x55).all()) and bool((buffer[-256:] == 0x55).all())


@each_codec
def test_decoding_works_in_inference_mode(name: str) -> None:
    codec, parts = SAMPLES[name]()
    with torch.inference_mode():
        decoded(codec, parts)


@each_codec
def test_wrong_parts_and_results_are_refused_before_anything_is_written(name: str) -> None:
    codec, parts = SAMPLES[name]()
    out = torch.full(codec.shape, 3, dtype=codec.dtype)
    short, other = (parts[0][:-1], *parts[1:]), (parts[0].view(torch.uint8).repeat(2), *parts[1:])
    for wrong in (parts[:-1], (*parts, parts[0]), short, other):
        with pytest.raises(ValueError, match="is stored as") as error:
            codec.decode(wrong, out)
        assert "\n" not in str(error.value)
    for target in (out.view(-1)[:-1], out.to(torch.float64)):
        with pytest.raises(ValueError, match="becomes"):
            codec.decode(parts, target)
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode(parts, torch.empty(prod(codec.shape), 2, dtype=codec.dtype)[:, 0])
    with pytest.raises(ValueError, match="all on meta"):
        codec.decode(parts, torch.empty(codec.shape, dtype=codec.dtype, device="meta"))
    assert bool((out == 3).all())


@each_codec
def test_a_codec_is_plain_data(name: str) -> None:
    """It can be compared and be a key, as plans and forecasts need."""
    (codec, parts), (again, _) = SAMPLES[name](), SAMPLES[name]()
    assert codec == again and hash(codec) == hash(again)
    assert all(type(part) is torch.Tensor for part in parts)


def test_a_codec_fits_the_parameter_that_its_bytes_are_of() -> None:
    codec, parts = int8.encode(weight(64, 36))
    fitted = codec.fitted((64, 4, 3, 3), torch.float32)
    out = torch.empty(64, 4, 3, 3)
    fitted.decode(parts, out)
    assert torch.equal(out.view(64, 36).bfloat16(), decoded(codec, parts))
    with pytest.raises(ValueError, match=r"int8 of \(64, 36\) does not hold a weight of \(36, 64\)"):
        codec.fitted((36, 64), BF16)
    padded = Mxfp8((64, 64), BF16)
    assert padded.fitted((50, 33), BF16).parts == padded.parts
    with pytest.raises(ValueError, match="does not hold"):
        padded.fitted((50, 32), BF16)


@given(rows=st.integers(1, 5000), columns=st.integers(1, 3 * CHUNK_WEIGHTS))
def test_tiles_cover_a_matrix_once(rows: int, columns: int) -> None:
    rows = min(rows, 8 * CHUNK_WEIGHTS // columns + 2)
    seen = 0
    for high, wide in tiles(rows, columns, CHUNK_WEIGHTS):
        area = (high.stop - high.start) * (wide.stop - wide.start)
        assert 0 < area <= CHUNK_WEIGHTS and high.stop <= rows and wide.stop <= columns
        assert high.stop - high.start == 1 or (wide.start, wide.stop) == (0, columns)
        seen += area
    assert seen == rows * columns


def test_a_row_longer_than_a_chunk_is_decoded_in_parts() -> None:
    codec, parts = noise(Int8((3, CHUNK_WEIGHTS + 5), torch.float32, torch.int8, 3))
    values, scales = parts
    assert torch.equal(decoded(codec, parts), values.view(3, -1).float() * scales[:, None])


def test_chunks_end_at_the_end() -> None:
    assert [(chunk.start, chunk.stop) for chunk in chunks(7, 3)] == [(0, 3), (3, 6), (6, 7)]
    assert not list(chunks(0, 3))


def test_tables() -> None:
    values = [5, -128, 127, 0, -1, 2, 3, 4, *range(8)]
    table = table_of(values, torch.device("cpu"))
    assert table.tolist() == values
    pairs = pair_table(table, table)
    assert pairs[0x31].tolist() == [values[1], values[3]]
