"""Which of a test's cases run always. The others run in `make soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# Three that differ in shape: two streams of blocks, routed experts, video with two experts for noise.
THREE = ("flux", "hidream", "wan")


def few(values: Iterable[Any], *always: Any) -> list[Any]:
    """Return the values as parameters of a test; all but `always` are of the soak."""
    return [value if value in always else pytest.param(value, marks=pytest.mark.soak) for value in values]
