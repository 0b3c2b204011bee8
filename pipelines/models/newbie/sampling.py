"""Solve from noise to picture: Euler and midpoint steps, guidance, starting from a picture.

Time runs from 0, noise, to 1, picture. The formulas are those of sample.py and transport/ in
NewBieAI-Lab/NewBie-image-Exp0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Velocity = Callable[[torch.Tensor, float], torch.Tensor]


def times(steps: int, shift: float, denoise: float = 1.0) -> list[float]:
    """Return the `steps` + 1 times of a run, the last one 1. A `shift` above 1 puts more of them where noise is strong.

    With `denoise` below 1 they are the last ones of a longer run, and the first is not 0.
    """
    whole = max(steps, int(steps / denoise))
    even = [1 - step / whole for step in range(whole - steps, whole + 1)]
    return [1 - shift * sigma / (1 + (shift - 1) * sigma) for sigma in even]


def start(noise: torch.Tensor, picture: torch.Tensor | None, time: float) -> torch.Tensor:
    """Return the sample that a run begins with: noise, or a picture with the noise of that time."""
    return noise if picture is None else (1 - time) * noise + time * picture


def guide(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float, renorm: float) -> torch.Tensor:
    """Classifier-free guidance of velocities [B,...].

    `renorm` above 0 keeps the norm of each whole sample below that many times the conditional one's.
    """
    guided = unconditional + scale * (conditional - unconditional)
    if renorm <= 0:
        return guided
    axes = tuple(range(1, guided.ndim))
    most = renorm * torch.linalg.vector_norm(conditional, dim=axes, keepdim=True)
    norm = torch.linalg.vector_norm(guided, dim=axes, keepdim=True)
    return guided * (most / norm).clamp(max=1)


def euler(velocity: Velocity, x: torch.Tensor, schedule: list[float]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, after each Euler step, the sample and the picture that it predicts."""
    for time, then in zip(schedule, schedule[1:], strict=False):
        direction = velocity(x, time)
        expected = x + (1 - time) * direction
        x = x + (then - time) * direction
        yield x, expected


def midpoint(velocity: Velocity, x: torch.Tensor, schedule: list[float]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `euler`, with the velocity from the middle of each step: two calls for each."""
    for time, then in zip(schedule, schedule[1:], strict=False):
        middle = (time + then) / 2
        direction = velocity(x + (middle - time) * velocity(x, time), middle)
        expected = x + (1 - time) * direction
        x = x + (then - time) * direction
        yield x, expected


SAMPLERS = {"euler": euler, "midpoint": midpoint}
