"""Neighborhood attention in blocks gives what diffusers' own way gives, which takes memory with the square."""

from __future__ import annotations

import pytest
import torch
from ballast.pipelines.files.neighborhood import NeighborhoodInBlocks, attend_in_blocks
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
