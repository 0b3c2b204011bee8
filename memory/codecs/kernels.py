"""Triton kernels that decode a whole weight at once: `fused` says when they run, and checks their bits.

Each gives what the eager decoder gives, bit for bit: values are computed in float32 by the same operations in the same
order, none of them contracted to a multiply-add, and rounded once. Layouts are told with the eager decoders.
"""

from __future__ import annotations

import warnings

import triton
import triton.language as tl

# Triton 3.9 tells of a new default, also whoever states what is wanted, as `fused` does.
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION", category=UserWarning)

LANES = tl.constexpr(1024)  # weights of one program
_NONLINEAR_LOW = tl.constexpr(0xF6EADDCFBFAD9881 - 2**64)  # of codes 0-7 of `gguf_simple.NONLINEAR`, a byte each
_NONLINEAR_HIGH = tl.constexpr(0x7159453526190D01)  # of codes 8-15


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _half(at):
    bits = tl.load(at).to(tl.uint16) | (tl.load(at + 1).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(byte):
    return byte - ((byte & 128) << 1)


@triton.jit
def _nonlinear(code):
    low = (code & 7).to(tl.int64) * 8
    packed = tl.where(code < 8, _NONLINEAR_LOW, _NONLINEAR_HIGH)
    return _signed(((packed >> low) & 255).to(tl.int32)).to(tl.float32)


@triton.jit
def _e4m3(byte):
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((byte & 127) == 127, float("nan"), value)
    return value * (1.0 - 2.0 * (byte >> 7).to(tl.float32))  # a negation would lose the sign of a zero


@triton.jit
def _e5m2(byte):
    return (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# GGUF: each function takes the address of a block and the place of a weight in it.


@triton.jit
def q8_0(at, j):
    return _signed(_byte(at + 2 + j)).to(tl.float32) * _half(at)


@triton.jit
def _nibble(at, j):
    return (_byte(at + (j & 15)) >> ((j >> 4) * 4)) & 15


@triton.jit
def _fifth(at, j):
    return ((_byte(at + (j >> 3)) >> (j & 7)) & 1) << 4


@triton.jit
def q4_0(at, j):
    return (_nibble(at + 2, j).to(tl.float32) - 8.0) * _half(at)


@triton.jit
def q4_1(at, j):
    return _nibble(at + 4, j).to(tl.float32) * _half(at) + _half(at + 2)


@triton.jit
def q5_0(at, j):
    return ((_nibble(at + 6, j) | _fifth(at + 2, j)).to(tl.float32) - 16.0) * _half(at)


@triton.jit
def q5_1(at, j):
    return (_nibble(at + 8, j) | _fifth(at + 4, j)).to(tl.float32) * _half(at) + _half(at + 2)


@triton.jit
def iq4_nl(at, j):
    return _nonlinear(_nibble(at + 2, j)) * _half(at)


@triton.jit
def _pair(at, j):
    """2 bits of a weight out of 64 bytes, which hold 128 weights in each half."""
    return (_byte(at + (j >> 7) * 32 + (j & 31)) >> (((j >> 5) & 3) * 2)) & 3


@triton.jit
def _quad(at, j):
    """4 bits of a weight out of 128 bytes, which hold 64 weights in each quarter."""
    return (_byte(at + (j >> 6) * 32 + (j & 31)) >> (((j >> 5) & 1) * 4)) & 15


@triton.jit
def q2_k(at, j):
    both = _byte(at + (j >> 4))
    scale = _half(at + 80) * (both & 15).to(tl.float32)
    least = _half(at + 82) * (both >> 4).to(tl.float32)
    return _pair(at + 16, j).to(tl.float32) * scale - least


@triton.jit
def q3_k(at, j):
    k = j >> 4
    low = (_byte(at + 96 + (k & 7)) >> ((k >> 3) * 4)) & 15
    high = (_byte(at + 104 + (k & 3)) >> ((k >> 2) * 2)) & 3
    scale = _half(at + 108) * ((low | (high << 4)).to(tl.float32) - 32.0)
    third = ((_byte(at + (j & 31)) >> (j >> 5)) & 1) << 2
    return ((_pair(at + 32, j) | third).to(tl.float32) - 4.0) * scale


@triton.jit
def _scale_and_least(at, k):
    """Scale and minimum of sub-block k of `q4_k` and `q5_k`."""
    first, second, low = _byte(at + 4 + (k & 3)), _byte(at + 8 + (k & 3)), _byte(at + 12 + (k & 3))
    scale = tl.where(k < 4, first & 63, (low & 15) | ((first >> 2) & 48))
    least = tl.where(k < 4, second & 63, (low >> 4) | ((second >> 2) & 48))
    return _half(at) * scale.to(tl.float32), _half(at + 2) * least.to(tl.float32)


@triton.jit
def q4_k(at, j):
    scale, least = _scale_and_least(at, j >> 5)
    return _quad(at + 16, j).to(tl.float32) * scale - least


@triton.jit
def q5_k(at, j):
    scale, least = _scale_and_least(at, j >> 5)
    fifth = ((_byte(at + 16 + (j & 31)) >> (j >> 5)) & 1) << 4
    return (_quad(at + 48, j) | fifth).to(tl.float32) * scale - least


@triton.jit
def q6_k(at, j):
    scale = _half(at + 208) * _signed(_byte(at + 192 + (j >> 4))).to(tl.float32)
    low = (_byte(at + (j >> 7) * 64 + (j & 63)) >> (((j >> 6) & 1) * 4)) & 15
    return ((low | (_pair(at + 128, j) << 4)).to(tl.float32) - 32.0) * scale


@triton.jit
def iq4_xs(at, j):
    k = j >> 5
    high = (_byte(at + 2 + (k >> 2)) >> ((k & 3) * 2)) & 3
    low = (_byte(at + 4 + (k >> 1)) >> ((k & 1) * 4)) & 15
    scale = _half(at) * ((low | (high << 4)).to(tl.float32) - 32.0)
    return _nonlinear((_byte(at + 8 + k * 16 + (j & 15)) >> (((j >> 4) & 1) * 4)) & 15) * scale


@triton.jit(do_not_specialize=["count"])
def gguf(blocks, out, count, value: tl.constexpr, weights: tl.constexpr, nbytes: tl.constexpr):
    """Decode blocks of `weights` weights in `nbytes` bytes by the function `value`."""
    first, lane = tl.program_id(0).to(tl.int64) * LANES, tl.arange(0, LANES)
    # Lanes behind the end read the last block again, and write nothing.
    last = (count - first - 1).to(tl.int32)
    inside = tl.minimum(lane, last)
    at = blocks + first // weights * nbytes + inside // weights * nbytes
    found = value(at, inside % weights)
    tl.store(out + first + lane, found.to(out.dtype.element_ty), mask=lane <= last)


@triton.jit(do_not_specialize=["columns"])
def scaled(values, scales, out, columns, kind: tl.constexpr, by_row: tl.constexpr):
    """Decode 8-bit values times a scale for each row, or one for all. Program (row, part of the row)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = column < columns
    byte = tl.load(values + row * columns + column, mask=inside, other=0).to(tl.int32)
    if kind == "int8":
        value = _signed(byte).to(tl.float32)
    elif kind == "e4m3":
        value = _e4m3(byte)
    else:
        value = _e5m2(byte)
    scale = tl.load(scales + row if by_row else scales).to(tl.float32)
    tl.store(out + row * columns + column, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["columns", "padded", "tiles"])
def microscaled(values, scales, whole, out, columns, padded, tiles, size: tl.constexpr, is_fp4: tl.constexpr):
    """Decode a row of mxfp8 or nvfp4, whose scales lie in tiles of 128 rows by 4 blocks, `tiles` of them side by side.

    Program (row, part of the row). `whole` is the scale of all of nvfp4.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = column < columns
    block = column // size
    tile = (row // 128 * tiles + block // 4) * 512
    scale = tl.load(scales + tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4, mask=inside, other=0).to(tl.int32)
    if is_fp4:
        byte = tl.load(values + row * (padded // 2) + column // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(column % 2 == 0, byte >> 4, byte & 15)
        twice = ((tl.full((), 0xC8643210, tl.int64) >> ((code & 7) * 4)) & 15).to(tl.int32)
        value = tl.where(code > 7, -twice, twice).to(tl.float32)
        factor = _e4m3(scale) * tl.load(whole) * 0.5
    else:
        value = _e4m3(tl.load(values + row * padded + column, mask=inside, other=0).to(tl.int32))
        factor = (scale << 23).to(tl.float32, bitcast=True)
    tl.store(out + row * columns + column, (value * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def four_bit(
    codes, scales, values, nested, nested_values, out, count, offset, size: tl.constexpr, is_nested: tl.constexpr
):
    """Decode two codes a byte, the first in the high half, times the scale of a block, which may be a code too."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = at < count
    byte = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
    value = tl.load(values + tl.where(at % 2 == 0, byte >> 4, byte & 15))
    block = at // size
    if is_nested:
        code = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(nested_values + code) * tl.load(nested + block // 256, mask=inside, other=0.0) + offset
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    tl.store(out + at, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def exact12(mantissas, codes, exponents, out, count):
    """Put exponents to signs and mantissas. `out` are the bits of bfloat16 as int16."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = at < count
    code = (tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32) >> ((at % 2) * 4).to(tl.int32)) & 15
    mantissa = tl.load(mantissas + at, mask=inside, other=0).to(tl.int32)
    bits = (tl.load(exponents + code).to(tl.int32) << 7) | (mantissa & 127) | ((mantissa & 128) << 8)
    tl.store(out + at, bits.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["count"])
def put(values, places, out, count):
    """Write values to their places."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = at < count
    tl.store(
        out + tl.load(places + at, mask=inside, other=0).to(tl.int64), tl.load(values + at, mask=inside), mask=inside
    )
