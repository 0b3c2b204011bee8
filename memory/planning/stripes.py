"""Runs in stripes: how high these are, what is kept where, how long it takes. Pure functions: no tensor, no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

_WORTH = 3  # what copies save must be one part in so many of what they take, or more
_LEAST_SHARE = 16  # fewer rows on the device than one in so many are not worth the groups


def stripe_height(rows: int, budget_bytes: int, peak_bytes: Callable[[int], int], grain: int = 1) -> int:
    """Return the height of the stripes that a map of `rows` rows is made in, within `budget_bytes`.

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


def blocks(rows: int, height: int) -> list[tuple[int, int]]:
    """Where blocks of that height start and stop; the last one may be lower."""
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def stripes(rows: int, height: int) -> list[tuple[int, int]]:
    """Where stripes start and stop. All have that height, so that kernels are chosen once: the last one begins among
    the rows of the one before it. ValueError for a height that is not within 1 and `rows`.
    """
    if not 1 <= height <= rows:
        raise ValueError(f"stripes of {rows} rows are 1 to {rows} high, not {height}")
    return [(start, start + height) for start in (min(start, rows - height) for start in range(0, rows, height))]


def device_rows(rows: int, row_bytes: int, spare_bytes: int) -> int:
    """Return how many rows of a map that is kept stay on the device, where so many bytes are spare.

    The others lie in RAM.
    """
    fitting = min(rows, max(0, spare_bytes) // max(1, row_bytes))
    return fitting if fitting * _LEAST_SHARE >= rows else 0


def is_cheaper_made(operations: float, later: float, moved_bytes: float, operations_per_byte: float) -> bool:
    """Return whether making a map again takes less time than moving it to RAM in one pass, and back in the next.

    Computing and copies go on at once: what hides behind the `operations` that make the map, or behind those `later`
    of what follows from it, costs nothing. `operations_per_byte`: how many a device does in the time that a byte takes
    to come. Moving must save a third of what the copies take: RAM is short, too.
    """
    copies = moved_bytes * operations_per_byte
    saved = 2 * operations + later - max(operations, copies) - max(later, copies)
    return saved < 2 * copies / _WORTH


@dataclass(frozen=True)
class Pass:
    """The costs of one pass over a map: operations, and bytes to the device and from it. All three overlap.

    `exposed_bytes` of them nothing overlaps with: what the first stripe is made from, and what the last one leaves.
    """

    operations: float
    h2d_bytes: float
    d2h_bytes: float
    exposed_bytes: float = 0.0

    def scaled(self, times: float) -> Pass:
        """Return the costs of `times` passes."""
        return Pass(*(times * each for each in astuple(self)))

    def seconds(self, operations_per_second: float, bytes_per_second: float) -> float:
        """As long as the longest of the three; copies in one direction do not wait for those in the other."""
        copies = (max(self.h2d_bytes, self.d2h_bytes) - self.exposed_bytes) / bytes_per_second
        return max(self.operations / operations_per_second, copies) + self.exposed_bytes / bytes_per_second


def seconds(passes: Iterable[Pass], operations_per_second: float, bytes_per_second: float) -> float:
    """Return how long passes take one after the other."""
    return sum(one.seconds(operations_per_second, bytes_per_second) for one in passes)
