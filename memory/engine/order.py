"""The order in which weight groups are called, learnt from the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Remembers which group is called after which; used for prefetch.

    At first each is followed by its neighbour in `groups`, and the last by the first. Each of `kinds` is a test that
    selects groups, such as those that stream. After a change of their results, `forget` must be called.
    """

    def __init__(self, groups: Sequence[T], *kinds: Callable[[T], bool]) -> None:
        self._kinds = kinds
        self._after = {group: groups[(i + 1) % len(groups)] for i, group in enumerate(groups)}
        self._last: T | None = None
        self._answers: dict[tuple[T, int], list[T]] = {}

    def called(self, group: T) -> None:
        """Note that a group is called now, and that it follows the one noted before."""
        last, self._last = self._last, group
        if last is not None and last is not group and self._after[last] is not group:
            self._after[last] = group
            self._answers.clear()

    def lost(self) -> None:
        """Note that the next group called does not follow the last one, as after an error."""
        self._last = None

    def forget(self) -> None:
        """Discard cached answers, since the groups that the tests select have changed."""
        self._answers.clear()

    def after(self, group: T, count: int, kind: int = 0) -> list[T]:
        """Return the next `count` groups of a kind that are called after `group`, or fewer: each at most once.

        Answers are cached by group and kind, so `count` must stay the same until `forget`.
        """
        if (group, kind) not in self._answers:
            found: list[T] = []
            following = group
            for _ in self._after:  # one round at most: the learnt order may be a circle that misses groups
                following = self._after[following]
                if self._kinds[kind](following) and following not in found:
                    found.append(following)
                    if len(found) == count:
                        break
            self._answers[group, kind] = found
        return self._answers[group, kind]
