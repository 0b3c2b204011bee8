"""Pictures that a run takes: checked, and as the stock pipelines want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Given = torch.Tensor | Sequence[torch.Tensor] | None  # pictures [B,H,W,3], or several of unequal sizes

_SLACK = 0.01  # by which filters that resize a picture overshoot 0..1


_SAME_SHAPE = 0.02  # by which sides may differ: sizes are rounded to what a model takes


class Frames(tuple[torch.Tensor, ...]):
    """Pictures or masks that are one video."""


@dataclass(frozen=True)
class Pictures:
    """The inputs of a run beside text: pictures [H,W,3] and masks [H,W], float32 in 0..1 on the CPU.

    `references` are those that came with the prompt, `control` say where what is: edges, depth, poses. Of a mask, 1 is
    painted anew. `video` are frames to start from. `strength` says how much of `image` or `video` is replaced, up to 1;
    None for as much as the stock pipeline replaces.
    """

    image: tuple[torch.Tensor, ...] = ()
    references: tuple[torch.Tensor, ...] = ()
    mask: tuple[torch.Tensor, ...] = ()
    last_image: tuple[torch.Tensor, ...] = ()
    control: tuple[torch.Tensor, ...] = ()
    strength: float | None = None
    video: tuple[torch.Tensor, ...] = ()

    def __bool__(self) -> bool:
        given = self.image or self.references or self.mask or self.last_image or self.control or self.video
        return bool(given) or self.strength is not None


def pictures_of(
    references: Sequence[torch.Tensor],
    image: Given,
    mask: Given,
    last_image: Given,
    control: Given,
    strength: float | None,
    video: Given = None,
) -> Pictures:
    """Return the pictures of one run. Raises TypeError or ValueError, in one line, for what is none or does not fit."""
    images, masks, frames = as_pictures(image, "image"), as_masks(mask), as_pictures(video, "video")
    last, controls = as_pictures(last_image, "last_image"), as_pictures(control, "control")
    if len({tuple(frame.shape) for frame in frames}) > 1:
        raise ValueError("video has frames of several sizes. Give them one size.")
    shown = images or frames or tuple(references) or controls
    if masks and not shown:
        raise ValueError("there is a mask, but no picture to paint into. Give image, too.")
    sizes = {tuple(one.shape[:2]) for one in shown}
    for one in masks:
        if tuple(one.shape) not in sizes:
            (rows, columns), (height, width) = one.shape, next(iter(sizes))
            raise ValueError(f"the mask is {columns} x {rows}, the picture {width} x {height}. Give one of its size.")
    if strength is not None:
        if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 < strength <= 1:
            raise ValueError(f"strength is {str(strength)[:80]}; it takes a number above 0 and up to 1.")
        if not shown:
            raise ValueError(f"strength is {strength:g}, but there is no picture to start from. Give image, too.")
    return Pictures(images, tuple(references), masks, last, controls, strength, frames)


def stretch_notes(pictures: Pictures, width: int, height: int) -> list[str]:
    """Say which pictures have another shape than the result of this size, to which the stock pipelines stretch them."""
    given = {"image": pictures.image, "video": pictures.video, "last_image": pictures.last_image}
    given |= {"control": pictures.control, "mask": pictures.mask}
    odd: dict[tuple[int, int], list[str]] = {}
    for name, parts in given.items():
        for rows, columns in dict.fromkeys((int(one.shape[0]), int(one.shape[1])) for one in parts):
            if not 1 - _SAME_SHAPE < columns * height / (rows * width) < 1 + _SAME_SHAPE:
                odd.setdefault((columns, rows), []).append(name)
    return [
        f"Stretched to {width} x {height}, which is another shape: {' and '.join(names)}, {columns} x {rows}. Crop, or "
        "choose a size of that shape."
        for (columns, rows), names in odd.items()
    ]


def as_pictures(given: Given, name: str) -> tuple[torch.Tensor, ...]:
    """Pictures [H,W,3] of a batch, or of several; none of None. TypeError or ValueError for anything else."""
    return tuple(_clean(one, name) for part in _parts(given) for one in _batch(part, name, 3))


def as_masks(given: Given) -> tuple[torch.Tensor, ...]:
    """Masks [H,W] of a batch, or of several; none of None. TypeError or ValueError for anything else."""
    return tuple(_clean(one, "mask") for part in _parts(given) for one in _batch(part, "mask", 2))


def as_stock(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a stock pipeline's call: pictures among them become PIL's, which all of them take, in 8 bits."""
    return {k: _stock_pictures(v, k == "images") if isinstance(v, tuple) else v for k, v in arguments.items()}


def handed(given: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """One of PIL's pictures, or a list of them, as tensors. TypeError for anything else."""
    from PIL.Image import Image as PilImage

    if isinstance(given, list | tuple):
        return tuple(handed(one) for one in given)  # type: ignore[misc]
    if not isinstance(given, PilImage):
        raise TypeError(f"its text encoder is given {type(given).__name__} for a picture")
    import numpy as np

    return torch.from_numpy(np.array(given.convert("RGB"), dtype=np.float32) / 255)


def as_handed(pictures: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
    """Return what `handed` made tensors of."""
    return [_to_pil(one) for one in pictures] if isinstance(pictures, tuple) else _to_pil(pictures)


def _stock_pictures(pictures: Any, listed: bool) -> Any:
    if not pictures or not all(isinstance(one, torch.Tensor) for one in pictures):
        return pictures
    made = [_to_pil(one) for one in pictures]
    return made[0] if len(made) == 1 and not listed and not isinstance(pictures, Frames) else made


def _to_pil(picture: torch.Tensor) -> Image:
    from PIL import Image

    return Image.fromarray((picture * 255).round().byte().numpy())


def _parts(given: Given) -> Sequence[Any]:
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else (given,)


def _batch(part: Any, name: str, dimensions: int) -> Sequence[torch.Tensor]:
    takes = "[pictures, height, width" + (", 3]" if dimensions == 3 else "]")
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{name} is {type(part).__name__}; give a tensor, {takes}.")
    shape = list(part.shape)
    has_channels = dimensions == 2 or shape[-1:] == [3]
    if part.ndim not in (dimensions, dimensions + 1) or not has_channels or not part.numel():
        raise ValueError(f"{name} is {shape}; it takes {takes}.")
    if part.is_nested or part.layout != torch.strided or part.is_meta or not part.is_floating_point():
        raise ValueError(f"{name} is no dense tensor of floating-point numbers. Give one in 0..1.")
    return part if part.ndim == dimensions + 1 else (part,)  # type: ignore[return-value]


def _clean(picture: torch.Tensor, name: str) -> torch.Tensor:
    picture = picture.detach().to("cpu", torch.float32)
    least, most = float(picture.min()), float(picture.max())
    if not (least >= -_SLACK and most <= 1 + _SLACK):  # NaN is not either
        raise ValueError(f"{name} holds values from {least:g} to {most:g}; it takes those from 0 to 1.")
    return picture.clamp(0, 1).contiguous()
