"""Rows of an encoded weight, taken from its stored parts: the rows of the decoded one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ballast.memory.codecs import exact12, fp8, int8, raw
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.codecs.int8 import Int8, RotatedInt8
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from comfy_kitchen import tensor as kitchen

BF16 = torch.bfloat16
Encoded = tuple[Codec, tuple[torch.Tensor, ...]]


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(0)) * 0.02


def one_scale(rows: int, columns: int, kind: type = Fp8, dtype: torch.dtype = torch.float8_e4m3fn) -> Encoded:
    values = (weight(rows, columns) * 1000).to(dtype).view(-1)
    return kind((rows, columns), BF16, dtype, 1), (values, torch.tensor([0.01]))


def rotated(rows: int, columns: int) -> Encoded:
    values = (weight(rows, columns) * 1000).to(torch.int8).view(-1)
    return RotatedInt8((rows, columns), BF16, torch.int8, rows, group=64), (values, torch.rand(rows))


def blocks(number: int) -> Callable[[int, int], Encoded]:
    def made(rows: int, columns: int) -> Encoded:
        codec = codec_of(TYPES[number], (rows, columns), BF16)
        generator = torch.Generator().manual_seed(0)
        stored = torch.randint(0, 100, (codec.parts[0].count,), generator=generator, dtype=torch.uint8)
        return codec, (stored,)

    return made


def microscaled(layout: type, codec: type) -> Callable[[int, int], Encoded]:
    def made(rows: int, columns: int) -> Encoded:
        values, params = layout.quantize(weight(rows, columns))
        scales = (params.scale,) if codec is Mxfp8 else (params.block_scale, params.scale)
        told = codec((rows, columns), BF16)
        given = zip((values, *scales), told.parts, strict=True)
        return told, tuple(each.reshape(-1).view(torch.uint8).view(part.dtype) for each, part in given)

    return made


BY_ROWS: dict[str, Callable[[int, int], Encoded]] = {
    "raw": lambda *shape: raw.encode(weight(*shape)),
    "fp8 by rows": lambda *shape: fp8.encode(weight(*shape).to(BF16)),
    "int8 by rows": lambda *shape: int8.encode(weight(*shape).to(BF16)),
    "fp8": one_scale,
    "int8": lambda *shape: one_scale(*shape, Int8, torch.int8),
    "convrot": rotated,
    **{TYPES[number].name: blocks(number) for number in (2, 8, 12, 14)},
}
BY_TILES = {
    "mxfp8": microscaled(kitchen.TensorCoreMXFP8Layout, Mxfp8),
    "nvfp4": microscaled(kitchen.TensorCoreNVFP4Layout, Nvfp4),
}


def decoded(codec: Codec, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    out = torch.empty(codec.shape, dtype=codec.dtype)
    codec.decode(parts, out)
    return out


def check(encoded: Encoded, begin: int, end: int) -> None:
    codec, parts = encoded
    some, slices = codec.taken(begin, end)
    assert some.shape == (end - begin, *codec.shape[1:])
    assert [each.stop - each.start for each in slices] == [part.count for part in some.parts]
    rows = decoded(some, tuple(part[each] for part, each in zip(parts, slices, strict=True)))
    assert torch.equal(rows.view(torch.uint8), decoded(codec, parts)[begin:end].contiguous().view(torch.uint8))


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (32, 96), (95, 96), (0, 96), (1, 2)])
@pytest.mark.parametrize("name", BY_ROWS)
def test_any_rows(name: str, begin: int, end: int) -> None:
    check(BY_ROWS[name](96, 256), begin, end)


@pytest.mark.parametrize("rows", [384, 300, 385])
@pytest.mark.parametrize(("begin", "end"), [(0, 128), (128, 256), (128, None), (256, None), (0, None)])
@pytest.mark.parametrize("name", BY_TILES)
def test_rows_in_whole_tiles(name: str, begin: int, end: int | None, rows: int) -> None:
    check(BY_TILES[name](rows, 160), begin, rows if end is None else end)


@pytest.mark.parametrize(("begin", "end"), [(1, 128), (0, 100), (128, 128), (256, 128), (0, 400), (-128, 128)])
@pytest.mark.parametrize("name", BY_TILES)
def test_rows_that_share_tiles_are_refused(name: str, begin: int, end: int) -> None:
    codec, _ = BY_TILES[name](384, 160)
    with pytest.raises(ValueError, match="no rows"):
        codec.taken(begin, end)


@pytest.mark.parametrize(("begin", "end"), [(0, 97), (-1, 3), (4, 4), (5, 3)])
def test_rows_that_are_not_there_are_refused(begin: int, end: int) -> None:
    codec, _ = BY_ROWS["Q4_K"](96, 256)
    with pytest.raises(ValueError, match="no rows"):
        codec.taken(begin, end)


def test_weights_without_rows_are_refused() -> None:
    codec, _ = exact12.encode(weight(96, 256).to(BF16))
    assert codec.name == "exact12"
    with pytest.raises(ValueError, match="no rows"):
        codec.taken(0, 32)
