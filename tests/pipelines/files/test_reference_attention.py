"""Attention to a reference frame by frame gives what diffusers' FlexAttention gives, which needs a compiler."""

from __future__ import annotations

import pytest
import torch
from ballast.pipelines.files.reference_attention import FramesWithReference, attend_to_frames
from diffusers.models.transformers import transformer_wan_animate_2
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from modular import modular_folders
from torch.nn.attention import flex_attention

_FRAMES, _ROWS, _COLUMNS = 3, 2, 3  # of the reference, in tokens


def _drawn(transformer: torch.nn.Module) -> list[torch.Tensor]:
    """Return what the transformer makes of a reference and of frames, with and without its prompt."""
    generator, cache = torch.Generator().manual_seed(0), WanAnimate2KVCache(2)

    def noise(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator)]

    def call(frames: int, mode: str, **more: object) -> torch.Tensor:
        size = frames, 2 * _ROWS, 2 * _COLUMNS
        noisy, words, condition = noise(4, *size), noise(512, 8), noise(8, *size)
        tokens = frames * _ROWS * _COLUMNS
        made = transformer(noisy, torch.tensor([5.0]), words, condition, cache, mode, tokens, **more)
        return made.sample[0]

    grid = torch.tensor([[_FRAMES, _ROWS, _COLUMNS]])
    whole = {"reference_grid_sizes": grid, "origin_len": 4 * _FRAMES - 3, "origin_area": [16 * _ROWS, 16 * _COLUMNS]}
    with torch.inference_mode():
        call(_FRAMES, "extract", offset_grid_sizes=grid)
        return [call(_FRAMES + 1, "cached", is_uncondtion=without, **whole) for without in (False, True)]


def test_frames_attend_as_diffusers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # which takes 40 s
    monkeypatch.setattr(transformer_wan_animate_2, "create_block_mask", modular_folders.uncompiled_mask)
    torch.manual_seed(0)
    transformer = transformer_wan_animate_2.WanAnimate2Transformer3DModel(
        in_dim=12, dim=24, ffn_dim=16, freq_dim=16, text_dim=8, out_dim=4, num_heads=2, num_layers=2, use_img_emb=False
    ).eval()
    expected = _drawn(transformer)
    attend_to_frames(transformer)
    assert all(isinstance(block.self_attn.processor, FramesWithReference) for block in transformer.blocks)
    transformer.block_masks.clear()
    for made, other in zip(_drawn(transformer), expected, strict=True):
        torch.testing.assert_close(made, other, atol=1e-5, rtol=0)
    assert list(transformer.block_masks.values()) == [None]
