"""Plan decoding with the causal video VAE: scaling of latents, places of tiles, bytes of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .kinds import Kind

_FIRST = {"flux": (-0.04, 1 / 1.8726), "mmdit": (0.1490, 1 / 1.8415)}  # shift, scale
_LATER = (-0.2343, 1 / 3.0986)
_FLOAT = 4  # bytes: decoding is in float32

TILES = (1024, 768, 512, 384, 256, 192, 128)
WINDOWS = (4, 2, 1)


def to_vae(latents: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return what the VAE decodes, of the latents [B,16,f,h,w] that a transformer of this kind makes."""
    shift, scale = _constants(latents, kind)
    return latents / scale + shift


def from_vae(latents: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return what a transformer of this kind takes, of latents [B,16,f,h,w] that the VAE encoded."""
    shift, scale = _constants(latents, kind)
    return (latents - shift) * scale


def _constants(latents: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift and scale of each frame [f,1,1]: the first one has its own."""
    rows = torch.tensor([_FIRST[kind], *[_LATER] * (latents.shape[2] - 1)]).to(latents)
    return rows[:, 0, None, None], rows[:, 1, None, None]


def spans(size: int, tile: int, ratio: int) -> list[tuple[int, torch.Tensor]]:
    """Where tiles start on an axis of latents, and the weight [`tile` * `ratio`] of each of their pixels.

    They overlap by a quarter or more, and weights of a pixel add up to 1.
    """
    if tile < 4:
        raise ValueError(f"tiles of {tile * ratio} pixels are too small to overlap: take {4 * ratio} or more.")
    if tile >= size:
        return [(0, torch.ones(size * ratio))]
    overlap = tile // 4
    steps = -(-(size - tile) // (tile - overlap))
    starts = [index * (size - tile) // steps for index in range(steps + 1)]
    rise = (torch.arange(tile * ratio) + 0.5).div(overlap * ratio).clamp(max=1)
    weights = torch.zeros(len(starts), size * ratio)
    for row, start in zip(weights, starts, strict=True):
        left = rise if start else torch.ones_like(rise)
        right = rise.flip(0) if start + tile < size else torch.ones_like(rise)
        row[start * ratio : (start + tile) * ratio] = left * right
    weights /= weights.sum(0)
    return [(start, row[start * ratio : (start + tile) * ratio]) for start, row in zip(starts, weights, strict=True)]


def blended(
    z: torch.Tensor, chunks: Callable[[torch.Tensor], Iterable[torch.Tensor]], tile: int, space: int, time: int
) -> Iterator[torch.Tensor]:
    """Yield the frames of latents [B,C,f,h,w] in the chunks that `chunks` makes of each tile, tile by tile.

    A latent is `space` x `space` pixels of `time` frames. The frames are put together where the chunks lie.
    """
    height, width = z.shape[3] * space, z.shape[4] * space
    canvas: torch.Tensor | None = None
    counts: list[int] = []
    for top, down in spans(z.shape[3], tile, space):
        for left, across in spans(z.shape[4], tile, space):
            counts, weight = [], down[:, None] * across
            for part in chunks(z[..., top : top + tile, left : left + tile]):
                if canvas is None:
                    canvas = part.new_zeros(*part.shape[:2], time * (z.shape[2] - 1) + 1, height, width)
                place = canvas[:, :, sum(counts) :, top * space :, left * space :]
                place[:, :, : part.shape[2], : part.shape[3], : part.shape[4]].add_(part * weight.to(part))
                counts.append(part.shape[2])
    assert canvas is not None
    yield from canvas.split(counts, dim=2)


def cache_bytes(config: Mapping[str, Any], height: int, width: int) -> int:
    """Bytes that pass from chunk to chunk of a video, or tile, of this size in pixels: two frames a convolution."""
    wide, area = config["decoder_block_out_channels"], _latents(config, height, width)
    count = (config["decoder_in_channels"] + 4 * wide[-1]) * area
    for came, out, layers, in_space, in_time in _levels(config):
        count += (came + (2 * layers - 1 + in_space) * out) * area
        area *= 4 if in_space else 1
        count += in_time * out * area
    return 2 * _FLOAT * (count + wide[0] * area)


def decode_bytes(config: Mapping[str, Any], height: int, width: int, window: int = 1) -> int:
    """Peak bytes of activations while a video, or tile, of this size in pixels decodes in chunks.

    Without the weights, the frames that the caller keeps, and the workspace of kernels.
    """
    area = _latents(config, height, width)
    waiting = config["decoder_in_channels"] * 2 * (window + 1) * area
    frames, widest = window + 1, config["decoder_block_out_channels"][-1]
    most = waiting + (4 * frames + 2) * widest * area
    for came, out, layers, in_space, in_time in _levels(config):
        waiting += came * frames * area
        busy = max(came * (window + 2) + out * max(2, window), out * ((4 if layers > 1 else 3) * window + 2)) * area
        if in_space:
            busy, area = max(busy, 9 * window * out * area), 4 * area
        if in_time:
            busy = max(busy, max(4 * window + 2, 5 * window) * out * area)
        most = max(most, waiting + busy)
        frames = window * (2 if in_time else 1)
    made = 2 * config["decoder_out_channels"] * (window * 2 ** sum(config["decoder_temporal_up_sample"]) + 1) * area
    most = max(most, waiting + (2 * window + 2 + max(2, window)) * config["decoder_block_out_channels"][0] * area)
    return cache_bytes(config, height, width) + _FLOAT * (most + made)


def choose(config: Mapping[str, Any], height: int, width: int, budget: int) -> tuple[int, int | None] | None:
    """Choose `window` and `tile_pixels` so that a video decodes in `budget` bytes beside the weights; None if none fit.

    Tiles change the picture and windows only the pace: so no tiles if possible, else large ones; then a wide window.
    """
    for tile in (None, *(tile for tile in TILES if tile < max(height, width))):
        size = (height, width) if tile is None else (min(tile, height), min(tile, width))
        for window in WINDOWS:
            if decode_bytes(config, *size, window) <= budget:
                return window, tile
    return None


def _latents(config: Mapping[str, Any], height: int, width: int) -> int:
    return height * width // 4 ** sum(config["decoder_spatial_up_sample"])


def _levels(config: Mapping[str, Any]) -> list[tuple[int, int, int, bool, bool]]:
    """Return of each decoder block: channels in and out, resnets, whether it doubles in space and in time."""
    widths = config["decoder_block_out_channels"][::-1]
    names = ("decoder_layers_per_block", "decoder_spatial_up_sample", "decoder_temporal_up_sample")
    return list(zip((widths[0], *widths[:-1]), widths, *(config[name] for name in names), strict=True))
