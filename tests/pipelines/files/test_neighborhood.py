"""Neighborhood attention in blocks gives what diffusers' own way gives, which takes memory with the square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ballast.pipelines.files.neighborhood import NeighborhoodInBlocks, attend_in_blocks, least_latents
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder as diffusers_decoder
from torch.nn.attention import flex_attention


@pytest.mark.parametrize(
    ("grid", "kernel"), [((3, 9, 17), (3, 7, 7)), ((11, 12, 11), (11, 11, 11)), ((9, 5, 5), (3, 5, 5))]
)
def test_blocks_attend_as_diffusers_does(
    grid: tuple[int, int, int], kernel: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At borders, too, where the window moves inward; of a batch of two."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # which takes 40 s
    torch.manual_seed(0)
    attention = diffusers_decoder.LTX2VideoVaeNeighborhoodAttention(16, kernel, head_dim=8)
    hidden = torch.randn(2, *grid, 16)
    with torch.inference_mode():
        expected = attention(hidden)
        attend_in_blocks(attention)
        assert isinstance(attention.processor, NeighborhoodInBlocks)
        assert attention.build_block_mask(hidden) is None
        torch.testing.assert_close(attention(hidden), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"decoder_stage_kernels": ((3, 3, 3),) * 4, "decoder_stage5_kernel": (3, 3, 3)},
        {"decoder_stage_kernels": ((3, 5, 7), (5, 3, 9), (3, 3, 3), (3, 3, 3)), "decoder_stage5_kernel": (11, 9, 17)},
        {},
    ],
)
def test_the_least_is_what_the_decoder_takes(sizes: dict[str, Any]) -> None:
    """One less on any axis fails, one more does not; with the published strides and kernels, too."""
    narrow = {
        "latent_channels": 4,
        "decoder_head_dim": 8,
        "decoder_stage_channels": (32, 16, 8, 8, 8),
        "decoder_upsample_channel_reductions": (2, 2, 1, 1),
        "decoder_stage_depths": (1,) * 5,
    }
    with torch.device("meta"):
        decoder = LTX2VideoDiffusionDecoderModel(**narrow, **sizes)
    attend_in_blocks(decoder)
    least = list(least_latents(decoder.config))
    decoder.decode(torch.empty(1, 4, *least, device="meta"))
    for axis in (axis for axis in range(3) if least[axis] > 1):
        less = [size - (place == axis) for place, size in enumerate(least)]
        with pytest.raises(ValueError, match="at least its kernel size"):
            decoder.decode(torch.empty(1, 4, *less, device="meta"))
