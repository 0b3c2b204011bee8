"""mxfp8 and nvfp4, decoded as comfy-kitchen does: padded sizes, scales in the order of cuBLAS."""

from __future__ import annotations

import pytest
import torch
from ballast.memory.codecs.codec import CHUNK_WEIGHTS, Codec
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from comfy_kitchen import tensor as kitchen

SHAPES = [
    (1, 1),
    (16, 16),
    (32, 32),
    (33, 65),
    (128, 128),
    (129, 130),
    (300, 1000),
    (1031, 1250),
    (2, CHUNK_WEIGHTS // 64),
]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def decoded(codec: Codec, *parts: torch.Tensor) -> torch.Tensor:
    out = torch.full(codec.shape, 9, dtype=codec.dtype)
    stored = [
        part.reshape(-1).view(torch.uint8).view(spec.dtype) for part, spec in zip(parts, codec.parts, strict=True)
    ]
    codec.decode(stored, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8_is_decoded_as_kitchen_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layout = kitchen.TensorCoreMXFP8Layout
    plain = weight(*shape)
    values, params = layout.quantize(plain)
    theirs = layout.dequantize(values, params)[: shape[0], : shape[1]]
    ours = decoded(Mxfp8(shape, dtype), values, params.scale)
    assert torch.equal(ours, theirs.to(dtype))
    assert (ours - plain).norm() / plain.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_decoded_as_kitchen_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layout = kitchen.TensorCoreNVFP4Layout
    plain = weight(*shape)
    values, params = layout.quantize(plain)
    theirs = layout.dequantize(values, params)[: shape[0], : shape[1]]
    ours = decoded(Nvfp4(shape, dtype), values, params.block_scale, params.scale)
    assert torch.equal(ours, theirs.to(dtype))
    assert (ours - plain).norm() / plain.norm() < 0.15


@pytest.mark.parametrize("codec", [Mxfp8, Nvfp4])
def test_the_parts_are_as_large_as_kitchens(codec: type) -> None:
    layout = kitchen.TensorCoreMXFP8Layout if codec is Mxfp8 else kitchen.TensorCoreNVFP4Layout
    for rows in (1, 31, 32, 33, 127, 128, 129, 300):
        for columns in (1, 16, 63, 64, 65, 128, 129, 500):
            values, params = layout.quantize(weight(rows, columns))
            made = codec((rows, columns), torch.bfloat16)
            scales = params.scale if codec is Mxfp8 else params.block_scale
            assert [part.nbytes for part in made.parts[:2]] == [values.nbytes, scales.nbytes]


@pytest.mark.parametrize("codec", [Mxfp8, Nvfp4])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 5)])
def test_only_matrices_are_taken(codec: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is no matrix"):
        codec(shape, torch.bfloat16)
