"""Schedules: the noise levels of a flow-matching run, by the names that ComfyUI has for them. Pure functions.

Each takes a number of steps and a shift, and returns falling sigmas with a zero at the end. They agree with ComfyUI's
in float32 for its table of 1000 levels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch

_LEVELS = 1000  # noise levels in the table that some schedules pick from
_RHO = 7.0  # exponent of the schedule of Karras et al. (2022)
_BETA = 0.6  # both parameters of the beta distribution, arXiv:2407.12173
_LINEAR_NOISE = 0.025  # which the linear half of linear_quadratic removes
_BONG_PIVOT, _BONG_SLOPE = 0.6, 0.2  # share of the steps; steepness in 40 steps


def shifted(shift: float, level: torch.Tensor) -> torch.Tensor:
    """Return noise levels in 0..1, moved towards 1 by a shift above 1."""
    return level if shift == 1.0 else shift * level / (1 + (shift - 1) * level)


def simple(steps: int, shift: float) -> list[float]:
    """Return every n-th level of the table."""
    table, stride = _table(shift), _LEVELS / steps
    return [float(table[-(1 + int(step * stride))]) for step in range(steps)] + [0.0]


def sgm_uniform(steps: int, shift: float) -> list[float]:
    """Return levels at equal distances, without the last. The ends of the range are shifted already, as in ComfyUI."""
    table = _table(shift)
    times = torch.linspace(float(table[-1] * _LEVELS), float(table[0] * _LEVELS), steps + 1)[:-1]
    return [float(shifted(shift, time / _LEVELS)) for time in times] + [0.0]


def beta(steps: int, shift: float) -> list[float]:
    """Return levels at the quantiles of a beta distribution: fewer than asked for where two would be one."""
    table, found = _table(shift), []
    for step in range(steps):
        level = round(_beta_quantile(1 - step / steps) * (_LEVELS - 1))
        if level not in found:
            found.append(level)
    return [float(table[level]) for level in found] + [0.0]


def karras(steps: int, shift: float) -> list[float]:
    """Return the levels of Karras et al. (2022), of which more are low."""
    table = _table(shift)
    low, high = (float(end) ** (1 / _RHO) for end in (table[0], table[-1]))
    sigmas: list[float] = ((high + torch.linspace(0, 1, steps) * (low - high)) ** _RHO).tolist()
    return [*sigmas, 0.0]


def linear_quadratic(steps: int, shift: float) -> list[float]:
    """Return Mochi's levels: half of the steps remove 2.5 % of the noise, the others more and more of it."""
    if steps == 1:
        return [1.0, 0.0]
    half, rest = steps // 2, steps - steps // 2
    bend = (half - _LINEAR_NOISE * steps) / (half * rest**2)
    slope = _LINEAR_NOISE / half - 2 * (half - _LINEAR_NOISE * steps) / rest**2
    removed = [step * _LINEAR_NOISE / half for step in range(half)]
    removed += [bend * step**2 + slope * step + bend * half**2 for step in range(half, steps)]
    return _float32([1.0 - share for share in [*removed, 1.0]])


def bong_tangent(steps: int, shift: float) -> list[float]:
    """Return RES4LYF's levels: two arcs of an arctangent, that meet at 0.5. They follow no shift."""
    if steps < 2:
        raise ValueError("bong_tangent takes at least 2 steps.")
    points = steps + 2
    pivot, slope = int(points * _BONG_PIVOT), _BONG_SLOPE / (points / 40)
    first = int((points * _BONG_PIVOT + points * _BONG_PIVOT) / 2)
    upper = _arc(first, slope, pivot, 1.0, 0.5)
    return _float32(upper[:-1] + _arc(points - first, slope, pivot - first, 0.5, 0.0))


SCHEDULES: Mapping[str, Callable[[int, float], list[float]]] = {
    "simple": simple,
    "sgm_uniform": sgm_uniform,
    "beta": beta,
    "karras": karras,
    "linear_quadratic": linear_quadratic,
    "bong_tangent": bong_tangent,
}


def _table(shift: float) -> torch.Tensor:
    return shifted(shift, torch.arange(1, _LEVELS + 1, 1) / _LEVELS)


def _arc(points: int, slope: float, pivot: int, start: float, end: float) -> list[float]:
    """Return an arctangent's values at whole numbers, stretched to go from `start` to `end`."""
    heights = [(2 / math.pi * math.atan(-slope * (at - pivot)) + 1) / 2 for at in range(points)]
    span = heights[0] - heights[-1]
    return [(height - heights[-1]) / span * (start - end) + end for height in heights]


def _float32(values: list[float]) -> list[float]:
    rounded: list[float] = torch.tensor(values, dtype=torch.float32).tolist()
    return rounded


@functools.cache
def _beta_quantile(share: float) -> float:
    """Return the quantile of the symmetric beta distribution, by halving. It is rounded to a level of the table."""
    if share in (0.0, 0.5, 1.0):
        return share
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_share(middle) < share else (low, middle)
    return (low + high) / 2


def _beta_share(value: float) -> float:
    """Return the share of the symmetric beta distribution below `value`: its series at 0, which converges below 1/2."""
    if value > 0.5:
        return 1.0 - _beta_share(1.0 - value)
    total, term, count = 0.0, 1.0, 0
    while count < 200 and abs(term) > 1e-18:
        total += term / (_BETA + count)
        count += 1
        term *= (count - _BETA) / count * value
    whole = math.gamma(_BETA) ** 2 / math.gamma(2 * _BETA)
    return float(value**_BETA * total / whole)
