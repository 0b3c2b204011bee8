"""int8 and fp8 with scales: as comfy-kitchen decodes them, and how near what is encoded here stays to its weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ballast.memory.codecs import fp8, int8
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.int8 import Int8, RotatedInt8
from comfy_kitchen import tensor as kitchen
from hypothesis import given, settings
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ENCODERS = pytest.mark.parametrize("encode", [int8.encode, fp8.encode], ids=["int8", "fp8"])


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def decoded(codec: Codec, *parts: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.shape, dtype=codec.dtype)
    codec.decode([part.reshape(-1) for part in parts], out)
    return out


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many values of bf16 lie between two of the same sign."""
    return (one.view(torch.int16).to(torch.int32) - other.view(torch.int16)).abs()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_row", [False, True])
def test_int8_is_decoded_as_kitchen_does(per_row: bool, dtype: torch.dtype) -> None:
    layout = kitchen.TensorWiseINT8Layout
    values, params = layout.quantize(weight(301, 515).to(dtype), per_channel=per_row)
    codec = Int8((301, 515), dtype, torch.int8, params.scale.numel())
    assert same_bits(decoded(codec, values, params.scale), layout.dequantize(values, params))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_decoded_as_kitchen_does_in_float32(stored: torch.dtype) -> None:
    layout = kitchen.TensorCoreFP8Layout
    values, params = layout.quantize(weight(301, 515), dtype=stored)
    wide = layout.dequantize(values, params)
    assert same_bits(decoded(Fp8((301, 515), torch.float32, stored, 1), values, params.scale), wide)
    assert same_bits(decoded(Fp8((301, 515), torch.bfloat16, stored, 1), values, params.scale), wide.bfloat16())


def test_fp8_in_bf16_is_nearer_than_kitchens() -> None:
    """Kitchen rounds the scale to bf16 before it multiplies."""
    layout = kitchen.TensorCoreFP8Layout
    values, params = layout.quantize(weight(301, 515))
    theirs = layout.dequantize(values, dataclasses.replace(params, orig_dtype=torch.bfloat16))
    ours = decoded(Fp8((301, 515), torch.bfloat16, torch.float8_e4m3fn, 1), values, params.scale)
    assert 0 < int(ulps(ours, theirs).max()) <= 2
    exact = values.double() * params.scale.double()
    assert (ours.double() - exact).norm() < (theirs.double() - exact).norm()


