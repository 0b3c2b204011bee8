"""How many rows a stripe has. Pure functions: no tensor, no device."""

from __future__ import annotations

from collections.abc import Callable


def stripe_height(rows: int, budget_bytes: int, peak_bytes: Callable[[int], int], grain: int = 1) -> int:
    """The height of the stripes that a map of `rows` rows is made in, within `budget_bytes`.

    `peak_bytes` says what making so many rows takes at most, halo and result included, and does not fall as they grow.
    Stripes are as few as the budget allows and then as equal as can be, in multiples of `grain` where that many rows
    fit. At least 1 row, also where that does not fit: the device has the last word. Raises ValueError for `rows` < 1.
    """
    if rows < 1:
        raise ValueError(f"a map has at least 1 row, not {rows}")
    if peak_bytes(rows) <= budget_bytes:
        return rows
    least, most = 1, rows  # what is tried fits from `least` on, as far as anything does, and does not at `most`
    while most - least > 1:
        middle = (least + most) // 2
        if peak_bytes(middle) <= budget_bytes:
            least = middle
        else:
            most = middle
    count = -(-rows // least)
    even = -(-rows // count)
    if grain == 1 or least < grain:
        return even
    rounded = -(-even // grain) * grain
    return rounded if rounded <= least else least // grain * grain


def stripes(rows: int, height: int) -> list[tuple[int, int]]:
    """Where stripes of that height start and stop; the last one may be lower."""
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]
