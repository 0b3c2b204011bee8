"""Which sections there are, in the order of what must not be missing, and the time that each has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MALLOC_ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
_QUARTERS = [0.0, 0.25, 0.5, 0.75]
_ENGINE: dict[str, Any] = {"ratios": [0.3, 1.0], "shares": _QUARTERS, "weights": ["auto", "exact12"]}


@dataclass(frozen=True)
class Job:
    """A section: the module of this folder that runs it, what it is asked for, and `dry`, what it is asked for then.

    `weight` is its part of the time, `least` the seconds that it is begun with.
    """

    worker: str
    weight: float
    least: float
    request: Mapping[str, Any] = field(default_factory=dict)
    dry: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


JOBS: dict[str, Job] = {
    "card": Job("card", 20, 12),
    "newbie": Job("engine", 90, 40, {"size": "newbie", **_ENGINE}, {"size": "tiny-newbie", "ratios": [1.0]}),
    "tests": Job("tests", 60, 30, dry={"select": "encoded or survived or stripes"}),
    "plans": Job("plans", 90, 50),
    "newbie-peers": Job("peers", 100, 60, {"size": "newbie"}, {"size": "tiny-newbie", "ways": ["naive"]}),
    "decode": Job(
        "decode", 50, 25, {"sides": [1024, 2048], "budgets": [3 * 2**29, 3 * 2**30]},
        {"sides": [64, 128], "budgets": [2**20]},
    ),
    "malloc-async": Job(
        "engine", 30, 20, {"size": "newbie", "ratios": [1.0], "shares": [0.5], "weights": ["auto"]},
        {"size": "tiny-newbie"}, MALLOC_ASYNC,
    ),
    "hidream": Job(
        "engine", 100, 70, {"size": "hidream", **_ENGINE},
        {"size": "tiny-hidream", "ratios": [1.0], "shares": [0.0, 0.5]},
    ),
    "hidream-peers": Job("peers", 110, 80, {"size": "hidream"}, {"size": "tiny-hidream", "ways": []}),
}  # fmt: skip


def chosen(only: Collection[str] | None) -> list[str]:
    """Return the sections to run. What the card is belongs to all. Raises ValueError for a name that is not known."""
    if unknown := set(only or ()) - set(JOBS):
        raise ValueError(f"--only has {', '.join(sorted(unknown))}. Known are {', '.join(JOBS)}.")
    return [name for name in JOBS if not only or name in only or name == "card"]


def share(names: Sequence[str], left: float) -> float:
    """Seconds that the first of these sections may take of those that are left: what one does not need others get."""
    return left * JOBS[names[0]].weight / sum(JOBS[name].weight for name in names)
