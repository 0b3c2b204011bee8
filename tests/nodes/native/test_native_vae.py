"""The host's own VAEs in our decoder, on a real ComfyUI in this process, whose device is the simulated card."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import pytest
import torch
from ballast.nodes.decode import VaeDecode
from ballast.nodes.native import vae as native_vae
from ballast.pipelines.sampling.latents import WrongLatentsError
from comfy_execution.graph_utils import ExecutionBlocker
from host import page, run_node
from node_runner import native_models

pytestmark = pytest.mark.host


def decode(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    with page() as shown:
        result = run_node(VaeDecode, pipeline=vae, latent={"samples": latents}).result
    return result[0], result[1], shown.texts[-1][1]


def in_float32(kind: str, latents: torch.Tensor) -> torch.Tensor:
    """What the host makes of them on the CPU with the VAE loaded in float32."""
    with torch.inference_mode():
        vae = getattr(native_models(), kind)(dtype=torch.float32, device=torch.device("cpu"))
        return torch.cat([vae.decode(one).flatten(0, -4) for one in latents.split(1)])


LATENTS = {"vae": (2, 4, 8, 6), "video_vae": (1, 16, 3, 4, 6)}


@pytest.mark.parametrize("kind", LATENTS)
def test_decoding_is_in_float32_and_the_vae_stays_as_it_was(kind: str, card: ModuleType) -> None:
    latents = torch.randn(LATENTS[kind], generator=torch.Generator().manual_seed(0))
    expected = in_float32(kind, latents)
    vae = getattr(native_models(), kind)()
    state = vae.first_stage_model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    described = {name: value for name, value in vars(vae).items() if name != "size"}
    with torch.inference_mode():
        rounded = vae.decode(latents).flatten(0, -4)  # it is in the host's hands, on the device
    assert vae.vae_dtype == torch.bfloat16 and not torch.equal(rounded, expected)
    held = card.stats().allocated_bytes
    assert held > 0

    images, video, text = decode(vae, latents)
    assert torch.equal(images, expected) and images.dtype == torch.float32 and images.device.type == "cpu"
    assert images.shape == ((2, 64, 48, 3) if kind == "vae" else (9, 32, 48, 3))
    assert isinstance(video, ExecutionBlocker) and "frames a second" in video.message
    assert "in float32 on sim:0, now gone" in text
    assert card.stats().allocated_bytes == 0

    assert {name: value for name, value in vars(vae).items() if name != "size"} == described
    for name, tensor in vae.first_stage_model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype, name
    with torch.inference_mode():
        assert torch.equal(vae.decode(latents).flatten(0, -4), rounded), "and it works on"


def test_decoding_goes_on_in_stripes_and_then_on_the_cpu(card: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ballast")
    latents = torch.randn(1, 4, 8, 160, generator=torch.Generator().manual_seed(1))
    expected = in_float32("vae", latents)
    vae = native_models().vae()
    for total, where in (("29MB", "sim:0"), ("3MB", "cpu")):
        card.enable(total=total)
        images, _, text = decode(vae, latents)
        assert f"in float32 on {where}, now gone{'; in stripes; ' if where == 'sim:0' else ''}" in text
        assert (images - expected).abs().max() < 1e-4
        assert card.stats().allocated_bytes == 0
    assert "in stripes" in caplog.text
    assert "trying the CPU" in caplog.text


def test_frames_of_one_video_are_decoded_together(card: ModuleType) -> None:
    latents = torch.randn(3, 4, 4, 6, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        vae = native_models().frames_vae(dtype=torch.float32, device=torch.device("cpu"))
        expected = vae.decode(latents)
        alone = torch.cat([vae.decode(one) for one in latents.split(1)])
    assert (alone - expected).abs().max() > 1e-2
    images, _, _ = decode(native_models().frames_vae(), latents)
    torch.testing.assert_close(images, expected, atol=1e-3, rtol=0)
    assert card.stats().allocated_bytes == 0


def test_pictures_that_are_done_are_kept(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second on nothing but the CPU has room."""
    latents = torch.randn(3, 4, 6, 4, generator=torch.Generator().manual_seed(2))
    expected = in_float32("vae", latents)
    vae, devices = native_models().vae(), []
    run = type(vae).decode

    def noted(self: Any, samples: torch.Tensor, *args: Any, **more: Any) -> Any:
        devices.append(self.device.type)
        if devices == ["sim", "sim"]:
            raise RuntimeError("cuDNN error: unable to find an engine to execute this computation")
        return run(self, samples, *args, **more)

    monkeypatch.setattr(type(vae), "decode", noted)
    images, _, text = decode(vae, latents)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert devices == ["sim", "sim", "cpu", "cpu"] and "in float32 on cpu" in text
    assert card.stats().allocated_bytes == 0


