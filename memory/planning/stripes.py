"""Decide how a map is computed in stripes: their height, where rows are kept, how long it takes.

Pure functions: no tensor, no device. A map is an activation of a VAE, `rows` high. `memory.striped` calls these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

_WORTH = 3  # moving must save at least 1/3 of the time that its copies take
_LEAST_SHARE = 16  # if less than 1/16 of the rows fit on the device, all of them lie in RAM


def stripe_height(rows: int, budget_bytes: int, peak_bytes: Callable[[int], int], grain: int = 1) -> int:
    """Return the height in rows of the stripes in which a map of `rows` rows is made within `budget_bytes`.

    `peak_bytes(n)` is the peak of making n rows, halo and result included; it must not fall as n grows. Stripes are as
    few as the budget allows, then as equal as possible. Their height is a multiple of `grain` if that many rows fit.
    The result is at least 1, even if one row does not fit: the device has the last word. Raises ValueError for `rows` <
    1.
    """
    if rows < 1:
        raise ValueError(f"a map has at least 1 row, not {rows}")
    if peak_bytes(rows) <= budget_bytes:
        return rows
    least, most = 1, rows  # bisect: `least` fits, if any height does, and `most` does not
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
    """Return the start and stop of each block of `height` rows. The last one may be lower."""
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def stripes(rows: int, height: int) -> list[tuple[int, int]]:
    """Return the start and stop of each stripe. All have exactly `height` rows, so that kernels are chosen once.

    The last stripe therefore overlaps the one before it. Raises ValueError for a height outside 1 to `rows`.
    """
    if not 1 <= height <= rows:
        raise ValueError(f"stripes of {rows} rows are 1 to {rows} high, not {height}")
    return [(start, start + height) for start in (min(start, rows - height) for start in range(0, rows, height))]


def device_rows(rows: int, row_bytes: int, spare_bytes: int) -> int:
    """Return the number of rows of a kept map that stay on the device, if `spare_bytes` are spare there.

    The other rows lie in RAM. The result is 0 if less than 1/16 of the rows fit.
    """
    fitting = min(rows, max(0, spare_bytes) // max(1, row_bytes))
    return fitting if fitting * _LEAST_SHARE >= rows else 0


def is_cheaper_made(operations: float, later: float, moved_bytes: float, operations_per_byte: float) -> bool:
    """Return whether making a map again is faster than moving it to RAM in one pass and back in the next.

    Copies overlap with computing. So a copy costs nothing while it hides behind the `operations` that make the map, or
    behind the `later` ones of what follows from it. `operations_per_byte` is the number of operations that a device
    does in the time of copying one byte. Moving must save a third of what its copies take, because RAM is short, too.
    """
    copies = moved_bytes * operations_per_byte
    saved = 2 * operations + later - max(operations, copies) - max(later, copies)
    return saved < 2 * copies / _WORTH


@dataclass(frozen=True)
class Pass:
    """The costs of one pass over a map: operations, and bytes to the device and back. All three overlap.

    With `exposed_bytes` of them nothing overlaps: the input of the first stripe and the result of the last one.
    """

    operations: float
    h2d_bytes: float
    d2h_bytes: float
    exposed_bytes: float = 0.0

    def scaled(self, times: float) -> Pass:
        """Return the costs of `times` passes."""
        return Pass(*(times * each for each in astuple(self)))

    def seconds(self, operations_per_second: float, bytes_per_second: float) -> float:
        """Return the seconds of the pass: the longest of computing and the copies of either direction.

        Copies in one direction do not wait for those in the other. The exposed bytes are added to the longest.
        """
        copies = (max(self.h2d_bytes, self.d2h_bytes) - self.exposed_bytes) / bytes_per_second
        return max(self.operations / operations_per_second, copies) + self.exposed_bytes / bytes_per_second


def seconds(passes: Iterable[Pass], operations_per_second: float, bytes_per_second: float) -> float:
    """Return the seconds of passes that run one after the other."""
    return sum(one.seconds(operations_per_second, bytes_per_second) for one in passes)
