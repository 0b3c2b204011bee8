"""A VAE in stripes: the numbers of the whole, in the bytes that are given, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import striped_vaes
import torch
from ballast.bench.rss import peak_rss_bytes
from ballast.memory import striped
from ballast.memory.planning.dry_run import dry_run, lay_weights
from ballast.memory.planning.stripes import Pass, blocks, device_rows, is_cheaper_made, stripe_height, stripes
from ballast.memory.rates import ASSUMED, Rates
from ballast.memory.simulated.dry import DEVICE, dry_card
from ballast.memory.striped import factories
from ballast.memory.striped import striped_attention as attention
from ballast.memory.striped.running_variance import RunningVariance
from host import find_host, host_python
from selection import few

GB = 2**30
PIXELS = 1e-4  # the most that a pixel in 0..1 may differ


# How high stripes are


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("a_row", [1, 10, 333])
@pytest.mark.parametrize("halo", [0, 2, 6])
@pytest.mark.parametrize("budget", [0, 100, 5000, 10**6])
def test_stripes_fit_and_are_as_few_as_can_be(rows: int, a_row: int, halo: int, budget: int) -> None:
    def peak_bytes(height: int) -> int:
        return (min(rows, height + halo) + height) * a_row

    height = stripe_height(rows, budget, peak_bytes)
    found = stripes(rows, height)
    assert found[0][0] == 0 and found[-1][1] == rows
    assert all(one[0] < other[0] <= one[1] for one, other in zip(found, found[1:], strict=False))
    assert {stop - start for start, stop in found} == {height}
    assert peak_bytes(height) <= budget or height == 1
    highest = max((n for n in range(1, rows + 1) if peak_bytes(n) <= budget), default=1)
    assert len(found) == math.ceil(rows / highest)


def test_stripes_keep_to_the_grain_where_they_can() -> None:
    assert stripe_height(1000, 100, lambda n: n, grain=8) % 8 == 0
    assert stripe_height(1000, 100, lambda n: n, grain=64) == 64
    assert stripe_height(1000, 5, lambda n: n, grain=8) == 5
    assert stripe_height(1000, 10**6, lambda n: n, grain=7) == 1000
    with pytest.raises(ValueError, match="at least 1 row"):
        stripe_height(0, 1, lambda n: n)
    with pytest.raises(ValueError, match="1 to 3 high"):
        stripes(3, 4)


def test_what_is_cheaper_and_how_long_a_pass_takes() -> None:
    assert not is_cheaper_made(100, 100, 1, 100)  # copies that hide behind both passes
    assert is_cheaper_made(274, 250, 3, 100) and not is_cheaper_made(275, 250, 3, 100)  # a third of 600 is saved
    assert is_cheaper_made(83, 400, 1, 100) and not is_cheaper_made(84, 400, 1, 100)  # what hides is saved
    assert not is_cheaper_made(1, 5, 0, 100)  # what lies on the device is not moved
    assert [device_rows(64, 10, spare) for spare in (-5, 39, 40, 400, 10**6)] == [0, 0, 4, 40, 64]
    assert Pass(100, 30, 20).seconds(10, 10) == 10
    assert Pass(100, 300, 20).seconds(10, 10) == Pass(100, 30, 300).seconds(10, 10) == 30
    assert Pass(100, 300, 20, 10).seconds(10, 10) == 30 and Pass(100, 30, 20, 10).seconds(10, 10) == 11
    assert Pass(4, 3, 2, 1).scaled(3) == Pass(12, 9, 6, 3)


def test_moments_of_stripes_are_those_of_the_whole() -> None:
    x = torch.randn(2, 6, 41, 5) * 3 + 1000  # far from zero, where sums of squares would be lost
    running = RunningVariance(2)
    for start, stop in blocks(41, 9):
        running.add(x[:, :, start:stop])
    found = running.total().merged(3)
    variance, mean = torch.var_mean(x.double().reshape(2, 3, -1), dim=-1, correction=0)
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance, variance, rtol=1e-5, atol=0)
    assert found.count == 2 * 41 * 5


# Single functions, in many stripes


def nn_layer(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return layer.requires_grad_(False)


def conv(*args: Any, **kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return nn_layer(torch.nn.Conv2d(6, 8, *args, **kwargs))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += x
    y.mul_(3).clamp_(min=-1)
    torch.nn.functional.silu(y, inplace=True)
    y[:, 2] = 5.0
    y[:, 3:5] = x[:, :2]
    return y


def written_frames(x: torch.Tensor) -> torch.Tensor:
    frames = x.new_empty(2, 9, 23, 7)
    frames[:, :3] = 0
    for index, channel in enumerate(x.unbind(1), 3):
        frames[:, index] = torch.sigmoid(channel)
    frames[:, :, 4] = 1.0
    return torch.cat([frames[:, -2:].clone(), frames[:, :4]], dim=1)


def copies_changed(x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    copies = [h.clone(), F.pad(h, (0, 0, 0, 0)), h.to(torch.float32, copy=True)]
    for copy in copies:
        copy.mul_(2)
    return torch.cat([h, *copies])


def self_attention(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
    found = torch.nn.functional.scaled_dot_product_attention(tokens, tokens * 2, tokens + 1)
    return found.squeeze(1).transpose(1, 2).reshape(x.shape)


def masked_attention(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
    places = torch.arange(tokens.shape[2], device=x.device)
    seen = (places[:, None] // 7 >= places[None] // 7).logical_and(places[None] % 5 != 3)
    found = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=seen)
    return found.squeeze(1).transpose(1, 2).unflatten(2, (23, 7))


F = torch.nn.functional
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conv 1": conv(1),
    "conv 3": conv(3, padding=1),
    "conv 5 without padding": conv(5),
    "conv 7": conv(7, padding=3),
    "conv stride 2": conv(3, padding=1, stride=2),
    "conv stride 3 of 4": conv((4, 2), padding=(2, 0), stride=(3, 1)),
    "conv dilated": conv(3, padding=2, dilation=2),
    "conv of groups": conv(3, padding=1, groups=2),
    "conv same": conv(3, padding="same"),
    "conv replicating": conv(3, padding=1, padding_mode="replicate"),
    "conv reflecting": conv(3, padding=1, padding_mode="reflect"),
    "conv far padding": conv(2, padding=5),
    "conv after conv": lambda x: F.conv2d(F.conv2d(x, ONES, padding=1), ONES, padding=1),
    "conv transposed": nn_layer(torch.nn.ConvTranspose2d(6, 4, 4, 2, 1)),
    "downsample of encoders": lambda x: conv(3, stride=2)(F.pad(x, (0, 1, 0, 1))),
    "pad replicate": lambda x: F.pad(x, (2, 1, 4, 3), mode="replicate"),
    "pad with 3": lambda x: F.pad(x, (0, 0, 30, 2), value=3.0),
    "pad reflect": lambda x: F.pad(x, (2, 1, 4, 3), mode="reflect"),
    "pad reflect far": lambda x: F.pad(F.pad(x, (0, 0, 22, 0), mode="reflect"), (3, 0, 1, 40), mode="reflect"),
    "pad reflect below": lambda x: F.pad(x * 2, (0, 0, 0, 22), mode="reflect"),
    "pad negative": lambda x: F.pad(x, (0, 0, -2, -3)),
    "pool": lambda x: F.avg_pool2d(x, 2),
    "pool max": lambda x: F.max_pool2d(x, 3, 2),
    "group norm": nn_layer(torch.nn.GroupNorm(3, 6)),
    "group norm twice": lambda x: F.group_norm(F.silu(F.group_norm(x, 2)) * 3 + 2, 3),
    "group norm of shuffled": lambda x: F.group_norm(F.pixel_shuffle(x[:, :4], 2), 1),
    "group norm flat": lambda x: F.group_norm(x.flatten(2), 2).unflatten(2, (23, 7)),
    "layer norm": lambda x: F.layer_norm(x.movedim(1, -1), (6,)).movedim(-1, 1),
    "layer norm of rows": lambda x: F.layer_norm(x, (23, 7)),
    "normalize": lambda x: F.normalize(x, dim=1) * 6**0.5,
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "nearest exact": lambda x: F.interpolate(x, size=(69, 14), mode="nearest-exact"),
    "nearest odd": lambda x: F.interpolate(x, size=(30, 9), mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "conv of nearest": lambda x: conv(3, padding=1)(F.interpolate(x, scale_factor=2.0)),
    "pixel shuffle": lambda x: F.pixel_shuffle(x[:, :4], 2) * 2,
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :22, :6], 2),
    "shuffle by hand": lambda x: x.unflatten(1, (-1, 2)).permute(0, 1, 3, 2, 4).flatten(2, 3),
    "unshuffle by hand": lambda x: x[:, :, 1:].unflatten(2, (-1, 2)).permute(0, 1, 3, 2, 4).flatten(1, 2),
    "repeat interleave": lambda x: x.repeat_interleave(3, dim=2).repeat_interleave(2, 1),
    "chunk, stack, cat": lambda x: torch.cat([torch.stack(x.chunk(2, 1), 1).flatten(1, 2), x[:, -1:]], 1),
    "rows reversed": lambda x: x.flip(2),
    "rows summed up": lambda x: x.cumsum(2),
    "mean of channels": lambda x: x - x.mean(1, keepdim=True),
    "mean of rows": lambda x: x - x.mean((2, 3), keepdim=True),
    "broadcast": lambda x: 1 - x / torch.arange(1.0, 24.0, device=x.device)[:, None] + x[:, :1],
    "torn": lambda x: x.reshape(2 * 6 * 23, 7)[None] * 2,
    "transposed rows": lambda x: F.conv2d(x.transpose(2, 3) + 1, ONES),
    "mask": lambda x: torch.where(x > 0, x, 0.1 * x),
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), ONES[:, :, 0, 0]).permute(0, 3, 1, 2),
    "in place": in_place,
    "copies changed": copies_changed,
    "frames written": written_frames,
    "attention": self_attention,
    "attention with a mask": masked_attention,
    "bmm": lambda x: torch.bmm(x.flatten(2).transpose(1, 2), torch.bmm(x.flatten(2), x.flatten(2).mT)),
    "matmul of many": lambda x: x[0] @ torch.linspace(-1, 1, 5 * 7 * 3).reshape(5, 1, 7, 3),
    "bfloat16": lambda x: F.silu(F.group_norm(x.bfloat16(), 2)).float(),
    "fft": lambda x: torch.fft.fft2(x).real,
}  # fmt: skip
ONES = torch.linspace(-1, 1, 6 * 6 * 9).reshape(6, 6, 3, 3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_that_of_the_whole(name: str) -> None:
    x = torch.randn(2, 6, 23, 7, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = FUNCTIONS[name](x)
    for budget in (20_000, 10**8):
        found = striped.run(FUNCTIONS[name], x, device="cpu", budget_bytes=budget)
        assert type(found) is torch.Tensor
        tolerance = 0.05 if name == "bfloat16" else 1e-5
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)


def test_changing_what_has_views_is_refused_rather_than_wrong() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y[:, :1]
        y.add_(1)
        return part

    with pytest.raises(RuntimeError, match="views"):
        striped.run(change, torch.ones(1, 2, 3, 4), device="cpu", budget_bytes=10**6)


# VAEs


def on_device(name: str, sim: ModuleType) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A VAE whose weights lie on the simulated device, latents on the CPU, and what they decode to."""
    vae, latents = striped_vaes.build(name)
    with torch.inference_mode():
        whole = striped_vaes.decode(vae, latents)
    return vae.to("sim"), latents, whole