@pytest.mark.parametrize("scale_type", FLOATS)
@pytest.mark.parametrize("scales", [1, 67])
def test_every_fp8_value_is_decoded(scales: int, scale_type: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).repeat(67)
    scale = weight(scales).abs().to(scale_type)
    codec = Fp8((67, 256), torch.float32, torch.float8_e4m3fn, scales, scale_type)
    expected = values.float().view(67, 256) * scale.float().view(-1, 1)
    torch.testing.assert_close(decoded(codec, values, scale), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", [16, 64, 256, 1024])
@pytest.mark.parametrize("rows", [1, 5, 259])
def test_rotated_int8_is_turned_back_as_kitchen_does(rows: int, group: int) -> None:
    layout, plain = kitchen.TensorWiseINT8Layout, weight(rows, 3072)
    plain[:, 7] *= 30  # an outlier, which the rotation is for
    values, params = layout.quantize(plain, per_channel=True, convrot=True, convrot_groupsize=group)
    theirs = layout.dequantize(values, params)
    codec = RotatedInt8((rows, 3072), torch.float32, torch.int8, rows, group=group)
    ours = decoded(codec, values, params.scale)
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    rounded = decoded(codec.fitted((rows, 3072), torch.bfloat16), values, params.scale)
    large = theirs.abs() > 1e-4 * theirs.abs().max()  # of those near 0 Kitchen's own rounding is seen
    assert int(ulps(rounded, theirs.bfloat16())[large].max()) <= 1
    assert (ours - plain).norm() / plain.norm() < 0.03


def test_rotated_int8_is_exact_up_to_its_last_rounding() -> None:
    """In float64 the same number comes out: sums of integers are exact in float32."""
    values = torch.randint(-128, 128, (9, 512), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = weight(9).abs()
    ours = decoded(RotatedInt8((9, 512), torch.float32, torch.int8, 9), values, scale)
    four = torch.ones(4, 4, dtype=torch.float64) - 2 * torch.eye(4, dtype=torch.float64).flip(0)
    matrix = torch.kron(torch.kron(four, four), torch.kron(four, four))
    turned = (values.double().view(9, 2, 256) @ matrix).view(9, 512) * (scale.double()[:, None] / 16)
    assert same_bits(ours, turned.float())


def test_rotated_int8_may_have_one_scale() -> None:
    values = torch.randint(-128, 128, (9, 512), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    one = decoded(RotatedInt8((9, 512), torch.float32, torch.int8, 1), values, torch.tensor(0.5))
    assert same_bits(one, decoded(RotatedInt8((9, 512), torch.float32, torch.int8, 9), values, torch.full((9,), 0.5)))


@pytest.mark.parametrize(
    ("shape", "group"), [((8, 255), 256), ((8, 512), 128), ((8, 512), 0), ((8, 4, 256), 256), ((), 4)]
)
def test_what_cannot_be_turned_is_refused(shape: tuple[int, ...], group: int) -> None:
    with pytest.raises(ValueError, match="cannot be turned in groups of"):
        RotatedInt8(shape, torch.bfloat16, torch.int8, 1, group=group)


@pytest.mark.parametrize("scales", [0, 2, 63, 65, 64 * 128])
def test_scales_of_blocks_are_refused(scales: int) -> None:
    with pytest.raises(ValueError, match=f"has {scales} scales"):
        Fp8((64, 128), torch.bfloat16, torch.float8_e4m3fn, scales)


@ENCODERS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64), (37, 515), (64, 16, 3, 3), (3, 2**20 + 7)])
def test_what_is_encoded_here_stays_near(encode, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = weight(*shape).to(dtype)
    codec, parts = encode(plain)
    assert codec.shape == shape and codec.dtype == dtype and codec.encoded_bytes <= 0.6 * plain.nbytes
    error = (decoded(codec, *parts) - plain).float().norm() / plain.float().norm()
    assert error < (0.028 if isinstance(codec, Fp8) else 0.015)


@ENCODERS
def test_a_row_of_zeros_stays_so_and_the_largest_is_kept(encode) -> None:
    plain = weight(5, 300)
    plain[2] = 0
    plain[3] *= 1e6
    out = decoded(*(lambda made: (made[0], *made[1]))(encode(plain)))
    assert bool((out[2] == 0).all())
    torch.testing.assert_close(out.abs().amax(1), plain.abs().amax(1), rtol=1e-6, atol=0)


@ENCODERS
@pytest.mark.parametrize(
    "plain",
    [torch.ones(512), torch.ones(0, 5), torch.ones(4096, 2).bfloat16(), torch.ones(8, 8, dtype=torch.int32)],
    ids=["a vector", "nothing", "short rows", "integers"],
)
def test_what_gains_nothing_is_raw(encode, plain: torch.Tensor) -> None:
    codec, parts = encode(plain)
    assert codec.name == "raw" and torch.equal(decoded(codec, *parts), plain)


@pytest.mark.parametrize("module", [int8, fp8])
@given(shape=st.lists(st.integers(0, 9), max_size=3).map(tuple), dtype=st.sampled_from([*FLOATS, torch.int8]))
def test_what_is_planned_is_what_is_made_and_never_more_than_it_was(module, shape, dtype) -> None:
    plain = torch.ones(shape, dtype=dtype)
    codec, parts = module.encode(plain)
    assert codec == module.planned(shape, dtype) and sum(part.nbytes for part in parts) == codec.encoded_bytes
    assert codec.encoded_bytes <= plain.nbytes


@ENCODERS
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_raw(encode, value: float) -> None:
    plain = weight(40, 50)
    plain[30, 3] = value
    codec, parts = encode(plain)
    assert codec.name == "raw" and same_bits(decoded(codec, *parts), plain)


@settings(max_examples=50)
@given(rows=st.integers(1, 40), columns=st.integers(8, 200), exponent=st.integers(-30, 30), seed=st.integers(0, 2**31))
def test_no_int8_weight_is_off_by_more_than_half_a_step(rows: int, columns: int, exponent: int, seed: int) -> None:
    plain = weight(rows, columns, seed=seed) * 2.0**exponent
    codec, parts = int8.encode(plain)
    step = plain.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((decoded(codec, *parts) - plain).abs() <= step * 0.50001 + 1e-30).all())
