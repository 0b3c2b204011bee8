"""bf16 in 12 bits: every bit comes back, of trained weights and of any others, and nothing grows."""

from __future__ import annotations

import pytest
import torch
from ballast.memory.codecs import exact12
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.raw import Raw
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from safetensors.torch import load_file

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
DEMO = sorted((ROOT / "demo" / "shapes").rglob("*.safetensors"))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def check(weight: torch.Tensor, threads: int = 1) -> Codec:
    codec, parts = exact12.encode(weight, threads)
    assert [(part.dtype, part.numel()) for part in parts] == [(part.dtype, part.count) for part in codec.parts]
    assert codec.encoded_bytes == sum(part.nbytes for part in parts) <= weight.nbytes
    out = torch.full_like(weight, 7)
    codec.decode(parts, out)
    assert torch.equal(out.view(torch.int16), weight.view(torch.int16))
    if isinstance(codec, exact12.Exact12):
        paired = weight.reshape(-1).view(torch.int16)[: weight.numel() // 2 * 2]
        has_code = torch.isin(paired >> 7 & 0xFF, parts[2][: exact12.CODES])
        assert codec.apart == weight.numel() - has_code.sum(), "none lies apart that has a code"
    return codec


def test_every_value_comes_back_bit_for_bit() -> None:
    weight = torch.cat((gaussian(2**20), EVERY, gaussian(2**18 + 1, seed=1)))
    codec = check(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(2))])
    assert isinstance(codec, exact12.Exact12) and codec.apart > 61000, "all other exponents lie apart"


@pytest.mark.parametrize("count", [2, 3, 17, 101, 2**18 - 1, 2**18, 2**18 + 1, 2**19 + 2**18 + 5, 2 * 2**20 + 3])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_length_comes_back(count: int, threads: int) -> None:
    codec = check(gaussian(count), threads)
    assert isinstance(codec, exact12.Exact12) == (count > 100)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("inf"), float("nan")])
def test_one_value_everywhere_takes_12_bits(value: float) -> None:
    codec = check(torch.full((123, 457), value, dtype=torch.bfloat16))
    assert codec.encoded_bytes * 8 / codec.count < 12.01


def test_zeros_among_weights_have_a_code() -> None:
    weight = gaussian(400, 500)
    weight[::2] = 0
    assert check(weight).encoded_bytes * 8 / weight.numel() <= 12.1


def test_payloads_of_nan_are_kept() -> None:
    weight = gaussian(300, 300)
    weight.view(torch.int16)[5, 5:9] = torch.tensor([0x7F81, 0x7FC1, -0x7F, -1], dtype=torch.int16)
    check(weight)


def test_a_tensor_that_does_not_shrink_is_raw() -> None:
    bits = torch.randint(-(2**15), 2**15, (301, 1001), generator=torch.Generator().manual_seed(0))
    weight = bits.to(torch.int16).view(torch.bfloat16)
    codec = check(weight)
    assert codec.name == "raw" and codec.encoded_bytes == weight.nbytes
    assert check(EVERY).name == "raw"


@pytest.mark.parametrize("share", [0.07, 0.1])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_raw_just_when_it_would_not_shrink(share: float, threads: int) -> None:
    """6 bytes for each that lies apart, where the others gain half a byte: about a twelfth of them is even."""
    weight = gaussian(1001, 1003)
    far = torch.randint(0x5000, 0x7000, (int(share * weight.numel()),), generator=torch.Generator().manual_seed(2))
    weight.view(-1)[: len(far)] = far.to(torch.int16).view(torch.bfloat16)
    assert (check(weight, threads).name == "raw") == (share > 1 / 12)


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.zeros(()), torch.zeros(1), torch.zeros(0, 3)])
def test_next_to_nothing_is_raw(weight: torch.Tensor) -> None:
    assert check(weight.bfloat16()).name == "raw"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16])
def test_other_types_are_raw(dtype: torch.dtype) -> None:
    codec, parts = exact12.encode(torch.ones(64, 64, dtype=dtype))
    assert codec.name == "raw" and codec.dtype == parts[0].dtype == dtype


@settings(max_examples=60)
@given(st.data())
def test_any_bits_of_any_shape_come_back(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 40), min_size=0, max_size=3))
    exponents = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=40))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(exponents), shape, generator=generator)
    bits = torch.tensor(exponents)[drawn] << 7 | torch.randint(0, 128, shape, generator=generator)
    bits |= torch.randint(0, 2, shape, generator=generator) << 15
    check(bits.to(torch.int16).view(torch.bfloat16), data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("seed", [0, 1])
def test_gaussian_weights_take_12_1_bits_at_most(seed: int) -> None:
    codec = check(gaussian(1537, 2049, seed=seed))
    assert codec.encoded_bytes * 8 / codec.count <= 12.1


def test_rows_of_very_different_sizes_take_little_more() -> None:
    """Large enough for the exponents to be counted in runs only: rows log-normal with a deviation of 1."""
    scale = torch.randn(2000, 1, generator=torch.Generator().manual_seed(3)).exp()
    codec = check((gaussian(2000, 2000).float() * scale).bfloat16())
    assert codec.encoded_bytes * 8 / codec.count <= 12.2


@pytest.mark.parametrize("path", DEMO, ids=lambda path: path.parent.name)
def test_the_demo_model_takes_12_1_bits_at_most(path) -> None:
    stored = count = 0
    for weight in load_file(path).values():
        if weight.ndim > 1:
            codec = check(weight.bfloat16())
            stored, count = stored + codec.encoded_bytes, count + codec.count
    assert stored * 8 / count <= 12.1


@pytest.mark.parametrize("shape", [(3072, 3072), (512, 4, 3, 3), (2000,), (301, 7)])
def test_what_is_planned_is_at_least_what_it_takes(shape: tuple[int, ...]) -> None:
    planned, made = exact12.planned(shape, torch.bfloat16), check(gaussian(*shape))
    assert (
        type(planned) is type(made) and 0 <= planned.encoded_bytes - made.encoded_bytes < 0.01 * made.encoded_bytes + 16
    )
    assert planned.encoded_bytes * 8 / planned.count < 12.1 + 8 * 26 / planned.count


@pytest.mark.parametrize("shape", [(), (1,), (2,), (20,), (0, 4), (2**16, 2**16)])
def test_what_gains_nothing_is_planned_raw(shape: tuple[int, ...]) -> None:
    assert exact12.planned(shape, torch.bfloat16).name == "raw"
    assert exact12.planned((64, 64), torch.float16) == Raw((64, 64), torch.float16, torch.float16)
