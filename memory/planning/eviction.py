"""Which units give up what when room is short. Pure functions: sizes and future uses in, bytes out.

Evicting costs nothing (the host copy is the truth, and files are that of the host copy), so what counts is the bytes
that have to be loaded again. Units leave in parts: when the running graph tells the coming uses, the bytes whose next
use is farthest go (Belady's rule, which is optimal for what can be divided); when it does not, the least recently used.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Use:
    """A coming run of one unit: its weights, and what it needs beside them, in bytes."""

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

    `resident` maps the units that may leave, wholly or in part, to their bytes, least recently used first;
    `capacity_bytes` is what they and `wanted` may hold together. `future` is what runs after `wanted`, in order, or
    None when unknown. The `cached`, which nobody refers to, leave before any other does. If even that is
    too little, all of them leave.
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
    """Return the bytes that a unit may hold without taking them from any that runs before it does again.

    Nor does it take any from those that are `staying`; nor from any other as long as nobody can tell. `held` are the
    bytes of all, out of `capacity_bytes`. For `told` and `ended` see `runs_sooner`.
    """
    sooner = runs_sooner(unit, told, ended)
    others = (other for other in held if other != unit and (sooner is None or other in sooner or other in staying))
    return capacity_bytes - sum(held[other] for other in others)


def runs_sooner(unit: Key, told: Sequence[Key], ended: Sequence[Collection[Key]]) -> set[Key] | None:
    """Return the units that run before one does again, None where nobody can tell.

    `told` are those that run next, in order, and `ended` those of the last stages. What is told counts first. After it
    runs repeat: what ran since the unit last did comes again. Runs of a unit that follow each other, as those of a
    list do, count as one.
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
    """Nearest next use first; units that are not used again come last, in the order given."""
    next_use = {use.unit: i for i, use in reversed(list(enumerate(future)))}
    return sorted(units, key=lambda unit: next_use.get(unit, len(future)))
