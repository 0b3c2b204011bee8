"""Procedural training data of the demo model: anti-aliased pictures of one shape, and captions for them.

`render` draws a batch of pictures from integer labels, `caption` words one label. Nothing is read from disk.
"""

from __future__ import annotations

import random

import torch

SIZE = 64
SHAPES = ("circle", "square", "triangle")
PLACES = ("left", "center", "right")
COLOURS = {
    "red": (222, 48, 44),
    "green": (48, 164, 72),
    "blue": (44, 92, 214),
    "yellow": (246, 208, 52),
    "purple": (142, 64, 190),
    "white": (244, 244, 240),
}
COLOUR_NAMES = tuple(COLOURS)
MIDDLE_WORDS = ("center", "centre", "middle")

Label = tuple[int, int, int, int]  # shape, colour, background, place: each an index into the tuples above
LABELS: list[Label] = [
    (shape, colour, back, place)
    for shape in range(len(SHAPES))
    for colour in range(len(COLOUR_NAMES))
    for back in range(len(COLOUR_NAMES))
    for place in range(len(PLACES))
    if colour != back
]

# {place} is a bare word, {where} a phrase such as "on the left"; the first form is the canonical one.
FULL_FORMS = (
    "a {colour} {shape} on a {back} background, {place}",
    "a {colour} {shape} on a {back} background, {where}",
    "{colour} {shape}, {back} background, {where}",
    "{colour} {shape}, {back} background, {place}",
    "a {colour} {shape} {where} of a {back} background",
    "a {back} background with a {colour} {shape} {where}",
    "{where}, a {colour} {shape} on a {back} background",
    "{colour} {shape} on {back}, {place}",
)
PARTIAL_FORMS = (
    "a {colour} {shape} on a {back} background",
    "a {colour} {shape}, {place}",
    "a {colour} {shape} {where}",
    "a {colour} {shape}",
    "{colour} {shape}",
    "a {shape} on a {back} background, {place}",
    "a {shape}",
)


def caption(label: Label, rng: random.Random | None = None) -> str:
    """Words for one label: the canonical form, or with `rng` another phrasing about half the time."""
    shape, colour, back, place = label
    place_word, form = PLACES[place], FULL_FORMS[0]
    if rng is not None:
        if place_word == "center":
            place_word = rng.choice(MIDDLE_WORDS)
        chance = rng.random()
        if chance > 0.9:
            form = rng.choice(PARTIAL_FORMS)
        elif chance > 0.45:
            form = rng.choice(FULL_FORMS[1:])
    where = f"in the {place_word}" if place_word in MIDDLE_WORDS else f"on the {place_word}"
    words = {"colour": COLOUR_NAMES[colour], "back": COLOUR_NAMES[back], "shape": SHAPES[shape]}
    return form.format(place=place_word, where=where, **words)


def all_words() -> str:
    """Every word that a caption can have, as one text."""
    names = (*COLOUR_NAMES, *SHAPES, *PLACES, *MIDDLE_WORDS)
    forms = [form.format(colour="", back="", shape="", place="", where="") for form in FULL_FORMS + PARTIAL_FORMS]
    return " ".join([*names, *forms, "in the", "on the"])


def render(labels: torch.Tensor, generator: torch.Generator | None = None, size: int = SIZE) -> torch.Tensor:
    """Draw labels [n, 4] as pictures [n, 3, size, size] in -1..1; `generator` jitters place and size."""
    count = labels.shape[0]
    jitter = torch.zeros(count, 3)
    if generator is not None:
        jitter = torch.rand(count, 3, generator=generator) * 2 - 1
    shape, colour, back, place = (labels[:, i] for i in range(4))
    radius = (0.185 + 0.006 * jitter[:, 0]).view(-1, 1, 1)
    centre_x = ((2 * place + 1) / 6 + 0.083 * (1 - place) + 0.01 * jitter[:, 1]).view(-1, 1, 1)
    centre_y = (0.5 + 0.015 * jitter[:, 2]).view(-1, 1, 1)

    axis = (torch.arange(size) + 0.5) / size
    x, y = axis.view(1, 1, -1) - centre_x, axis.view(1, -1, 1) - centre_y
    # Distance to each outline, negative inside. The sizes are chosen to look alike.
    circle = (x * x + y * y).sqrt() - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.94 * radius
    inner = 0.68 * radius
    triangle = torch.maximum(y - inner, 0.8660254 * x.abs() - 0.5 * y - inner)
    distance = torch.stack([circle, square, triangle], dim=1)[torch.arange(count), shape]
    cover = (0.5 - distance * size).clamp(0, 1).unsqueeze(1)

    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 127.5 - 1
    front, behind = palette[colour][:, :, None, None], palette[back][:, :, None, None]
    return behind + (front - behind) * cover
