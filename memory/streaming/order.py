"""The order in which pieces are called, learnt as it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Which piece is called after which. At first the one that stands next, and after the last one the first.

    Each of `kinds` tells which pieces one is asked for; `forget` must be called when their answers have changed.
    """

    def __init__(self, pieces: Sequence[T], *kinds: Callable[[T], bool]) -> None:
        self._kinds = kinds
        self._after = {piece: pieces[(i + 1) % len(pieces)] for i, piece in enumerate(pieces)}
        self._last: T | None = None
        self._answers: dict[tuple[T, int], list[T]] = {}

    def called(self, piece: T) -> None:
        """Note that a piece is called now."""
        last, self._last = self._last, piece
        if last is not None and last is not piece and self._after[last] is not piece:
            self._after[last] = piece
            self._answers.clear()

    def lost(self) -> None:
        """Note that what is called next does not follow what was called last."""
        self._last = None

    def forget(self) -> None:
        """Note that other pieces are wanted, or more of them."""
        self._answers.clear()

    def after(self, piece: T, count: int, kind: int = 0) -> list[T]:
        """Return the next pieces of a kind, up to so many, once around at most."""
        if (piece, kind) not in self._answers:
            found: list[T] = []
            following = piece
            for _ in self._after:
                following = self._after[following]
                if self._kinds[kind](following) and following not in found:
                    found.append(following)
                    if len(found) == count:
                        break
            self._answers[piece, kind] = found
        return self._answers[piece, kind]