def peak_of(run: Callable[[], Any], sim: ModuleType) -> tuple[Any, int]:
    """Return what a run gives, and its bytes beside those there before. Nothing may stay, not even in a cycle."""
    gc.collect()
    sim.reset_stats()
    held = sim.stats().allocated_bytes
    gc.disable()
    try:
        result = run()
        peak = sim.stats().peak_bytes - held
        assert sim.stats().allocated_bytes == held
    finally:
        gc.enable()
    return result, peak


# In blocks, in attention, or in what is kept between frames.
DIFFERENT = ("sd", "flux", "pyramid", "wan", "hunyuan video 1.5", "cogvideox", "ltx", "mochi", "sana")


@pytest.mark.parametrize("name", few(striped_vaes.VAES, *DIFFERENT))
def test_vae_is_exact_in_a_quarter_of_the_memory(name: str, sim: ModuleType) -> None:
    vae, latents, whole = on_device(name, sim)
    pixels = whole.clamp(-1, 1)

    def clear(result: torch.Tensor) -> torch.Tensor:
        if hasattr(vae, "clear_cache"):
            vae.clear_cache()
        return result

    for work, given, scale in ((striped_vaes.decode, latents, 2.0), (striped_vaes.encode, pixels, 1.0)):
        with torch.inference_mode():
            expected, needed = peak_of(lambda work=work, given=given: clear(work(vae, given.to("sim")).cpu()), sim)
        budget = needed // 4
        found, peak = peak_of(
            lambda work=work, given=given, budget=budget: clear(
                striped.run(lambda x: work(vae, x), given, device="sim", budget_bytes=budget)
            ),
            sim,
        )
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) / scale <= PIXELS
        if name != "sana":  # its attention sums over all rows, which is done in one piece
            assert peak <= budget


