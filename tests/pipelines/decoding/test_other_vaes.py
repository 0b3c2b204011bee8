"""VAEs that are not like most: without tiling, with nothing else, with frames but no convolution over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.memory_manager import STRATEGIES
from ballast.pipelines.decoding import decode, tiling
from ballast.pipelines.files.components import Component, read_config
from ballast.pipelines.planning.vae_forecasts import vae_forecasts

FOUR = (4, 8, 8, 8)


def vector_quantized() -> Any:
    return diffusers.VQModel(
        block_out_channels=FOUR, down_block_types=("DownEncoderBlock2D",) * 4, vq_embed_dim=4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, num_vq_embeddings=16, norm_num_groups=2,
    )  # fmt: skip


def allegro() -> Any:
    """Its tiles are 24 frames of 128 x 128, the least there are."""
    return diffusers.AutoencoderKLAllegro(
        block_out_channels=(4,) * 4, down_block_types=("AllegroDownBlock3D",) * 4, latent_channels=4,
        up_block_types=("AllegroUpBlock3D",) * 4, layers_per_block=1, norm_num_groups=2, sample_size=128,
    )  # fmt: skip


def flat_qwen() -> Any:
    """Takes latents [B,C,1,h,w], and has no nn.Conv3d."""
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, scale_factor_spatial=8,
        temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4, in_channels=3,
        out_channels=3, is_residual=False,
    )  # fmt: skip


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_vae(vae: Any, source: Path, folder: Path) -> Path:
    """A copy of a pipeline, whose VAE is another."""
    shutil.copytree(source, folder)
    shutil.rmtree(folder / "vae")
    vae.save_pretrained(folder / "vae")
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index["vae"] = ["diffusers", type(vae).__name__]
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")
    return folder


@pytest.fixture
def quantized(tiny_folders: Callable[[str], Path], tmp_path: Path, sim: ModuleType) -> tuple[Any, Any]:
    """A pipeline with a VAE that has no tiling, and that VAE."""
    torch.manual_seed(0)
    vae = vector_quantized().eval()
    folder = with_vae(vae, tiny_folders("pixart_sigma"), tmp_path / "quantized")
    return ballast.open_pipeline(folder, device="sim"), vae


@torch.inference_mode()
def test_vae_without_tiling_is_not_run_in_tiles(
    quantized: tuple[Any, Any], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After stripes, which may fail, comes the CPU: whole in the name of tiles would exceed the budget."""
    pipe, vae = quantized
    z = noise(1, 4, 32, 32)
    expected = decode.to_images(vae.decode(z).sample, video=False)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)  # which leaves the switch as it was
    assert not tiling.can_tile(pipe.decoder.module)
    whole = sim.stats().peak_bytes

    def fail(*args: Any) -> Any:
        raise RuntimeError("not in stripes")

    monkeypatch.setattr(decode, "_in_stripes", fail)
    pipe.runner = pipe.runner.set(vram_bytes=whole // 10)
    sim.reset_stats()
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert sim.stats().peak_bytes <= pipe.vram_bytes
    assert [stage.peak_bytes for stage in manager("sim").timeline.stages][-1] == 0


@torch.inference_mode()
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "streamed"])
def test_codebook_comes_with_who_reads_it(strategy: str, quantized: tuple[Any, Any], sim: ModuleType) -> None:
    """VectorQuantizer reads the weight of its embedding, and never calls that."""
    pipe, vae = quantized
    z = noise(1, 4, 8, 8)
    with pipe.manager.stage("decode", [pipe.decoder]), pipe.manager.use(pipe.decoder, strategy) as module:
        device = pipe.manager.execution_device(strategy)
        made = decode.run_decoder(module, z, device, {}).cpu()
    torch.testing.assert_close(made, vae.decode(z).sample, atol=1e-5, rtol=0)


@pytest.mark.long
@torch.inference_mode()
def test_vae_that_cannot_do_without_tiling(
    tiny_folders: Callable[[str], Path], tmp_path: Path, sim: ModuleType
) -> None:
    """It decodes as stock's `enable_tiling` has it, which Allegro's users are told to call; frames come second."""
    torch.manual_seed(0)
    vae = allegro().eval()
    vae.save_pretrained(tmp_path / "vae")
    vae.enable_tiling()
    z = noise(1, 4, 6, 16, 16)
    expected = decode.to_images(vae.decode(z).sample.transpose(1, 2), video=True)
    assert expected.shape == (1, 24, 128, 128, 3)
    assert expected.std() > 1e-3

    pipe: Any = ballast.open_pipeline(tiny_folders("cogvideox"), device="sim")
    config = read_config(tmp_path / "vae", tmp_path)
    pipe.model.decoder = Component("vae", tmp_path / "vae", type(vae), torch.float32, config).unit("allegro")
    pipe.model.decoder_config = config
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)

    forecast = vae_forecasts(pipe.model, "decode", {}, 0).whole(z)
    pipe.runner = pipe.runner.set(vram_bytes=pipe.decoder.size_bytes + int(0.9 * forecast.units["vae"].peak_bytes))
    sim.reset_stats()
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-4, rtol=0)
    assert 0 < sim.stats().peak_bytes <= pipe.vram_bytes


def test_dimensions_of_latents_are_those_that_stock_decodes(
    tiny_folders: Callable[[str], Path], tmp_path: Path, sim: ModuleType
) -> None:
    torch.manual_seed(0)
    vae = flat_qwen()
    assert not any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
    folder = with_vae(vae, tiny_folders("qwenimage"), tmp_path / "flat")
    latents, picture = tiny.stock(folder)
    pipe, encode, sample, decoded = tiny.stages("qwenimage", folder, "sim")
    assert pipe.latent_dimensions == latents.ndim == 5
    torch.testing.assert_close(decoded(sample(encode())), picture, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="4 channels in 4 dimensions"):
        pipe.decode(latents[:, :, 0])
    again: Any = ballast.open_pipeline(folder, device="sim")  # which recalls what was proved
    assert again.latent_dimensions == 5
