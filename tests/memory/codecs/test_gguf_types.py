"""GGUF's block types: the package `gguf` is the reference, and diffusers' functions agree."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from ballast.memory.codecs.codec import CHUNK_WEIGHTS
from ballast.memory.codecs.gguf import TYPES, BlockType, codec_of
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

DECODED = [kind for kind in TYPES.values() if kind.decode]
each_type = pytest.mark.parametrize("kind", DECODED, ids=[kind.name for kind in DECODED])
# Where the float16 numbers of a block lie.
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def reference(kind: BlockType, blocks: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind.name]).copy())


def random_blocks(kind: BlockType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Any bytes, with scales as weights have them."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns, kind.nbytes), dtype=np.uint8)
    for at in SCALES.get(kind.name, (0,)):
        scale = (generator.standard_normal((len(blocks), 1)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, columns * kind.nbytes)


def decoded(kind: BlockType, blocks: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    codec = codec_of(kind, (len(blocks), blocks.shape[1] // kind.nbytes * kind.weights), dtype)
    out = torch.empty(codec.shape, dtype=dtype)
    codec.decode((torch.from_numpy(blocks).view(-1),), out)
    return out


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_types_are_those_of_the_package() -> None:
    assert {number: (kind.weights, kind.nbytes) for number, kind in TYPES.items()} == {
        kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items() if kind.value in TYPES
    }
    assert all(GGMLQuantizationType(number).name == kind.name for number, kind in TYPES.items())
    assert {kind.value for kind in gguf.GGML_QUANT_SIZES} >= TYPES.keys()


def test_all_types_that_diffusers_knows_are_decoded() -> None:
    from diffusers.quantizers.gguf.utils import dequantize_functions

    known = {kind.name for kind in TYPES.values() if kind.decode or kind.plain}
    assert known >= {kind.name for kind in dequantize_functions} and len(dequantize_functions) >= 13


@each_type
@settings(max_examples=25)
@given(rows=st.integers(1, 9), columns=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_any_block_is_decoded_bit_for_bit(kind: BlockType, rows: int, columns: int, seed: int) -> None:
    blocks = random_blocks(kind, rows, columns, seed)
    expected = reference(kind, blocks)
    assert same_bits(decoded(kind, blocks), expected)
    assert same_bits(decoded(kind, blocks, torch.bfloat16), expected.bfloat16())
    assert same_bits(decoded(kind, blocks, torch.float16), expected.half())


@each_type
def test_every_value_of_a_byte_is_decoded_in_every_place(kind: BlockType) -> None:
    blocks = np.empty((256 * kind.nbytes, kind.nbytes), np.uint8)
    for at in range(kind.nbytes):
        own = blocks[256 * at : 256 * (at + 1)]
        own[:] = 0x2E  # a small number where it is one
        own[:, at] = np.arange(256)
    expected = reference(kind, blocks)
    torch.testing.assert_close(decoded(kind, blocks), expected, rtol=0, atol=0, equal_nan=True)


@each_type
def test_more_than_a_chunk_is_decoded_bit_for_bit(kind: BlockType) -> None:
    blocks = random_blocks(kind, 517, 2 * CHUNK_WEIGHTS // 500 // kind.weights, seed=0)
    assert same_bits(decoded(kind, blocks), reference(kind, blocks))


@each_type
def test_diffusers_gives_the_same_in_float32(kind: BlockType) -> None:
    from diffusers.quantizers.gguf.utils import dequantize_functions

    if (function := dequantize_functions.get(GGMLQuantizationType[kind.name])) is None:
        pytest.skip("diffusers does not decode this type")
    blocks = random_blocks(kind, 6, 3, seed=1)
    theirs = function(torch.from_numpy(blocks).view(-1, kind.nbytes), kind.weights, kind.nbytes, dtype=torch.float32)
    assert same_bits(decoded(kind, blocks), theirs.reshape(6, -1))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_that_the_package_quantized_stay_near(name: str) -> None:
    plain = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    blocks = quants.quantize(plain, GGMLQuantizationType[name])
    kind = next(kind for kind in DECODED if kind.name == name)
    error = np.linalg.norm(decoded(kind, blocks).numpy() - plain) / np.linalg.norm(plain)
    assert error < {"Q4_0": 0.1, "Q4_1": 0.09, "Q5_0": 0.05, "Q5_1": 0.045, "Q8_0": 0.006}[name]


@pytest.mark.parametrize("kind", [kind for kind in TYPES.values() if kind.plain], ids=lambda kind: kind.name)
def test_plain_types_are_raw_and_keep_their_type(kind: BlockType) -> None:
    codec = codec_of(kind, (3, 5), torch.bfloat16)
    assert codec.name == "raw" and codec.dtype == kind.plain and codec.encoded_bytes == 15 * kind.nbytes


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_M", "TQ1_0", "MXFP4", "Q8_K"])
def test_types_that_are_not_decoded_are_refused_in_one_line(name: str) -> None:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    with pytest.raises(
        ValueError, match=f"^is stored as {name}, which Ballast does not decode. Get .* Q4_K, "
    ) as error:
        codec_of(kind, (2, 256), torch.bfloat16)
    assert "\n" not in str(error.value)


@each_type
@pytest.mark.parametrize("more", [1, 16])
def test_parts_of_blocks_are_refused(kind: BlockType, more: int) -> None:
    for shape in ((1, kind.weights + more), (kind.weights + 1, kind.weights + more), (more,), ()):
        with pytest.raises(ValueError, match=f"no whole blocks of {kind.name}"):
            codec_of(kind, shape, torch.bfloat16)


@each_type
def test_blocks_of_several_rows_have_no_rows_of_their_own(kind: BlockType) -> None:
    """Of convolutions whose shape was noted. What is not noted, the header's reader refuses by its stored rows."""
    blocks = random_blocks(kind, 3, 3, 0)
    codec = codec_of(kind, (kind.weights, 3, 3), torch.float32)
    out = torch.empty(codec.shape)
    codec.decode((torch.from_numpy(blocks).view(-1),), out)
    assert codec.row_parts is None and codec_of(kind, (9, kind.weights), torch.float32).row_parts == (kind.nbytes,)
    torch.testing.assert_close(out, reference(kind, blocks).view(out.shape), atol=0, rtol=0, equal_nan=True)