@pytest.mark.parametrize("why", ["device", "ram"])
def test_host_goes_on_in_tiles(why: str, card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the words of an out of memory, and where the maps of stripes would not fit in RAM."""
    vae, tiles = native_models().vae(), []
    tiled = type(vae).decode_tiled_

    def noted(self: Any, samples: torch.Tensor, **sizes: Any) -> Any:
        tiles.append(len(samples))
        return tiled(self, samples, **sizes)

    run = native_vae.striped.run

    def in_stripes(*args: Any, **more: Any) -> Any:  # a tile goes in stripes, too
        if not tiles and why == "device":
            raise RuntimeError("cuDNN error: unable to find an engine to execute this computation")
        return run(*args, **more)

    monkeypatch.setattr(type(vae), "decode_tiled_", noted)
    monkeypatch.setattr(native_vae.striped, "run", in_stripes)
    if why == "ram":
        monkeypatch.setattr(native_vae, "spare_ram_bytes", lambda: 10**9 if tiles else 100_000)
    card.enable(total="26MB")
    images, _, text = decode(vae, torch.randn(1, 4, 8, 160, generator=torch.Generator().manual_seed(1)))
    assert tiles == [1] and "in float32 on sim:0, now gone; in tiles, which may show faint seams; " in text
    assert images.isfinite().all()
    assert card.stats().allocated_bytes == 0


@pytest.mark.parametrize("spare", [10**9, 1_000_000])
def test_error_in_stripes_does_not_change_the_picture(
    spare: int, card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole on the CPU where there is room for that, else told: never in tiles, which would fit."""
    latents = torch.randn(1, 4, 8, 160, generator=torch.Generator().manual_seed(1))
    expected, vae = in_float32("vae", latents), native_models().vae()

    def failing(*args: Any, **more: Any) -> Any:
        raise ValueError("a striped tensor was asked for what it cannot do")

    def tiled(*args: Any, **more: Any) -> Any:
        raise AssertionError("in tiles")

    monkeypatch.setattr(native_vae.striped, "run", failing)
    monkeypatch.setattr(type(vae), "decode_tiled_", tiled)
    monkeypatch.setattr(native_vae, "spare_ram_bytes", lambda: spare)
    card.enable(total="26MB")
    if spare == 10**9:
        images, _, text = decode(vae, latents)
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
        assert "in float32 on cpu, now gone" in text
    else:
        with pytest.raises(
            RuntimeError, match=r"^decoding in stripes failed \(a striped .* Choose a smaller"
        ) as caught:
            decode(vae, latents)
        assert "\n" not in str(caught.value)
    assert card.stats().allocated_bytes == 0


def test_vae_runs_where_the_host_has_it(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.cli_args import args

    monkeypatch.setattr(args, "cpu_vae", True)
    latents = torch.randn(1, 4, 4, 4)
    card.reset_stats()
    _, _, text = decode(native_models().vae(), latents)
    assert "in float32 on cpu" in text and card.stats().peak_bytes == 0


def test_cpu_takes_no_more_ram_than_there_is(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.cli_args import args

    monkeypatch.setattr(args, "cpu_vae", True)
    budgets, run = [], native_vae.striped.run

    def noted(*args: Any, **more: Any) -> Any:
        budgets.append((more["budget_bytes"], more["ram_bytes"]))
        return run(*args, **more)

    latents = torch.randn(1, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    expected = in_float32("vae", latents)
    monkeypatch.setattr(native_vae.striped, "run", noted)
    monkeypatch.setattr(native_vae, "spare_ram_bytes", lambda: 4_000_000)
    images, _, text = decode(native_models().vae(), latents)
    assert budgets == [(500_000, 4_000_000)] and "in float32 on cpu" in text
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    monkeypatch.setattr(native_vae, "spare_ram_bytes", lambda: 0)
    images, _, _ = decode(native_models().vae(), latents)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_not_finite_is_told(card: ModuleType) -> None:
    vae = native_models().vae()
    with pytest.raises(ValueError, match="the latents hold NaN"):
        decode(vae, torch.full((1, 4, 4, 4), torch.nan))
    with torch.inference_mode():
        vae.first_stage_model.decoder.conv_out.weight.data.fill_(3e38)
    with pytest.raises(RuntimeError, match="the decoder made NaN or infinite.* The latent is not lost") as caught:
        decode(vae, torch.randn(1, 4, 4, 4))
    (path,) = re.findall(r"it is in (\S+\.latent)", str(caught.value))
    Path(path).unlink()
    assert card.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("kind", "shape", "says"),
    [
        (
            "vae",
            (1, 16, 8, 8),
            r"the latents have 16 channels in 4 dimensions; this VAE \(AutoencoderKL\) takes 4 in 4",
        ),
        ("vae", (1, 16, 3, 8, 8), r"the latents have 16 channels in 5 dimensions; this VAE \(AutoencoderKL\) takes 4"),
        (
            "video_vae",
            (1, 4, 3, 8, 8),
            r"the latents have 4 channels in 5 dimensions; this VAE \(WanVAE\) takes 16 in 5",
        ),
        ("video_vae", (1, 4, 8, 8), r"the latents have 4 channels in 4 dimensions; this VAE \(WanVAE\) takes 16 in 5"),
    ],
)
def test_latents_of_another_model_are_told_and_not_saved(
    kind: str, shape: tuple[int, ...], says: str, card: ModuleType
) -> None:
    """A wrong wire loses nothing: there is nothing to rescue."""
    folder = Path(folder_paths.get_output_directory())
    before = set(folder.rglob("*.latent"))
    with pytest.raises(WrongLatentsError, match=f"^{says}") as caught:
        decode(getattr(native_models(), kind)(), torch.zeros(shape))
    assert str(caught.value).endswith("Connect the VAE of the model that made them.")
    assert "\n" not in str(caught.value)
    assert set(folder.rglob("*.latent")) == before
    assert card.stats().allocated_bytes == 0
