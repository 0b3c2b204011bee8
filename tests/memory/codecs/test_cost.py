"""What decoding costs, in closed form where there is one."""

from __future__ import annotations

import pytest
import torch
from ballast.memory.codecs.codec import CHUNK_WEIGHTS, Codec
from ballast.memory.codecs.cost import Cost, cost_of
from ballast.memory.codecs.exact12 import Exact12
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.codecs.int8 import Int8
from ballast.memory.codecs.raw import Raw

BF16, F32 = torch.bfloat16, torch.float32
N = CHUNK_WEIGHTS


def test_a_copy_reads_what_is_stored_and_writes_what_it_becomes() -> None:
    assert cost_of(Raw((10, 20), BF16, BF16)) == Cost(((800, 1),))
    assert cost_of(Raw((10, 20), BF16, F32)) == Cost(((1200, 1),))


def test_int8_is_one_kernel_a_chunk() -> None:
    assert cost_of(Int8((4, N), BF16, torch.int8, 1)) == Cost((((1 + 2) * N + 4, 4),))


def test_fp8_is_two_kernels_a_chunk() -> None:
    assert cost_of(Fp8((4, N), BF16, torch.float8_e4m3fn, 1)) == Cost((((1 + 4) * N, 4), ((4 + 2) * N + 4, 4)))


@pytest.mark.parametrize(
    "codec",
    [
        Fp8((4, N), BF16, torch.float8_e4m3fn, 1),
        Int8((4, 9), BF16, torch.int8, 4),
        Exact12((2 * N,), BF16, 1),
        Raw((10, 20), BF16, F32),
        codec_of(next(kind for kind in TYPES.values() if kind.name == "Q4_K"), (4, 256), BF16),
    ],
    ids=lambda codec: codec.name,
)
def test_plans_made_in_inference_mode_count_all_kernels(codec: Codec) -> None:
    cost_of.cache_clear()
    expected = cost_of(codec)
    cost_of.cache_clear()
    with torch.inference_mode():
        assert cost_of(codec) == expected


def test_exact12_is_five_kernels_a_chunk_whatever_lies_apart() -> None:
    one, other, large = Exact12((2 * N,), BF16, 1), Exact12((2 * N,), BF16, 1001), Exact12((4 * N,), BF16, 1)
    assert cost_of(large).launches - cost_of(one).launches == 5 * 2 and cost_of(other).launches == cost_of(one).launches
    each = 4 + 8 + 8 + 2 + 2  # its place in 32 bits, written and read in 64, and its value twice
    assert cost_of(other).traffic_bytes - cost_of(one).traffic_bytes == 1000 * each
    assert cost_of(large).traffic_bytes == pytest.approx(19.5 * large.count, rel=1e-3)


def test_tensors_of_a_shape_are_priced_once() -> None:
    made = [Exact12((64, 256), torch.bfloat16, apart) for apart in (0, 7, 30)]
    assert len({codec.alike for codec in made}) == 1
    for codec in made:
        assert cost_of(codec.alike).traffic_bytes == pytest.approx(cost_of(codec).traffic_bytes, rel=0.02)


@pytest.mark.parametrize("kind", [kind for kind in TYPES.values() if kind.decode], ids=lambda kind: kind.name)
def test_blocks_move_at_least_what_is_stored_and_what_it_becomes(kind) -> None:
    codec = codec_of(kind, (N // 256, 256), BF16)
    assert codec.encoded_bytes + codec.decoded_bytes < cost_of(codec).traffic_bytes < 45 * codec.count
    assert cost_of(codec).launches < 60


def test_seconds_are_those_of_memory_or_of_starting_kernels() -> None:
    cost = Cost(((1000, 3), (10**9, 2)))
    assert cost.traffic_bytes == 2 * 10**9 + 3000
    assert cost.seconds(1e9, least_seconds=1e-5) == pytest.approx(2 + 3e-5)


def test_nothing_costs_nothing() -> None:
    assert cost_of(Raw((0, 5), BF16, BF16)) == Cost(())
