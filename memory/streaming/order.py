"""The order in which blocks are called, learnt as it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Which block is called after which. At first the one that stands next, and after the last one the first.

    `wanted` tells which blocks one is asked for; `forget` must be called when its answers have changed.
    """

    def __init__(self, blocks: Sequence[T], wanted: Callable[[T], bool]) -> None:
        self._wanted = wanted
        self._after = {block: blocks[(i + 1) % len(blocks)] for i, block in enumerate(blocks)}
        self._last: T | None = None
        self._answers: dict[T, list[T]] = {}

    def called(self, block: T) -> None:
        """Note that a block is called now."""
        last, self._last = self._last, block
        if last is not None and last is not block and self._after[last] is not block:
            self._after[last] = block
            self._answers.clear()

    def lost(self) -> None:
        """Note that what is called next does not follow what was called last."""
        self._last = None

    def forget(self) -> None:
        """Note that other blocks are wanted, or more of them."""
        self._answers.clear()

    def after(self, block: T, count: int) -> list[T]:
        """The next blocks that are wanted, up to so many, once around at most."""
        if block not in self._answers:
            found: list[T] = []
            following = block
            for _ in self._after:
                following = self._after[following]
                if self._wanted(following) and following not in found:
                    found.append(following)
                    if len(found) == count:
                        break
            self._answers[block] = found
        return self._answers[block]