def test_tiles_are_not_exact_and_stripes_are() -> None:
    """What it is for: the norm of a tile is not that of the map."""
    vae, latents = striped_vaes.build("flux")
    latents = latents * torch.linspace(0.2, 2, 13)[:, None]
    with torch.inference_mode():
        whole = striped_vaes.decode(vae, latents)
        halves = torch.cat([striped_vaes.decode(vae, half) for half in latents.split(7, dim=2)], dim=2)
    found = striped.run(lambda z: striped_vaes.decode(vae, z), latents, device="cpu", budget_bytes=300_000)
    assert float((halves - whole).abs().max()) / 2 > 100 * PIXELS
    assert float((found - whole).abs().max()) / 2 <= PIXELS


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (5, 1)])
def test_small_and_narrow_latents(size: tuple[int, int], sim: ModuleType) -> None:
    vae, _ = striped_vaes.build("sd")
    latents = torch.randn(1, 4, *size)
    with torch.inference_mode():
        whole = striped_vaes.decode(vae, latents)
    vae.to("sim")
    for budget in (0, GB):
        found = striped.run(lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=budget)
        torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)


def test_mask_of_all_places_need_not_exist(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanVideo's attention to earlier frames: 45 by 45 places here, 130,000 by 130,000 in a video of 33 frames."""
    monkeypatch.setattr(factories, "_LARGE", 45 * 45)
    vae, latents, whole = on_device("hunyuan video", sim)
    found, peak = peak_of(
        lambda: striped.run(lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=500_000), sim
    )
    torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
    assert peak <= 500_000
    with torch.device("meta"):
        published = diffusers.AutoencoderKLHunyuanVideo().eval()
    taken, video = striped.forecast(
        published, lambda z: striped_vaes.decode(published, z), torch.empty(1, 16, 2, 90, 160), budget_bytes=2 * GB
    )
    assert video.shape == (1, 3, 5, 720, 1280)
    assert taken.peak_bytes <= 2 * GB < 4 * (2 * 90 * 160) ** 2


def test_maps_that_a_module_fills_are_not_made_whole(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVAE's writes each part of a map into one of `torch.empty`."""
    monkeypatch.setattr(factories, "_LARGE", 10**5)

    def fill(x: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((1, 12, *x.shape[2:]), dtype=x.dtype, device=x.device)
        parts[:, :4] = torch.ones(1, 4, *x.shape[2:], dtype=x.dtype, device=x.device)
        same = torch.zeros(x.shape, device=x.device)
        same[...] = torch.sigmoid(x)
        parts[:, 4:] = same
        same[...] = 7.0  # after it was read, so that no value is shared
        small = torch.zeros(1, 12, 1, 1, device=x.device)
        return torch.cat([parts * 2 + small, same], dim=1)

    x = torch.randn(1, 8, 512, 64, generator=torch.Generator().manual_seed(1))
    found, peak = peak_of(lambda: striped.run(fill, x, device="sim", budget_bytes=400_000), sim)
    assert torch.equal(found, fill(x))
    assert peak <= 400_000 < found.nbytes


@pytest.mark.parametrize("budget", few([150_000, 400_000], 150_000))
def test_attention_is_one_kernel_where_the_card_has_one_and_all_keys_fit(
    budget: int, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stripe by stripe of queries, one of keys after the other, where not."""
    queries: list[int] = []

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        queries.append(query.shape[-2])
        return torch.nn.functional.scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(attention, "functional", SimpleNamespace(scaled_dot_product_attention=attend))
    for fused in (True, False):
        sim.enable(total="1GB", fused_attention=fused)
        vae, latents, whole = on_device("flux", sim)
        queries.clear()
        found, peak = peak_of(
            lambda vae=vae, latents=latents: striped.run(
                lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=budget
            ),
            sim,
        )
        torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
        assert peak <= budget
        assert (sum(queries) >= 13 * 9) == fused and (fused or not queries)
        vae.to("cpu")
        del vae


# What a run takes


def flux() -> Any:
    """FLUX's VAE in the published size, without weights."""
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16, layers_per_block=2,
            use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
    return vae.eval().requires_grad_(False)


def flux_decode(
    pixels: int, budget_bytes: int, operations_per_byte: float = ASSUMED.operations_per_byte
) -> striped.StripedForecast:
    vae = flux()
    found, picture = striped.forecast(
        vae, lambda z: striped_vaes.decode(vae, z), torch.empty(1, 16, pixels // 8, pixels // 8),
        budget_bytes=budget_bytes, operations_per_byte=operations_per_byte,
    )  # fmt: skip
    assert picture.shape == (1, 3, pixels, pixels)
    return found


def facts(found: striped.StripedForecast) -> tuple[float, ...]:
    """What the choices of what is kept, where, and in which stripes come to."""
    return found.operations, found.h2d_bytes, found.d2h_bytes, found.host_peak_bytes


@pytest.mark.long
def test_flux_at_published_size() -> None:
    """2048 x 2048 in 1.5 GB with its weights, where the whole takes eight times that; 4096 x 4096 in 2 GB."""
    weights = sum(parameter.nbytes for parameter in flux().decoder.parameters())
    before = peak_rss_bytes()
    small = flux_decode(2048, int(1.3 * GB))
    large = flux_decode(4096, int(1.8 * GB))
    assert small.peak_bytes + weights <= 1.5 * GB
    assert large.peak_bytes + weights <= 2.0 * GB
    assert peak_rss_bytes() - before < 300e6, "maps in RAM are only counted"
    # As each choice adds to it: a change of one shows here, and is to be meant.
    assert facts(small) == pytest.approx((4.72799e13, 16.9471e9, 16.5277e9, 5.29321e9), rel=2e-4)
    assert small.host_peak_bytes < 6 * GB
    assert large.host_peak_bytes < 26 * GB
    vae = flux()
    latents = torch.empty(1, 16, 256, 256)
    whole, _ = dry_run({"vae": vae}, lambda device: vae.decode(latents.to(device)).sample.cpu(), method="decode")
    assert whole.units["vae"].peak_bytes > 6 * 1.5 * GB
    assert small.operations < 2 * whole.units["vae"].operations.total
    assert small.seconds(ASSUMED) > small.operations / ASSUMED.operations_per_second


CARD = Rates(25e9, 10e9, 3e9, 600e12, float32=45e12)


def on_the_clock(pixels: int, budget_bytes: int) -> tuple[float, striped.Traffic]:
    """Seconds of the clock that a run takes on a card of those rates, each stripe made on shapes."""
    vae = flux()
    with torch.inference_mode(), dry_card() as card:
        card.configure(None, 0, 25e9, 25e9, 45e12)
        lay_weights(vae, card)
        traffic = striped.Traffic()
        striped.run(
            lambda z: striped_vaes.decode(vae, z), torch.zeros(1, 16, pixels // 8, pixels // 8), device=DEVICE,
            budget_bytes=budget_bytes, traffic=traffic, operations_per_byte=CARD.operations_per_byte, every=True,
        )  # fmt: skip
        assert not card.stats().hazards
        assert card.peak_bytes() <= budget_bytes
        return card.stats().clock_seconds, traffic


@pytest.mark.parametrize(
    ("pixels", "budget", "times_whole"),
    [
        pytest.param(1024, 0.5, 2.1, marks=pytest.mark.long),
        pytest.param(2048, 1.3, 1.3, marks=pytest.mark.soak),
        pytest.param(4096, 1.8, None, marks=pytest.mark.soak),
    ],
)
def test_flux_decodes_in_stripes_about_as_fast_as_whole(pixels: int, budget: float, times_whole: float | None) -> None:
    """Copies overlap with computing: 2048 x 2048 in 1.5 GB moved 49.7 GB once, one after the other."""
    clock, traffic = on_the_clock(pixels, int(budget * GB))
    found = flux_decode(pixels, int(budget * GB), CARD.operations_per_byte)
    assert (found.h2d_bytes, found.d2h_bytes) == (traffic.h2d_bytes, traffic.d2h_bytes)
    assert found.operations == pytest.approx(traffic.operations)
    assert found.seconds(CARD) == pytest.approx(clock, rel=0.1)
    if times_whole:
        assert clock <= times_whole * {1024: 7.15e12, 2048: 48.5e12}[pixels] / CARD.float32
        assert found.h2d_bytes + found.d2h_bytes <= 17e9 * (pixels / 2048) ** 2


def test_flux_moves_a_third_of_what_it_did() -> None:
    """The forecast alone of what the test above takes minutes for."""
    found = flux_decode(2048, int(1.3 * GB), CARD.operations_per_byte)
    assert found.seconds(CARD) <= 1.3 * 48.5e12 / CARD.float32
    assert found.h2d_bytes + found.d2h_bytes <= 17e9
    assert facts(found) == pytest.approx((5.76044e13, 7.93563e9, 8.00484e9, 4.27400e9), rel=2e-4)


@pytest.mark.soak
def test_pixels_are_the_same_at_a_card_s_rates(sim: ModuleType) -> None:
    """Whatever is made again and whatever is moved, in few pieces and in many."""
    vae, latents, whole = on_device("flux", sim)
    for operations in (0.0, 1.0, 30.0, 1e9):
        for budget in (60_000, 150_000, 400_000):
            sim.reset_stats()
            found = striped.run(
                lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=budget,
                operations_per_byte=operations,
            )  # fmt: skip
            torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
            assert not sim.stats().hazards


@pytest.mark.long
@pytest.mark.parametrize("large", few([2048, 4096], 2048))
def test_peak_is_flat_in_size(large: int) -> None:
    peaks = [flux_decode(pixels, GB).peak_bytes for pixels in (1024, large)]
    assert max(peaks) <= GB
    assert max(peaks) <= 1.25 * min(peaks)


@pytest.mark.long
def test_encoding_at_published_size() -> None:
    vae = flux()
    found, latents = striped.forecast(
        vae, lambda x: striped_vaes.encode(vae, x), torch.empty(1, 3, 4096, 4096), budget_bytes=int(1.2 * GB)
    )
    assert latents.shape == (1, 16, 512, 512)
    assert found.peak_bytes <= 1.2 * GB


@pytest.mark.parametrize("name", few(["flux", "pyramid", "hunyuan video"], "flux"))
def test_forecast_is_what_a_run_takes(name: str, sim: ModuleType) -> None:
    """To the byte, also in many stripes of odd heights, some of which are made of more rows than others."""
    vae, latents, pixels = on_device(name, sim)
    budgets = (60_000, 300_000)
    for work, given, some in ((striped_vaes.decode, latents, budgets[:1]), (striped_vaes.encode, pixels, budgets[1:])):
        for budget in budgets if os.environ.get("BALLAST_SOAK") else some:
            traffic = striped.Traffic()
            _, peak = peak_of(
                lambda work=work, given=given, budget=budget, traffic=traffic: striped.run(
                    lambda x: work(vae, x), given, device="sim", budget_bytes=budget, traffic=traffic
                ),
                sim,
            )
            skeleton = striped_vaes.build(name)[0].to("meta")
            found, result = striped.forecast(
                skeleton, lambda x, work=work, of=skeleton: work(of, x), given, budget_bytes=budget
            )
            assert found.peak_bytes == peak
            assert found.host_peak_bytes == traffic.host_peak_bytes
            assert (found.h2d_bytes, found.d2h_bytes) == (traffic.h2d_bytes, traffic.d2h_bytes)
            assert found.operations > 0
            assert result.numel() > 0


# What goes wrong


@pytest.mark.parametrize(
    ("name", "error"), [("flux", KeyboardInterrupt), pytest.param("wan", ValueError, marks=pytest.mark.long)]
)
def test_interrupt_leaves_nothing(name: str, error: type[BaseException], sim: ModuleType) -> None:
    vae, latents, whole = on_device(name, sim)
    held = sim.stats().allocated_bytes
    for last in (1, 60):
        calls = []

        def stop(last: int = last, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == last:
                raise error

        with pytest.raises(error):
            striped.run(
                lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=200_000, on_stripe=stop
            )
        if hasattr(vae, "clear_cache"):
            vae.clear_cache()
        assert len(calls) == last
        assert sim.stats().allocated_bytes == held
    found = striped.run(lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=200_000)
    torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)


@pytest.mark.parametrize("name", ["sd", pytest.param("wan", marks=pytest.mark.soak)])
def test_out_of_memory_in_a_stripe_makes_only_that_one_again(
    name: str, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    vae, latents, whole = on_device(name, sim)
    held, calls = sim.stats().allocated_bytes, []

    def run(traffic: striped.Traffic) -> torch.Tensor:
        def decode(z: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return striped_vaes.decode(vae, z)

        return striped.run(decode, latents, device="sim", budget_bytes=200_000, traffic=traffic)

    undisturbed = striped.Traffic()
    sim.reset_stats()
    run(undisturbed)
    allocations = sim.stats().allocation_count
    for count in range(2, allocations, allocations // 2):
        calls.clear()
        caplog.clear()
        traffic = striped.Traffic()
        with sim.fail_after(count):
            found = run(traffic)
        torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
        assert len(calls) == 1
        assert [each.message for each in caplog.records] == [
            "Ballast: memory ran out in a stripe; going on in smaller ones"
        ]
        assert traffic.h2d_bytes + traffic.d2h_bytes < 2 * (undisturbed.h2d_bytes + undisturbed.d2h_bytes)
        assert sim.stats().allocated_bytes == held


def test_budget_that_the_device_does_not_have(sim: ModuleType) -> None:
    """Somebody else took it meanwhile: what there is does, unless it is not enough for a row."""
    vae, latents, whole = on_device("flux", sim)
    gc.collect()
    held = sim.stats().allocated_bytes
    run = functools.partial(striped.run, lambda z: striped_vaes.decode(vae, z), latents, device="sim", budget_bytes=GB)
    _, needed = peak_of(run, sim)
    stripes: list[int] = []
    peak_of(lambda: run(budget_bytes=needed // 4, on_stripe=lambda: stripes.append(1)), sim)
    wanted = len(stripes)
    sim.enable(total=held + needed // 4)
    found, _ = peak_of(lambda: run(on_stripe=lambda: stripes.append(1)), sim)
    assert len(stripes) - wanted < 3 * wanted
    torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
    sim.enable(total=held + needed // 100)
    with pytest.raises(torch.OutOfMemoryError):
        run()
    assert sim.stats().allocated_bytes == held


def test_memory_that_is_out_for_good_ends_the_run(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stripes are of a map that lies on the device, which takes none to make."""
    x = torch.randn(1, 4, 64, 8)
    tally, tried = RunningVariance.add, []

    def short(self: RunningVariance, stripe: torch.Tensor) -> None:
        tried.append(stripe.shape[2])
        raise torch.OutOfMemoryError("sim out of memory")

    monkeypatch.setattr(RunningVariance, "add", short)
    with pytest.raises(torch.OutOfMemoryError):
        striped.run(lambda x: torch.nn.functional.group_norm(x, 2), x.to("sim"), device="sim", budget_bytes=GB)
    assert len(tried) < 20 and min(tried) == 1
    monkeypatch.setattr(RunningVariance, "add", tally)


def test_maps_that_do_not_fit_in_ram(sim: ModuleType) -> None:
    vae, latents, whole = on_device("sd", sim)
    run = functools.partial(striped.run, lambda z: striped_vaes.decode(vae, z), latents, device="sim")
    traffic = striped.Traffic()
    peak_of(lambda: run(budget_bytes=150_000, traffic=traffic), sim)
    found, _ = peak_of(lambda: run(budget_bytes=150_000, ram_bytes=traffic.host_peak_bytes), sim)
    torch.testing.assert_close(found, whole, rtol=0, atol=2 * PIXELS)
    with pytest.raises(striped.OutOfRamError, match="of RAM or more, and .* are spare"):
        run(budget_bytes=150_000, ram_bytes=traffic.host_peak_bytes - 1)


@pytest.mark.host
def test_vaes_of_comfyui_are_exact() -> None:
    """The host's own VAEs, as they are, by the host's own Python."""
    if find_host() is None:
        pytest.skip("no ComfyUI: set COMFYUI_PATH, or put one in ~/ComfyUI")
    script = Path(__file__).with_name("native_vae.py")
    ran = subprocess.run([host_python(), str(script), str(find_host())], capture_output=True, text=True, timeout=300)
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip(f"{host_python()} lacks what ComfyUI needs: set COMFYUI_PYTHON")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 5
    assert max(found.values()) / 2 <= PIXELS, found
