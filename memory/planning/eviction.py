"""Decide which units give up how many bytes when room is short. Pure functions: sizes and future uses in, bytes out.

Evicting costs nothing: the host copy, or the file behind it, stays the truth. The cost is the bytes that must be loaded
again. Units leave in parts. If the running graph tells the coming uses, the bytes with the farthest next use go first.
That is Belady's rule, which is optimal for divisible units. Otherwise the least recently used go first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Use:
    """A coming run of one unit: the bytes of its weights, and of its working memory beside them."""

    unit: Hashable
    size_bytes: int
    working_bytes: int = 0


def choose_shrinks(
    resident: Mapping[Key, int],
    capacity_bytes: int,
    wanted: Use,
    future: Sequence[Use] | None = None,
    cached: Set[Key] = frozenset(),
) -> dict[Key, int]:
    """Return the bytes that units must give up so that `wanted` fits.

    `resident` maps the units that may leave, wholly or in part, to their bytes, least recently used first.
    `capacity_bytes` is what they and `wanted` may hold together. `future` lists the runs after `wanted` in order, or is
    None if unknown. Units in `cached`, which nobody refers to, give up theirs before any other. If even everything is
    too little, the result names everything. Used for VRAM by `residency` and for RAM by `host_cache`.
    """
    others = {unit: size for unit, size in resident.items() if unit != wanted.unit}
    missing = sum(others.values()) - (capacity_bytes - wanted.size_bytes - wanted.working_bytes)
    leaving = list(others) if future is None else list(reversed(_by_next_use(list(reversed(others)), future)))
    found: dict[Key, int] = {}
    for unit in sorted(leaving, key=lambda unit: unit not in cached):
        if missing > 0:
            found[unit] = min(others[unit], missing)
            missing -= found[unit]
    return found


def free_for(
    unit: Key,
    capacity_bytes: int,
    held: Mapping[Key, int],
    staying: Set[Key],
    told: Sequence[Key],
    ended: Sequence[Collection[Key]],
) -> int:
    """Return the bytes that a unit may hold without taking any from a unit that runs before it does again.

    Units in `staying` are not asked either. If nobody can tell which units run sooner, no other unit is. `held` maps
    all units to their bytes, out of `capacity_bytes`. For `told` and `ended` see `runs_sooner`. The result may be
    negative.
    """
    sooner = runs_sooner(unit, told, ended)
    others = (other for other in held if other != unit and (sooner is None or other in sooner or other in staying))
    return capacity_bytes - sum(held[other] for other in others)


def runs_sooner(unit: Key, told: Sequence[Key], ended: Sequence[Collection[Key]]) -> set[Key] | None:
    """Return the units that run before `unit` does again; None if nobody can tell.

    `told` lists the next runs in order and counts first. `ended` lists the units of the last stages, oldest first.
    After `told`, runs are taken to repeat: units that ran since `unit` last did come again. Consecutive runs of `unit`,
    such as those of a list of prompts, count as one.
    """
    sooner: set[Key] = set()
    for other in dropwhile(lambda other: other == unit, told):
        if other == unit:
            return sooner
        sooner.add(other)
    for stage in dropwhile(lambda stage: unit in stage, reversed(ended)):
        sooner.update(stage)
        if unit in stage:
            return sooner - {unit}
    return None


def _by_next_use(units: Iterable[Key], future: Sequence[Use]) -> list[Key]:
    """Return the units, nearest next use first. Units without a next use come last, in the order given."""
    next_use = {use.unit: i for i, use in reversed(list(enumerate(future)))}
    return sorted(units, key=lambda unit: next_use.get(unit, len(future)))
