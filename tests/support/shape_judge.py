"""Say what a picture of one plain shape shows: its colour, its background, its place and its kind.

Works on pixels alone: no model takes part, and the templates that decide the kind are drawn here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

PLACES = ("left", "center", "right")
KINDS = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Verdict:
    """`fit` is the overlap (0..1) with the best template; a picture without a shape has no `kind`."""

    colour: str | None
    background: str
    place: str | None
    kind: str | None
    fit: float


def _nearest(pixels: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> np.ndarray:
    colours = np.array(list(palette.values()), dtype=np.float64)
    return ((pixels[..., None, :] - colours) ** 2).sum(-1).argmin(-1)


def _template(kind: str, area: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coverage of a shape of this area around the origin, with edges one pixel soft."""
    if kind == "circle":
        distance = np.hypot(x, y) - np.sqrt(area / np.pi)
    elif kind == "square":
        distance = np.maximum(abs(x), abs(y)) - np.sqrt(area) / 2
    else:
        inner = np.sqrt(area / (3 * np.sqrt(3)))
        distance = np.maximum(y, np.sqrt(0.75) * abs(x) - 0.5 * y) - inner
    return np.clip(0.5 - distance, 0, 1)


def _fit(mask: np.ndarray, kind: str, centre: tuple[float, float]) -> float:
    """Best overlap (intersection over union) over small changes of size and place."""
    rows, columns = np.mgrid[: mask.shape[0], : mask.shape[1]] + 0.5
    best = 0.0
    for scale in (0.9, 1.0, 1.1):
        for shift_x in (-1, 0, 1):
            for shift_y in (-1, 0, 1):
                x, y = columns - centre[0] - shift_x, rows - centre[1] - shift_y
                template = _template(kind, mask.sum() * scale, x, y)
                best = max(best, np.minimum(mask, template).sum() / np.maximum(mask, template).sum())
    return float(best)


def judge(picture: Image.Image, palette: dict[str, tuple[int, int, int]]) -> Verdict:
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    names = list(palette)
    nearest = _nearest(pixels, palette)

    frame = np.ones(nearest.shape, dtype=bool)
    frame[2:-2, 2:-2] = False
    back = int(np.bincount(nearest[frame], minlength=len(names)).argmax())
    counts = np.bincount(nearest.ravel(), minlength=len(names))
    counts[back] = 0
    front = int(counts.argmax())
    if counts[front] < 0.01 * nearest.size:
        return Verdict(None, names[back], None, None, 0.0)

    # How far each pixel lies on the way from the background's colour to the shape's, as both really are.
    back_colour = np.median(pixels[frame & (nearest == back)], axis=0)
    way = np.median(pixels[nearest == front], axis=0) - back_colour
    mask = np.clip((pixels - back_colour) @ way / (way @ way), 0, 1)
    mask[mask < 0.25] = 0
    rows, columns = np.mgrid[: mask.shape[0], : mask.shape[1]] + 0.5
    centre = (mask * columns).sum() / mask.sum(), (mask * rows).sum() / mask.sum()
    place = PLACES[min(2, int(3 * centre[0] / mask.shape[1]))]
    fits = {kind: _fit(mask, kind, centre) for kind in KINDS}
    kind = max(fits, key=lambda name: fits[name])
    return Verdict(names[front], names[back], place, kind, fits[kind])
