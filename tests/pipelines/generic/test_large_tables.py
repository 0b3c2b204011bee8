"""Models with a table of positions that is larger than the dry run keeps values of, as Stable Diffusion 3.5 has."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import diffusers
import pytest
import tiny
import torch
from ballast.memory.simulated.shapes import KEPT_BYTES
from safetensors.torch import load_file, save_file

FILE = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("is_in_file", [True, False])
def test_it_opens_and_draws_as_diffusers_does(is_in_file: bool, tmp_path: Path, sim: ModuleType) -> None:
    folder = tmp_path / "sd3"
    pipe = tiny.FAMILIES["sd3"].build()
    pipe.transformer = diffusers.SD3Transformer2DModel.from_config(
        {**pipe.transformer.config, "pos_embed_max_size": 192}
    )
    assert pipe.transformer.pos_embed.pos_embed.nbytes > KEPT_BYTES
    pipe.save_pretrained(folder)
    if not is_in_file:
        weights = load_file(folder / "transformer" / FILE)
        del weights["pos_embed.pos_embed"]
        save_file(weights, folder / "transformer" / FILE, {"format": "pt"})
    expected = tiny.stock(folder)
    _, encode, sample, decode = tiny.stages("sd3", folder, "sim", cache_dir=tmp_path / "cache")
    latents = sample(encode())
    torch.testing.assert_close(latents, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(decode(latents), expected[1], atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
