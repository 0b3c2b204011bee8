"""Which groups are dequantized for good: those that save most for their bytes, alike ones spread."""

from __future__ import annotations

from ballast.memory.planning.kept_dequantized import dequantizing_order
from ballast.memory.planning.solver import GroupLoad


def test_those_that_save_most_come_first_and_alike_ones_lie_evenly() -> None:
    alike = [GroupLoad(10, 10, 1.0, 0.5, 30) for _ in range(8)]
    better, plain = GroupLoad(10, 10, 1.0, 0.5, 10), GroupLoad(10, 10, 1.0)
    assert dequantizing_order(alike) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert dequantizing_order([*alike[:4], better, *alike[4:], plain])[0] == 4
    assert 9 not in dequantizing_order([*alike[:4], better, *alike[4:], plain])
