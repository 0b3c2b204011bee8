"""The order in which groups are called, learnt as it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Which group is called after which. At first the one that stands next, and after the last one the first.

    Each of `kinds` tells which groups one is asked for; `forget` must be called when their answers have changed.
    """

    def __init__(self, groups: Sequence[T], *kinds: Callable[[T], bool]) -> None:
        self._kinds = kinds
        self._after = {group: groups[(i + 1) % len(groups)] for i, group in enumerate(groups)}
        self._last: T | None = None
        self._answers: dict[tuple[T, int], list[T]] = {}

    def called(self, group: T) -> None:
        """Note that a group is called now."""
        last, self._last = self._last, group
        if last is not None and last is not group and self._after[last] is not group:
            self._after[last] = group
            self._answers.clear()

    def lost(self) -> None:
        """Note that what is called next does not follow what was called last."""
        self._last = None

    def forget(self) -> None:
        """Note that other groups are wanted, or more of them."""
        self._answers.clear()

    def after(self, group: T, count: int, kind: int = 0) -> list[T]:
        """Return the next groups of a kind, up to so many, once around at most."""
        if (group, kind) not in self._answers:
            found: list[T] = []
            following = group
            for _ in self._after:
                following = self._after[following]
                if self._kinds[kind](following) and following not in found:
                    found.append(following)
                    if len(found) == count:
                        break
            self._answers[group, kind] = found
        return self._answers[group, kind]
