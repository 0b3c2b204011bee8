"""Checks of Pyramid-Flow's own sampling arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHANNELS = 16  # of the latents


def three_stages(key: str, given: Sequence[int] | str | None, usual: int) -> tuple[int, ...]:
    """Parse the steps of the three stages: numbers, or as people write them, "20,20,20"."""
    if given is None:
        return (usual,) * 3
    try:
        return tuple(int(number) for number in (given.split(",") if isinstance(given, str) else given))
    except ValueError:
        raise ValueError(f"{key} is {given!r}; it takes three numbers, such as '20,20,20'.") from None


def size_of(first: torch.Tensor, width: int | None, height: int | None) -> tuple[int, int]:
    """Width and height in pixels of the first frame, as latents. ValueError if they are not those asked for."""
    if first.ndim != 5 or first.shape[1] != CHANNELS or first.shape[2] != 1:
        raise ValueError(
            f"the first frame is {list(first.shape)}; it takes [1, {CHANNELS}, 1, h, w], as its VAE encodes it."
        )
    size = first.shape[4] * 8, first.shape[3] * 8
    if (width or size[0], height or size[1]) != size:
        raise ValueError(f"the first frame is of {size[0]} x {size[1]}, not {width} x {height}.")
    return size
